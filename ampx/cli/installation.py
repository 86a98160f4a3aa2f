"""Whether `ampx` is this package: another distribution, called `ampx`, installs a module of the same name."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Final

DISTRIBUTION: Final = "ampx-precision"
REPAIR: Final = f"Run `pip uninstall ampx`, then `pip install --force-reinstall --no-deps {DISTRIBUTION}`"


def module_problem() -> str | None:
    """Return what is wrong where the module `ampx` is not ours, though its command is; None where it is ours."""
    module = sys.modules["ampx"]
    if "_homes" in vars(module):
        return None
    path = getattr(module, "__file__", None)
    what = f"{path} is of another package" if path else f"the __init__.py of {next(iter(module.__path__))} is missing"
    return (
        f"{what}; accepted: what {DISTRIBUTION} installs. A distribution called ampx, which has nothing to do with it, "
        f"was installed or uninstalled after it. {REPAIR}."
    )


def other_distributions() -> list[dict[str, str]]:
    """List the distributions called `ampx` that are not ours: name, version, summary and folder of each."""
    others = {}
    for distribution in importlib.metadata.distributions(name="ampx"):
        # Ours was called so before it was first released; it registers backends.
        if not any(point.group == "ampx" for point in distribution.entry_points):
            folder = str(Path(str(distribution.locate_file(""))).resolve())  # a folder may be on the path twice
            others[folder] = {
                "name": "ampx",
                "version": distribution.version,
                "summary": (distribution.metadata.get_all("Summary") or [""])[0],
                "folder": folder,
            }
    return list(others.values())
