"""Which test showed what: gathered from the tests of a run, and kept in files or compared with them.

A test says what it showed with pytest's own `record_property`; only what passed counts.
"""

from __future__ import annotations

import json
import pathlib
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, Literal, get_args

import pytest

from ampx.policy import Dtype, OptLevel

SCHEMA: Final = "ampx.evidence/1"
ASPECTS: Final = ("casting", "scaling", "master weights", "distributed", "state")
# What a test can show, from the most to the least; nothing but "tested" is shown where the cell's device is there.
Word = Literal["tested", "simulated", "compiled for CUDA", "lowered for CUDA", "rewritten for GPU"]
WORDS: Final[tuple[Word, ...]] = get_args(Word)
COMBINATIONS: Final[tuple[tuple[Dtype, OptLevel], ...]] = (
    ("float32", "O0"),
    *(("float16", level) for level in ("O1", "O2", "O3")),
    *(("bfloat16", level) for level in ("O1", "O2", "O3")),
)


@dataclass
class Evidence:
    """What is known of one framework."""

    declared: dict[str, Any] = field(default_factory=dict)  # the fields of its `Capabilities`
    # The message of each refusal, by what was asked for: `device/dtype/level`, perhaps with an aspect, or a capability.
    refused: dict[str, str] = field(default_factory=dict)
    # The tests that showed a cell, `device/dtype/level/aspect`, by what they showed of it.
    shown: dict[Word, dict[str, set[str]]] = field(default_factory=dict)

    def add(self, word: Word, cell: str, test: str) -> None:
        """Put a test on record."""
        self.shown.setdefault(word, {}).setdefault(cell, set()).add(test)

    def tests(self, word: Word, cell: str) -> set[str]:
        """Return the tests that showed a cell."""
        return self.shown.get(word, {}).get(cell, set())

    def cells(self) -> list[tuple[Word, str]]:
        """Return every cell that some test showed, and with which word."""
        return [(word, cell) for word in WORDS for cell in sorted(self.shown.get(word, {})) if self.tests(word, cell)]

    def contradicted(self, shown: Evidence) -> list[str]:
        """List what is refused here although tests showed a cell of it."""
        cells = [f"{cell}/" for _, cell in shown.cells()]
        return [asked for asked in self.refused if any(cell.startswith(f"{asked}/") for cell in cells)]

    @classmethod
    def read(cls, path: pathlib.Path) -> Evidence:
        """Read a file; without one nothing is known."""
        if not path.exists():
            return cls()
        data = json.loads(path.read_text(encoding="utf-8"))
        evidence = cls(data["declared"], data["refused"])
        for word in WORDS:
            for cell, tests in data.get(word, {}).items():
                for test in tests:
                    evidence.add(word, cell, test)
        return evidence

    def write(self, path: pathlib.Path) -> None:
        """Write a file."""
        data: dict[str, Any] = {
            "schema": SCHEMA,
            "framework": path.stem,
            "declared": self.declared,
            "refused": dict(sorted(self.refused.items())),
            "tested": {},
        }
        for word, cell in self.cells():
            data.setdefault(word, {})[cell] = sorted(self.tests(word, cell))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


