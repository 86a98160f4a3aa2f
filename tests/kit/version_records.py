"""Which versions the tests ran with: `pytest --record-versions` puts it on file, and the table of versions shows it."""

from __future__ import annotations

import json
import platform
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import pytest

from ampx.plugins import VersionRange, installed_version, release

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA: Final = "ampx.versions/1"
FOLDER: Final = Path("docs", "evidence", "versions")
FRAMEWORKS: Final = {
    "torch": "PyTorch",
    "tensorflow": "TensorFlow",
    "paddle": "PaddlePaddle",
    "jax": "JAX",
    "mxnet": "Apache MXNet",
}
LOWEST, NEWEST = "lowest", "newest"


@dataclass(frozen=True)
class Record:
    """One run of a framework's conformance kit.

    Attributes:
        environment: The tox environment, a framework and which end: `"jax-newest"`.
        versions: Version by distribution, of those that `constraints` names for the framework.
        python: Version of Python.
        passed: How many tests passed.
        failed: The tests that failed.
        date: Day of the run.
    """

    environment: str
    versions: dict[str, str]
    python: str
    passed: int
    failed: list[str]
    date: str

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """Read a file; None where there is none."""
        if not path.exists():
            return None
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{name: value for name, value in data.items() if name != "schema"})

    def write(self, path: Path) -> None:
        """Write a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n", encoding="utf-8")


class RecordPlugin:
    """Puts on file which versions a run's tests passed or failed with."""

    def __init__(self, root: Path, environment: str) -> None:
        self.root = root
        self.environment = environment
        self.passed: set[str] = set()
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test, with what is set up before it and undone after it."""
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the file, unless the run was broken off or had no test."""
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        names = pins(self.root, self.environment.rpartition("-")[0])
        Record(
            self.environment,
            dict(sorted((name, version) for name in names if (version := installed_version(name)))),
            platform.python_version(),
            len(self.passed - self.failed),
            sorted(self.failed),
            time.strftime("%Y-%m-%d"),
        ).write(self.root / FOLDER / f"{self.environment}.json")


def pins(root: Path, name: str) -> dict[str, str]:
    """Return the versions of a file of constraints, by distribution."""
    lines = (root / "constraints" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.partition(";")[0].strip().split("==") for line in lines)


def asked_for(root: Path, framework: str) -> list[str]:
    """List the distributions that the extra of a framework asks for."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [re.split(r"[^\w-]", line)[0] for line in project["optional-dependencies"][framework]]


def lowest_pins(root: Path, framework: str) -> dict[str, str]:
    """Return the oldest versions; a framework that has one version has no file of its own for them."""
    own = root / "constraints" / f"{framework}-{LOWEST}.txt"
    return pins(root, own.stem if own.exists() else framework)


def record_of(root: Path, framework: str, end: str) -> Record | None:
    """Return what ran; None where nothing did, or the oldest version is another one since."""
    record = Record.read(root / FOLDER / f"{framework}-{end}.json")
    if record is not None and end == LOWEST:
        wanted = lowest_pins(root, framework)
        if any(record.versions.get(name) not in (None, version) for name, version in wanted.items()):
            return None
    return record


def ranges(root: Path) -> dict[str, dict[str, VersionRange]]:
    """Return the tested range of every distribution, by framework."""
    return {framework: _ranges(root, framework) for framework in FRAMEWORKS}


def _ranges(root: Path, framework: str) -> dict[str, VersionRange]:
    lowest, always = lowest_pins(root, framework), pins(root, framework)
    newest = record_of(root, framework, NEWEST)
    tested = {}
    for name in asked_for(root, framework):
        if name not in lowest or name not in always:
            continue
        highest, fails = always[name], None
        if newest is not None and release(newest.versions[name]) > release(highest):
            # What fails at the versions of every change is not the fault of a release.
            highest, fails = (highest, newest.versions[name]) if newest.failed else (newest.versions[name], None)
        tested[name] = VersionRange(lowest[name], highest, fails)
    return tested


def to_json(tested: dict[str, dict[str, VersionRange]]) -> str:
    """Return the text of the file that ampx reads."""
    data = {
        framework: {name: asdict(each) for name, each in of_framework.items()}
        for framework, of_framework in tested.items()
    }
    return json.dumps(data, indent=1) + "\n"


def to_markdown(root: Path) -> str:
    """Return the table of the manual."""
    lines = ["| framework | oldest | on every change | newest |", "| --- | --- | --- | --- |"]
    for framework, label in FRAMEWORKS.items():
        names = asked_for(root, framework)
        lowest = _cell(_listed(lowest_pins(root, framework), names), record_of(root, framework, LOWEST))
        always = _listed(pins(root, framework), [*names, "tf-keras"])
        newest = record_of(root, framework, NEWEST)
        listed = "the newest release" if newest is None else _listed(newest.versions, [*names, "tf-keras"])
        lines.append(f"| {label} | {lowest} | {always} | {_cell(listed, newest)} |")
    return "\n".join(lines)


def _listed(versions: dict[str, str], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {versions[name]}" for name in names if name in versions)


def _cell(listed: str, record: Record | None) -> str:
    if record is None:
        return f"{listed}: not run yet"
    outcome = f"{record.passed} passed"
    if record.failed:
        outcome = f"**{len(record.failed)} failed**, {outcome}"
    return f"{listed}; Python {record.python}: {outcome} ({record.date})"
