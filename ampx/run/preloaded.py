"""What a process imports first that multiprocessing starts afresh while `ampx run` runs its parent."""

from __future__ import annotations

import atexit
import json
import os
from contextlib import ExitStack

from . import children
from .run import RunSettings
from .supervisor import Finished, automated

_entered = ExitStack()
atexit.register(_entered.close)  # before Python takes its modules apart


def _enter(message: str) -> None:
    """Automate the frameworks that this process imports from now on, as its parent says."""
    settings = json.loads(message)
    finished = Finished(folder=settings["folder"])
    _entered.enter_context(children.handed_on(finished, message))
    _entered.enter_context(automated(finished, RunSettings(**settings["settings"]), settings["framework"]))


if children.VARIABLE in os.environ:
    _enter(os.environ[children.VARIABLE])
