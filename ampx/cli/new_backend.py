"""What `ampx new-backend` does: write the package of a backend to fill in."""

from __future__ import annotations

import keyword
import re
import shutil
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import packages_distributions
from pathlib import Path
from string import Template
from typing import Final

from ampx.errors import InvalidOptionError
from ampx.plugins import default_registry

SCHEMA: Final = "ampx.new-backend/1"
_NAME: Final = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@dataclass(frozen=True)
class Written:
    """One file of the new package."""

    path: Path  # where it is
    purpose: str  # what it is for, and what is left to do in it


# By template: where the file goes inside the package, and what it is for.
_FILES: Final = {
    "pyproject.toml.txt": ("pyproject.toml", "the distribution; check its dependencies"),
    "README.md.txt": ("README.md", "what its users read"),
    "__init__.py.txt": ("src/$package/__init__.py", "the plugin; check roots and requires"),
    "backend.py.txt": ("src/$package/backend.py", "the verbs, to be written"),
    "test_conformance.py.txt": ("tests/test_conformance.py", "the harness, to be written"),
}


def write_package(name: str, parent: Path) -> tuple[Path, list[Written]]:
    """Write the package for a framework."""
    words = _check_name(name)
    distribution = "-".join(("ampx", *words))
    folder = parent / distribution
    names = {
        "name": name,
        "package": f"ampx_{name}",
        "distribution": distribution,
        "class_name": "".join(word.capitalize() for word in words),
        **_requirement(name),
    }
    templates = resources.files(__package__) / "new_backend_template"
    written = []
    try:
        folder.mkdir(parents=True)
        for source, (target, purpose) in _FILES.items():
            path = folder / Template(target).substitute(names)
            path.parent.mkdir(parents=True, exist_ok=True)
            text = (templates / source).read_text(encoding="utf-8")
            path.write_text(Template(text).substitute(names), encoding="utf-8")
            written.append(Written(path, purpose))
    except FileExistsError as error:
        raise InvalidOptionError(
            f"{str(folder)!r} is there already and is left as it is; accepted: a folder in which there is no "
            f"{distribution}. Move it away, or pass another with --out."
        ) from error
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)  # half a package is none
        raise InvalidOptionError(
            f"{str(folder)!r} cannot be written: {error.strerror}; accepted: a folder that you may write to. Pass "
            f"another with --out."
        ) from error
    return folder, written


def _requirement(name: str) -> dict[str, str]:
    """Return what the package says of the distribution that the framework comes from.

    It is not guessed from the name of the module, which may be another project's on the package index.
    """
    distributions = sorted(set(packages_distributions().get(name, ())))
    requires = distributions[0] if len(distributions) == 1 else ""
    if requires:
        return {"and_framework": f', "{requires}"', "note": "", "requires": requires}
    return {"and_framework": "", "note": f"  # and the distribution that {name} comes from", "requires": name}


def _check_name(name: str) -> list[str]:
    """Return the words of a name."""
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise InvalidOptionError(
            f"NAME {name!r} cannot be the name of a module; accepted: what Python users import, in lower case letters, "
            f"digits and single underscores, beginning with a letter. Pass for example mylib or my_lib."
        )
    registry = default_registry()
    if name in registry.names():
        raise InvalidOptionError(
            f"NAME {name!r} is taken: plugin {registry.registration(name).plugin!r} registers that framework; "
            f"accepted: one plugin a framework. Pass another name, or uninstall that plugin."
        )
    return name.split("_")
