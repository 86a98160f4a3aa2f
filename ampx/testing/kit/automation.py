"""`ampx run`: a loop that knows nothing of ampx trains in mixed precision, and nothing is left behind."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest

import ampx
from ampx.run import Run, RunSettings, automation
from ampx.testing.base import KitTests, requires
from ampx.testing.bench import FINITE, OVERFLOW, Bench
from ampx.testing.harness import Chosen


class AutomationTests(KitTests):
    """The verb `automate`."""

    @requires("automates")
    def test_a_plain_loop_trains_and_is_recorded(self) -> None:
        """The update is the one of float32, and the recorder saw an optimizer and its steps."""
        run, bench = self._automate([FINITE, FINITE])
        plain = self.plain()
        for slopes in (FINITE, FINITE):
            plain.train_plainly(slopes)
        assert bench.values() == plain.values()
        assert run.recorder.steps == 2
        assert len(run.recorder.optimizers) == 1

    @requires("automates")
    def test_a_plain_loop_skips_a_step_that_overflows(self) -> None:
        """Parameters stay as they are, the loss scale backs off, and the recorder saw it."""
        if self.declares("explicit gradients"):
            pytest.skip("gradients are values: what the loop does with them is the script's own business")
        run, bench = self._automate([FINITE, OVERFLOW])
        plain = self.plain()
        plain.train_plainly(FINITE)
        assert bench.values() == plain.values()
        (seen,) = run.recorder.optimizers.values()
        assert seen.skipped == [2]
        assert run.settings.dtype != "float16" or seen.scales == [(2, seen.initial_scale / 2)]

    @requires("automates")
    def test_leaving_the_automation_restores_the_framework(self) -> None:
        """Casting and session are gone, even after an exception, and a plain loop trains as if nothing had been."""
        run, _ = self._automate([FINITE])
        with pytest.raises(ZeroDivisionError), automation(self.backend, self._fresh_run()):
            raise ZeroDivisionError
        assert self.subject.casting() == self.outside
        with pytest.raises(ampx.NotInitializedError):
            ampx.current(self.subject.framework)
        bench = self.plain()
        bench.train_plainly(OVERFLOW)
        assert bench.values() != self.plain().values(), "a step without ampx was skipped"
        assert run.recorder.steps == 1

    def _fresh_run(self) -> Run:
        dtype = self.subject.dtype if self.declares("casting") else "float32"
        settings = RunSettings(dtype, "O1" if self.declares("casting") else "O0", self.subject.device)
        return Run(self.backend.name, settings)

    def _automate(self, pattern: Sequence[Chosen]) -> tuple[Run, Bench]:
        run = self._fresh_run()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* emulated", ampx.PrecisionWarning)  # slow hardware is no defect
            with automation(self.backend, run):
                bench = self.plain()
                for slopes in pattern:
                    bench.train_plainly(slopes)
        return run, bench
