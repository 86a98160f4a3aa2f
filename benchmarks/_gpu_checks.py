"""What a check is, how it is run, and how the machine is described."""

from __future__ import annotations

import platform
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Setup:
    """Where and how thoroughly to check: `"cuda"` or `"cpu"`; quick runs are short and judge no times."""

    device: str
    quick: bool = False

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"


@dataclass(frozen=True)
class Figure:
    """What a check that passed found out: one line for the table, and numbers for the JSON."""

    line: str
    data: dict[str, Any] = field(default_factory=dict)


class NotHere(Exception):  # noqa: N818 - no error
    """A check cannot be made on this machine; the message says why."""


Check = Callable[[Setup], Figure]


@dataclass(frozen=True)
class Outcome:
    """One line of the table."""

    framework: str
    check: str
    status: str
    line: str
    seconds: float
    covers: list[str]
    data: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def require(condition: object, message: str) -> None:
    """Fail the check unless a condition holds; unlike `assert`, also under `python -O`."""
    if not condition:
        raise AssertionError(message)


def run_check(framework: str, check: Check, setup: Setup, covers: Sequence[str]) -> Outcome:
    """Run one check; whatever it raises becomes its outcome."""
    start = time.perf_counter()
    data: dict[str, Any] = {}
    try:
        figure = check(setup)
        status, line, data = "pass", figure.line, figure.data
    except NotHere as reason:
        status, line = "not here", str(reason)
    except AssertionError as error:
        status, line, data = "FAIL", str(error), {"traceback": traceback.format_exc()}
    except Exception as error:
        status, line = "ERROR", f"{type(error).__name__}: {error}".partition("\n")[0]
        data = {"traceback": traceback.format_exc()}
    seconds = round(time.perf_counter() - start, 2)
    return Outcome(framework, check.__name__, status, line, seconds, list(covers), data)


def show(outcome: Outcome) -> None:
    """Print one line of the table, and where a check broke its traceback."""
    print(f"{outcome.framework:10} {outcome.status:8} {outcome.seconds:7.1f} s  {outcome.check:42} {outcome.line}")
    if outcome.status in ("FAIL", "ERROR"):
        print("".join(f"    | {line}\n" for line in outcome.data["traceback"].splitlines()), end="", flush=True)


def describe_host() -> dict[str, Any]:
    """Describe the machine; what only a framework knows comes from that framework's module."""
    driver = "unknown"
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
        driver = (answer.stdout.split() or ["unknown"])[0]
    return {"system": platform.platform(), "python": platform.python_version(), "driver": driver}
