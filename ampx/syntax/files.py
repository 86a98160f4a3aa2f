"""Find the Python files of a tree, and replace what a file holds."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from ampx.errors import InvalidOptionError

# Folders of installed or generated files.
_SKIPPED: Final = {"__pycache__", "build", "dist", "node_modules", "site-packages", "venv"}


def find(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the Python files below some paths, each once and sorted.

    Symbolic links are not followed, neither files nor folders; hidden folders and those of environments and builds
    are passed over. A file that is named is taken whatever its ending.
    """
    seen: set[Path] = set()
    for path in paths:
        if path.is_symlink():
            raise InvalidOptionError(f"{path} is a symbolic link; accepted: files and folders. Pass what it points to.")
        if not path.exists():
            raise InvalidOptionError(f"{path} is not there; accepted: files and folders. Check the spelling.")
        if path.suffix.lower() == ".ipynb":  # which Python would parse as a dict
            raise InvalidOptionError(
                f"{path} is a notebook; accepted: Python files, and folders. Convert it: "
                f"jupyter nbconvert --to script {path}"
            )
        if not path.is_file() and not path.is_dir():
            raise InvalidOptionError(f"{path} is neither a file nor a folder; accepted: these. Pass one.")
        for file in [path] if path.is_file() else _below(path):
            if file not in seen:
                seen.add(file)
                yield file


def _below(folder: Path) -> Iterator[Path]:
    for where, folders, files in os.walk(folder, followlinks=False):
        here = Path(where)
        folders[:] = sorted(
            name
            for name in folders
            if name not in _SKIPPED and not name.startswith(".") and not (here / name / "pyvenv.cfg").exists()
        )
        for name in sorted(files):
            path = here / name
            if name.endswith((".py", ".pyw")) and path.is_file() and not path.is_symlink():
                yield path


def replace(path: Path, before: bytes, after: bytes) -> None:
    """Put a new content in place of a file's in one step, with its mode.

    Raises:
        OSError: It cannot be written, or does not hold any more what it held before.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if path.is_symlink() or path.read_bytes() != before:
        raise OSError("it has changed since it was read")
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(after)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
