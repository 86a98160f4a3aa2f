"""The `ampx` command.

Importing this package imports nothing beyond the standard library, so that a missing extra ends in a
sentence and not in a traceback.
"""

from __future__ import annotations

import sys

_EXTRAS = {"sklearn": "demo", "matplotlib": "report", "numpy": "torch"}  # every other framework brings NumPy by itself


def main() -> int:
    """Run the command line; return the exit code."""
    from .installation import module_problem

    problem = module_problem()
    if problem is not None:  # before the commands: they import names that the other package does not have
        sys.stderr.write(f"ampx: {problem}\n")
        return 1
    try:
        from ampx.rooms import parts_needed

        from .app import run

        with parts_needed("this command"):
            return run()
    except ModuleNotFoundError as error:
        from ampx.errors import MissingPartError

        if isinstance(error, MissingPartError):
            sys.stderr.write(f"ampx: {error}\n")
            return 2
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        others = " (or the extra of another framework)" if missing == "numpy" else ""
        sys.stderr.write(
            f"ampx: this command needs {missing}, which is not installed. Install it with "
            f"`pip install 'ampx-precision[{_EXTRAS[missing]}]'`{others}.\n"
        )
        return 2
