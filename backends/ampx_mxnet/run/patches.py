"""The region in which MXNet is patched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ampx.run import Run
from ampx.session import sessions
from ampx_mxnet import amp

from .backward import backward_scaled
from .gradients import gradients_true
from .manager import Manager, trainers_managed
from .operations import blocks_watched


@contextmanager
def automate(run: Run) -> Iterator[None]:
    """Patch MXNet for an unedited script: see `ampx.run`.

    Sync: none; inside, as the wrapped trainers do.
    """
    manager = Manager(run)
    with ExitStack() as stack:
        for patched in (trainers_managed, backward_scaled, gradients_true, blocks_watched):
            stack.enter_context(patched(manager))
        amp.install()
        stack.callback(amp.uninstall)
        stack.callback(_end, manager)  # first of all: casting puts back what it found, which is patched here
        yield


def _end(manager: Manager) -> None:
    manager.run.close()
    own = sessions.get("mxnet")
    if manager.stood_down and own is not None:
        own.shutdown()
