"""`ampx run` in MXNet: a script that knows nothing of ampx trains in mixed precision.

The script is not ours to edit: MXNet is patched, and every patch ends with the region that `automate` opens:

- `manager`: `gluon.Trainer.__init__`, so that every trainer of the script gets a loss scale;
- `backward`: the two functions that run backward, so that the loss is scaled;
- `gradients`: the ways to a gradient, so that the script sees unscaled gradients only;
- `operations`: the call of blocks, to tell what ran in which dtype.

`ampx_mxnet.amp` stands in for MXNet's own amp meanwhile: a script that uses that runs on ampx.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ampx.rooms import import_part, is_there
from ampx.run import Automation, Run

from .backward import backward_scaled
from .gradients import gradients_true
from .manager import TrainerManager, trainers_managed
from .operations import blocks_watched


@contextmanager
def automate(run: Run) -> Iterator[None]:
    """Patch MXNet for a script that is not edited: see `ampx.run`."""
    run.refuse_preparation()
    manager = TrainerManager(run)
    with ExitStack() as stack:
        for patched in (trainers_managed, backward_scaled, gradients_true, blocks_watched):
            stack.enter_context(patched(manager))
        if is_there("ampx_mxnet.old"):
            amp = import_part("ampx_mxnet.amp", "ampx run")
            amp.install()
            stack.callback(amp.uninstall)
        stack.callback(manager.end)  # first of all: casting puts back what it found, which is patched here
        yield


class MXNetAutomation(Automation):
    """Patches the framework: see `automate`."""

    automate = staticmethod(automate)
