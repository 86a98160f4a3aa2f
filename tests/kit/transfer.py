"""A loss scale that one framework saved goes on in another, through files that each framework wrote itself."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Final

import pytest

import ampx
from ampx.testing.base import KitTests
from ampx.testing.bench import chosen
from ampx.testing.oracle import Oracle

# The recipe of every file. No field has its default, and the factors are no float32 numbers: rounding shows.
CONFIG: Final = ampx.LossScale(
    init_scale=96.0,
    growth_factor=1.7,
    backoff_factor=0.6,
    growth_interval=3,
    hysteresis=2,
    min_scale=5.0,
    max_scale=1000.0,
    max_consecutive_skips=40,
)
# 1 is an overflow. Saved on the way to a growth, and on the way to a backoff: all four numbers are away from rest.
PATTERNS: Final[dict[str, tuple[int, ...]]] = {"finite": (1, 0, 0, 0, 0, 0), "overflow": (0, 0, 0, 0, 1, 1, 1)}
# Up to max_scale, down to min_scale, and up again.
CONTINUATION: Final = (*(0,) * 15, 1, 0, 1, 1, 0, *(1,) * 21, 0, 0, 0, 0)


def built_in() -> list[str]:
    """List the frameworks whose backends ampx itself ships."""
    backends = pathlib.Path(__file__).parents[2] / "backends"
    return sorted(path.parent.name.removeprefix("ampx_") for path in backends.glob("ampx_*/backend.py"))


class TransferSuite(KitTests):
    """Tests of saved states between frameworks; subclass it as `TestTransfer`.

    Attributes:
        harness: The harness's class.
        states: Folder with one `<framework>.json` for each framework. `pytest --regenerate` writes this framework's.
    """

    states: ClassVar[pathlib.Path]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Take every other framework: those that ampx ships, whether or not their file is there, and all files.

        All but the next one are nightly: a test of the core compares the files with one another.
        """
        if "source" in metafunc.fixturenames:
            files = (path.stem for path in self.states.glob("*.json"))
            others = sorted({*built_in(), *files} - {self.harness.framework})
            following = next((name for name in others if name > self.harness.framework), others[0])
            marks = {name: () if name == following else pytest.mark.nightly for name in others}
            metafunc.parametrize("source", [pytest.param(name, marks=marks[name]) for name in others])

    def test_the_file_is_what_this_framework_writes(self, pytestconfig: pytest.Config) -> None:
        """Training by the recipe and saving gives the file, and the numbers in it are the specification's."""
        text = self._write()
        path = self.states / f"{self.harness.framework}.json"
        if pytestconfig.getoption("--regenerate", default=False):
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path.name} is missing in {self.states.name}/; write it with `pytest --regenerate`"
        assert path.read_text(encoding="utf-8") == text
        for name, pattern in PATTERNS.items():
            (group,) = json.loads(text)[name]["groups"]
            last = Oracle(asdict(CONFIG)).walk(map(bool, pattern))[-1]
            assert group == {"config": asdict(CONFIG), "losses": [{"loss_id": 0, **asdict(last)}]}

    @pytest.mark.parametrize("saved_on", sorted(PATTERNS))
    @pytest.mark.parametrize("moment", ["before the first step", "after steps"])
    def test_a_state_of_another_framework_goes_on(self, source: str, saved_on: str, moment: str) -> None:
        """Loaded before or after the first step, every number of every later step is the specification's."""
        path = self.states / f"{source}.json"
        assert path.exists(), f"{path.name} is missing in {self.states.name}/, so nothing of {source} can be loaded"
        state = json.loads(path.read_text(encoding="utf-8"))[saved_on]
        assert state["framework"] == source
        bench = self.bench(self.start())
        bench.trace([] if moment == "before the first step" else [1, 0])
        bench.load(state)
        oracle = Oracle(asdict(CONFIG), _numbers(PATTERNS[saved_on]))
        assert bench.row() == asdict(oracle.row)
        for overflow in map(bool, CONTINUATION):
            before = bench.scale
            result, after = bench.train(chosen(overflow)), oracle.step(overflow)
            assert (result.applied, result.scale, result.next_scale) == (not overflow, before, after.scale)
            assert bench.row() == asdict(after)

    def _write(self) -> str:
        """Train by the recipe through the public API; give the text of the file."""
        states: dict[str, Any] = {}
        for name, pattern in PATTERNS.items():
            bench = self.bench(self.start(CONFIG))
            bench.trace(pattern)
            states[name] = bench.state_dict()
        return json.dumps(states, indent=1, allow_nan=False) + "\n"


def _numbers(pattern: Sequence[int]) -> dict[str, Any]:
    """Return the specification's numbers after a pattern."""
    return asdict(Oracle(asdict(CONFIG)).walk(map(bool, pattern))[-1])
