"""What a check is, how it is run, and how the machine is described."""

from __future__ import annotations

import json
import pathlib
import platform
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final


@dataclass(frozen=True)
class Setup:
    """Where and how thoroughly to check: `"cuda"` or `"cpu"`; quick runs are short and judge no times."""

    device: str
    quick: bool = False

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def is_tiny(self) -> bool:
        """Whether sizes are tiny and times are not judged: on a CPU, where `make bench` measures them, and if quick."""
        return self.quick or not self.on_gpu


@dataclass(frozen=True)
class Figure:
    """What a check that passed found out: one line for the table, and numbers for the JSON."""

    line: str
    data: dict[str, Any] = field(default_factory=dict)


class NotHere(Exception):  # noqa: N818 - no error
    """A check cannot be made on this machine; the message says why."""


Check = Callable[[Setup], Figure]
STATUSES: Final = ("pass", "FAIL", "ERROR", "not here")
UNENDED: Final = "did not end"


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
    quick: bool = False  # in tiny sizes


def require(condition: object, message: str) -> None:
    """Fail the check unless a condition holds; unlike `assert`, also under `python -O`."""
    if not condition:
        raise AssertionError(message)


class Report:
    """What a run has shown so far: a file that is written after every check, so that a run that ends early leaves it.

    The processes of a run write it one after the other.
    """

    def __init__(self, path: pathlib.Path, device: str, append: bool) -> None:
        self.path, self.device = path, device
        self.machine: dict[str, Any] = {}
        self.checks: list[dict[str, Any]] = []
        if append:
            self.read()
        else:
            self.machine = describe_host()

    def read(self) -> None:
        """Take over what another process of the run has added."""
        if self.path.exists():
            content = json.loads(self.path.read_text(encoding="utf-8"))
            self.machine, self.checks = content["machine"], content["checks"]

    def begin(self, outcome: Outcome) -> None:
        """Put on record that a check has begun, as an error: it stays if the process does not live to its end."""
        self.add(replace(outcome, status="ERROR", line=UNENDED))

    def unended(self) -> dict[str, Any] | None:
        """Return the check that has begun and has no end on record."""
        return self.checks[-1] if self.checks and self.checks[-1]["line"] == UNENDED else None

    def has(self, outcome: Outcome) -> bool:
        """Return whether a check is on record."""
        key = (outcome.framework, outcome.check, outcome.quick)
        return any((check["framework"], check["check"], check["quick"]) == key for check in self.checks)

    def add(self, outcome: Outcome) -> None:
        """Put the end of a check on record, in the place of its beginning."""
        if self.unended():
            self.checks.pop()
        self.checks.append(asdict(outcome))
        content = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": self.machine,
            "device": self.device,
            "counts": self.counts(),
            "checks": self.checks,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path)

    def counts(self) -> dict[str, int]:
        """Return how many checks ended how."""
        return {status: sum(check["status"] == status for check in self.checks) for status in STATUSES}

    def failed(self) -> bool:
        """Return whether a check did not hold or broke."""
        return any(check["status"] in ("FAIL", "ERROR") for check in self.checks)


def run_check(
    framework: str, check: Check, setup: Setup, covers: Sequence[str], deadline: float = float("inf")
) -> Outcome:
    """Run one check, unless the deadline (of `time.monotonic`) is past; whatever it raises becomes its outcome."""
    if time.monotonic() > deadline:
        return Outcome(framework, check.__name__, "not here", "no time was left", 0.0, list(covers), {}, setup.quick)
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
    return Outcome(framework, check.__name__, status, line, seconds, list(covers), data, setup.quick)


def show(outcome: Outcome) -> None:
    """Print one line of the table, and where a check broke its traceback."""
    print(f"{outcome.framework:10} {outcome.status:8} {outcome.seconds:7.1f} s  {outcome.check:42} {outcome.line}")
    if outcome.status in ("FAIL", "ERROR"):
        print("".join(f"    | {line}\n" for line in outcome.data.get("traceback", "").splitlines()), end="", flush=True)


def describe_host() -> dict[str, Any]:
    """Describe the machine; what only a framework knows comes from that framework's module."""
    gpu, driver = "unknown", "unknown"
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
        if answer.returncode == 0 and answer.stdout.count(","):
            gpu, driver = (part.strip() for part in answer.stdout.splitlines()[0].split(",")[:2])
    return {"system": platform.platform(), "python": platform.python_version(), "gpu": gpu, "driver": driver}
