"""Workers of data loaders compute as they would without a session, however they are started.

Native defect: a worker that is forked, as on Linux by default, inherits the autocast of the thread that iterates, so
that with casting on for the process its matrix products came out in low precision, and targets with them. One that is
spawned does not, and neither does a thread.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch.utils.data._utils import worker

_loop = worker._worker_loop


@wraps(_loop)  # by whose name it is sent to spawned workers, which then run torch's own
def _loop_uncast(*args: Any, **kwargs: Any) -> Any:
    torch.set_autocast_enabled("cpu", False)
    return _loop(*args, **kwargs)


def keep_uncast() -> None:
    """Have loaders that are iterated from now on start workers with casting off."""
    worker._worker_loop = _loop_uncast


def release() -> None:
    """Undo `keep_uncast`."""
    worker._worker_loop = _loop
