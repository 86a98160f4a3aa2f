"""Simulated devices are written in C++ against the headers of a framework's wheel, and compiled where a compiler is."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
import subprocess
from collections.abc import Sequence


class CannotSimulateError(Exception):
    """This machine cannot have the device; the message says why."""


def home_of(framework: str) -> pathlib.Path:
    """Return the folder of an installed framework, without importing it."""
    spec = importlib.util.find_spec(framework)
    if spec is None or spec.origin is None:
        raise CannotSimulateError(f"there is no {framework}")
    return pathlib.Path(spec.origin).parent


def library(source: pathlib.Path, home: pathlib.Path, folder: pathlib.Path, options: Sequence[str]) -> pathlib.Path:
    """Compile a device for the framework at `home`, unless `folder` has it; return the library.

    Raises:
        CannotSimulateError: There is no compiler, or it does not take the source.
    """
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler) is None:
        raise CannotSimulateError(f"there is no C++ compiler ({compiler}) to build the simulated device with")
    version = importlib.metadata.version({"paddle": "paddlepaddle"}.get(home.name, home.name))
    key = "\n".join((source.read_text(encoding="utf-8"), str(home), version, compiler, *options))
    built = folder / hashlib.sha256(key.encode()).hexdigest()[:16] / "device.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        partial = built.with_suffix(f".{os.getpid()}")
        command = [compiler, "-shared", "-fPIC", str(source), "-o", str(partial), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotSimulateError(f"the simulated device does not compile:\n{done.stderr}")
        partial.replace(built)  # in one go: two runs may build at the same time
    return built
