"""What a process imports first that multiprocessing starts afresh while `ampx run` runs its parent.

As a program it runs one that the parent has started again: `python -m ampx.run.preloaded script.py --its --arguments`.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from contextlib import ExitStack

from . import children
from .program import Program, run_program
from .run import RunSettings
from .supervisor import Finished, automated

_entered = ExitStack()
atexit.register(_entered.close)  # before Python takes its modules apart


def _enter(message: str) -> Finished:
    """Automate the frameworks that this process imports from now on, as its parent says."""
    settings = json.loads(message)
    finished = Finished(folder=settings["folder"])
    _entered.enter_context(children.handed_on(finished, message))
    _entered.enter_context(automated(finished, RunSettings(**settings["settings"]), settings["framework"]))
    return finished


def main(words: list[str]) -> int:
    """Run the program that the words after `python` start, and leave a report; return the exit code."""
    finished = _enter(os.environ[children.VARIABLE])
    is_module = words[0] == "-m"
    name, *arguments = words[1:] if is_module else words
    error = finished.error = run_program(Program(name, is_module, tuple(arguments)))
    children.leave_report(finished, f"{os.path.basename(name)}, process {os.getpid()}")
    if isinstance(error, SystemExit):
        raise error
    if error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
    return 0 if error is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
if children.VARIABLE in os.environ:
    _enter(os.environ[children.VARIABLE])
