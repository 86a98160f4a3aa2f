"""The region in which torch is patched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ampx.run import Run

from .backward import backward_scaled
from .gradients import gradients_true
from .manager import TorchManager, optimizers_managed
from .native import autocast_watched
from .old_names import old_names
from .scaler import scaler_watched


@contextmanager
def automate(run: Run) -> Iterator[None]:
    """Patch torch for an unedited script: see `ampx.run`."""
    run.refuse_preparation()
    manager = TorchManager(run)
    try:
        with ExitStack() as stack:
            stack.enter_context(old_names(manager))
            if run.settings.stand_ins_only:
                yield
                return
            for patched in (optimizers_managed, backward_scaled, gradients_true, autocast_watched, scaler_watched):
                stack.enter_context(patched(manager))
            yield
    finally:
        run.close()
