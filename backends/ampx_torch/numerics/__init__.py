"""The precision debugger's verbs in PyTorch: read modules, force them into a dtype, compute a batch again.

- `reductions`: the numbers that a tensor is reduced to, on its device;
- `watching`: hooks on modules and their outputs, and a dispatch mode for operations;
- `forcing`: hooks that switch casting for one module, and round values as a dtype would that this device lacks;
- `replaying`: a batch without a step, after which everything is as it was.
"""

from .forcing import SIMULATED, force
from .replaying import clock, replay
from .watching import watch

__all__ = ["SIMULATED", "clock", "force", "replay", "watch"]
