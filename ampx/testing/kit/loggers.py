"""What a log tells of the steps of a framework, in the same numbers everywhere."""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest

import ampx
from ampx.testing.base import KitTests, requires
from ampx.testing.bench import FINITE, chosen
from ampx.testing.oracle import Oracle

CONFIG = ampx.LossScale(init_scale=8.0, growth_interval=3)
PATTERN = (0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0)
EVERY = 4


class LogTests(KitTests):
    """`ampx.log_to`."""

    def test_a_log_tells_of_every_so_many_steps(self) -> None:
        """The numbers are the specification's, under names that no framework changes; the scale at every change."""
        amp = self.start(CONFIG)
        bench, drawn = self.bench(amp), []
        with ampx.log_to(lambda values, step: drawn.append((step, values)), every=EVERY):
            bench.trace(PATTERN)
        assert drawn == self._rows_due()

    def test_a_file_of_json_lines_holds_every_event(self) -> None:
        """In order, each as one line with its place, and numbers of JSON's own kinds."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "run.jsonl")
            amp = self.start(CONFIG)
            other = self.bench(amp)
            seen: list[ampx.Event] = []
            amp.on_event(seen.append)
            with ampx.log_to(path, every=EVERY):
                self.bench(amp).trace(PATTERN)
            lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert other.scale == CONFIG.init_scale
        assert [(line["event"], line["step"], line["loss_scale"]) for line in lines] == [
            (type(event).__name__, event.step, event.next_scale) for event in seen
        ]
        assert [line["step"] for line in lines if line["event"] == "Progress"] == [4, 8]
        assert {(line["framework"], line["group"], line["loss_id"]) for line in lines} == {
            (self.subject.framework, 1, 0)
        }

    def test_a_log_ends_with_its_session(self) -> None:
        """Nothing comes after that, and no step sends `Progress` without a logger."""
        amp = self.start(CONFIG)
        drawn: list[int] = []
        log = ampx.log_to(lambda values, step: drawn.append(step), every=1)
        bench = self.bench(amp)
        bench.train()
        amp.shutdown()
        log.close()
        again = self.start(CONFIG)
        seen: list[ampx.Event] = []
        again.on_event(seen.append)
        self.bench(again).train()
        bench.train()
        assert (drawn, seen) == ([1], [])

    @requires("clipping")
    def test_a_log_holds_the_norm_of_true_gradients(self) -> None:
        """Where clipping measures it; a bound of infinity measures and clips nothing."""
        amp = self.start(CONFIG)
        bench, drawn = self.bench(amp, max_grad_norm=math.inf), []
        plain = self.plain()
        with ampx.log_to(lambda values, step: drawn.append(values.get("ampx/grad_norm")), every=1):
            for overflow in (False, True):
                bench.train(chosen(overflow))
        plain.train_plainly(FINITE)
        assert bench.values() == plain.values()
        assert drawn == [pytest.approx(math.hypot(*(slope for slopes in FINITE for slope in slopes)), rel=1e-6), None]

    def _rows_due(self) -> list[tuple[int, dict[str, Any]]]:
        """Return what is drawn, by the specification alone."""
        oracle, rows = Oracle(dataclasses.asdict(CONFIG)), []
        for step, overflow in enumerate(PATTERN, start=1):
            before, after = oracle.row.scale, oracle.step(bool(overflow))
            row = {"ampx/loss_scale": after.scale, "ampx/consecutive_skips": after.consecutive_skips}
            if step % EVERY == 0:
                row["ampx/skipped_steps"] = sum(PATTERN[:step])
                row["ampx/skipped_share"] = sum(PATTERN[step - EVERY : step]) / EVERY
            if step % EVERY == 0 or after.scale != before:
                rows.append((step, row))
        return rows
