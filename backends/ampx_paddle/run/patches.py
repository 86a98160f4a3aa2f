"""The region in which Paddle is patched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ampx.run import Run

from .backward import backward_scaled
from .gradients import gradients_true
from .manager import Manager, optimizers_managed
from .native import native_refused
from .static import programs_watched


@contextmanager
def automate(run: Run) -> Iterator[None]:
    """Patch Paddle for an unedited script: see `ampx.run`.

    Raises:
        RunRefusedError: Level O2 or O3 was asked for: which model to prepare cannot be told from outside.

    Sync: none; inside, as the wrapped optimizers do.
    """
    run.refuse_preparation()
    manager = Manager(run)
    try:
        with ExitStack() as stack:
            for patched in (optimizers_managed, backward_scaled, gradients_true, native_refused, programs_watched):
                stack.enter_context(patched(manager))
            yield
    finally:
        manager.release()
        run.close()