class EvidencePlugin:
    """Gathers what the tests of a run showed, and compares it with the files, or writes them.

    What tests marked `gpu` show on a GPU is left out: that is told by the files of `make gpu`. On a simulated device
    they show that it is simulated. What tests marked `bfloat16` showed stays on file where the CPU is too weak for
    them, so that they are skipped.
    """

    def __init__(self, folder: pathlib.Path, regenerate: bool, simulated: bool = False) -> None:
        self.folder = folder
        self.simulated = simulated
        self.root = pathlib.Path()
        self.files: set[str] = set()  # collected as a whole
        self.regenerate = regenerate
        self.shown: dict[str, Evidence] = {}
        self.collected: set[str] = set()
        self.ignored: set[str] = set()
        self.excused: set[str] = set()  # where they are skipped
        self.passed: set[str] = set()
        self.ran: set[str] = set()
        self.problems: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """See all tests, before -k and -m choose among them."""
        self.collected |= {item.nodeid for item in items}
        if not self.simulated:
            self.ignored |= {item.nodeid for item in items if item.get_closest_marker("gpu")}
        self.excused |= {item.nodeid for item in items if item.get_closest_marker("bfloat16")}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take what a test that passed has on record."""
        if report.nodeid in self.ignored:
            return
        excused = report.skipped and report.nodeid in self.excused
        if not excused and (report.when == "call" or not report.passed):
            self.ran.add(report.nodeid)
        if report.when != "call" or not report.passed:
            return
        self.passed.add(report.nodeid)
        for name, value in report.user_properties:
            if name.startswith("ampx."):
                self._take(name, value, report.nodeid)

    def _take(self, name: str, value: Any, test: str) -> None:
        evidence = self.shown.setdefault(value[0], Evidence())
        if name == "ampx.tested":
            evidence.add("simulated" if self.simulated else "tested", value[1], test)
        elif name == "ampx.shown":
            evidence.add(value[2], value[1], test)
        elif self.simulated:
            return  # what a backend declares and refuses says a run without the device
        elif name == "ampx.declared":
            evidence.declared = value[1]
        else:
            evidence.refused[value[1]] = value[2]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the files, or fail the run where they say something else than its tests."""
        self.root = session.config.rootpath
        # Where single tests were named, nothing can be said about the others of their files.
        if not any("::" in argument for argument in session.config.args):
            self.files = {_file(test) for test in self.collected}
        for framework in sorted({*self.shown, *(path.stem for path in self.folder.glob("*.json"))}):
            path = self.folder / f"{framework}.json"
            on_file, shown = Evidence.read(path), self.shown.get(framework, Evidence())
            if not self.regenerate:
                self.problems += [f"{path.name}: {problem}" for problem in self._differences(on_file, shown)]
            elif framework in self.shown:
                self._merge(on_file, shown).write(path)
        if self.problems and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print what is stale."""
        if self.problems:
            terminalreporter.section(f"stale: {self.folder.name}", red=True)
            for problem in self.problems:
                terminalreporter.line(problem)
            terminalreporter.line("If the tests are right, write it anew with `pytest --regenerate`.")

    def _merge(self, on_file: Evidence, shown: Evidence) -> Evidence:
        """Keep what tests showed that were not run and are still there; the others had to show it again."""
        # To which test something was refused is not on file. Unless all were run, it may have been to another.
        cells = [entry for entry in on_file.cells() if entry[0] not in ("simulated", "compiled for CUDA")]
        tests = chain.from_iterable(on_file.tests(word, cell) for word, cell in cells)
        others = {*self.excused, *filter(self._is_there, tests)} - self.ran
        refused = {**on_file.refused, **shown.refused} if others else dict(shown.refused)
        merged = Evidence(shown.declared or on_file.declared, refused, deepcopy(shown.shown))
        for word, cell in on_file.cells():
            for test in filter(self._is_there, on_file.tests(word, cell) - self.ran):
                merged.add(word, cell, test)
        for asked in merged.contradicted(merged):
            del merged.refused[asked]
        return merged

    def _is_there(self, test: str) -> bool:
        return test in self.collected or (_file(test) not in self.files and (self.root / _file(test)).exists())

    def _differences(self, on_file: Evidence, shown: Evidence) -> list[str]:
        problems = []
        if shown.declared and shown.declared != on_file.declared:
            problems.append("what the backend declares has changed")
        problems += [
            f"{asked} is refused with another message: {message}"
            for asked, message in shown.refused.items()
            if on_file.refused.get(asked) != message
        ]
        problems += [f"{asked} is on file as refused, and tests show it" for asked in on_file.contradicted(shown)]
        for word, cell in shown.cells():
            missing = shown.tests(word, cell) - on_file.tests(word, cell)
            problems += [f"{cell} is not on file as {word} by {test}" for test in sorted(missing)]
        for word, cell in on_file.cells():
            for test in sorted(on_file.tests(word, cell) - shown.tests(word, cell)):
                if test in self.passed:
                    problems.append(f"{cell}: {test} no longer shows it")
                elif test in self.ran:
                    problems.append(f"{cell}: {test} did not pass")
                elif not self._is_there(test):
                    problems.append(f"{cell}: {test} does not exist")
        return problems


def _file(test: str) -> str:
    return test.partition("::")[0]
