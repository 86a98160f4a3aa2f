"""`ampx run` in PaddlePaddle: a script that knows nothing of ampx trains in mixed precision.

The script is not ours to edit: Paddle is patched, and every patch ends with the region that `automate` opens:

- `manager`: the constructors of optimizers, so that every optimizer of the script gets a loss scale;
- `backward`: the two functions that run backward, so that the loss is scaled;
- `gradients`: the ways to a tensor's gradient and hooks on gradients, so that the script sees unscaled gradients only;
- `numbers`: the ways from a tensor to NumPy, so that the script reads numbers of bfloat16 and no bits;
- `native`: Paddle's own `auto_cast`, `GradScaler` and `decorate`, which are refused;
- `static`: programs of static graphs, which are cast and scaled by `minimize`;
- plugins that stand in for old names, such as `ampx_fluid`: `import paddle.fluid`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ampx.run import Automation, Run

from .backward import backward_scaled
from .gradients import gradients_unscaled
from .manager import PaddleManager, optimizers_managed
from .native import native_refused
from .numbers import numbers_read
from .static import programs_watched


@contextmanager
def automate(run: Run) -> Iterator[None]:
    """Patch Paddle for a script that is not edited: see `ampx.run`."""
    run.refuse_preparation()
    patches = (optimizers_managed, backward_scaled, gradients_unscaled, numbers_read, native_refused)
    with PaddleManager(run).region(*patches, *run.old_names(), programs_watched):
        yield


class PaddleAutomation(Automation):
    """Patches the framework: see `automate`."""

    automate = staticmethod(automate)
