"""`ampx run` in PyTorch: a script that knows nothing of ampx trains in mixed precision.

The script is not ours to edit: torch is patched, and every patch ends with the region that `automate` opens:

- `manager`: `torch.optim.Optimizer.__init__`, so that every optimizer of the script gets a loss scale;
- `backward`: `torch.autograd.backward`, so that the loss is scaled for the optimizers it reaches;
- `gradients`: `torch.Tensor.grad`, hooks and backwards of the script's own, so that it sees unscaled gradients only;
- `modules`: `torch.nn.Module.__call__`, where `allow` or `deny` name modules;
- `native` and `scaler`: `torch.autocast` and `GradScaler`, which are refused, or carried out by ampx;
- `operations`: `torch.compile`, where a function is to be compiled whole;
- `accelerate`: `Accelerator.__init__`, whose fp16 on a CPU is carried out;
- `mistakes`: functions that clip gradients, and steps of optimizers that nobody wrapped, in a run that is looked at;
- plugins that stand in for old names, such as `ampx_apex`: `import apex`, which is provided where it is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ampx.run import Automation, Run

from .accelerate import accelerators_carried_out
from .backward import backward_scaled
from .gradients import gradients_unscaled
from .manager import TorchManager, optimizers_managed
from .mistakes import mistakes_named
from .modules import modules_ruled
from .native import autocast_watched
from .operations import whole_graphs_uncounted
from .scaler import scaler_watched


@contextmanager
def automate(run: Run) -> Iterator[None]:
    """Patch torch for a script that is not edited: see `ampx.run`."""
    run.refuse_preparation()
    patches = (
        *(optimizers_managed, backward_scaled, gradients_unscaled, modules_ruled),
        *(autocast_watched, scaler_watched, accelerators_carried_out, mistakes_named),
        whole_graphs_uncounted,
    )
    with TorchManager(run).region(*run.old_names(), *(patches if run.settings.automates else ())):
        yield


class TorchAutomation(Automation):
    """Patches the framework: see `automate`."""

    automate = staticmethod(automate)
