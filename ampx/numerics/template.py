"""A process that has imported what a script imports, of which each further run of the script is a copy.

The script has not run in it, and no device is in use. Processes are copied on Linux only.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ampx.plugins import default_registry

# Set to anything: every run starts a new Python.
SWITCHED_OFF: Final = "AMPX_FRESH_RUNS"
_MODULE: Final = "ampx.numerics.child"


@dataclass(frozen=True)
class Imported:
    """What a run of a script has imported.

    Attributes:
        framework: The framework that trained.
        modules: Names of its modules and of ampx's, in the order in which their imports began.
        environment: What `environment` returned when the framework had been imported.
    """

    framework: str
    modules: tuple[str, ...]
    environment: frozenset[tuple[str, str]]


def environment() -> frozenset[tuple[str, str]]:
    """Return the variables that may change what a framework does while it is imported."""
    return frozenset((name, value) for name, value in os.environ.items() if not name.startswith("AMPX_"))


def modules_of(framework: str) -> tuple[str, ...]:
    """Return the names of all modules of a framework and of ampx that this process has imported."""
    roots = {"ampx", f"ampx_{framework}", *default_registry().registration(framework).roots}
    return tuple(name for name in sys.modules if name.partition(".")[0] in roots)


class Template:
    """The process, as its parent sees it."""

    def __init__(self, imported: Imported, variables: Mapping[str, str]) -> None:
        """Start it, and wait until it has imported all of that."""
        command = [sys.executable, "-m", _MODULE]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, env=variables, text=True, **pipes)
        answer = self._ask([imported.framework, imported.modules])
        # Where a script sets variables before its imports, what is imported here may be set up otherwise.
        self.fits = bool(answer) and set(map(tuple, answer["environment"])) == imported.environment
        self.fits = self.fits and not answer["uses_device"]

    def run(self, request: Path, output: Path) -> int:
        """Run what a file asks for in a copy, which writes all that it prints to another; return its exit code."""
        child = self._ask([str(request), str(output)])
        try:
            code = self._ask(None)
        except BaseException:
            if child is not None:
                with suppress(OSError):
                    os.kill(child, signal.SIGKILL)
            self.close()
            raise
        return -signal.SIGKILL if code is None else int(code)  # None of a template that was ended

    def _ask(self, question: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{json.dumps(question)}\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        return json.loads(answer) if answer else None

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


_kept: dict[Any, Template | None] = {}  # the latest


def template_of(imported: Imported, variables: Mapping[str, str]) -> Template | None:
    """Return a template of what a run has imported, started once; None where it cannot be copied, or would differ."""
    if sys.platform != "linux" or SWITCHED_OFF in os.environ:
        return None
    key = imported, frozenset(variables.items())
    if key not in _kept:
        _close_kept()
        template = Template(imported, variables)
        _kept[key] = template if template.fits else None
        if not template.fits:
            template.close()
    return _kept[key]


@atexit.register
def _close_kept() -> None:
    for template in filter(None, _kept.values()):
        template.close()
    _kept.clear()
