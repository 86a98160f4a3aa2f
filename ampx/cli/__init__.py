"""The `ampx` command.

Importing this package imports nothing beyond the standard library, so that a missing extra ends in a
sentence and not in a traceback.
"""

from __future__ import annotations

import sys

_EXTRAS = {"typer": "cli", "rich": "cli", "sklearn": "demo", "matplotlib": "demo"}


def main() -> int:
    """Run the command line; give the exit code."""
    try:
        from .app import run

        return run()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        extra = _EXTRAS.get(missing)
        if extra is None:
            raise
        sys.stderr.write(
            f"ampx: this command needs {missing}, which is not installed. Install it with "
            f"`pip install 'ampx[{extra}]'`.\n"
        )
        return 2
