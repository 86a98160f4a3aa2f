"""`ampx run`: a loop that knows nothing of ampx trains in mixed precision, and nothing is left behind."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest

import ampx
from ampx.backend import Backend, offer
from ampx.policy import OptLevel
from ampx.run import Automation, Recorder, Run, RunSettings, SampledGradient
from ampx.testing.base import KitTests, requires
from ampx.testing.bench import FINITE, OVERFLOW, START, Bench
from ampx.testing.harness import Chosen


class Rates:
    """Observes the learning rates of a run."""

    def __init__(self, recorder: Recorder) -> None:
        self.rates: list[tuple[float, ...]] = []  # by step
        self._recorder = recorder

    def loss(self, read: Callable[[], float]) -> None:
        """Read a loss that may be read at once."""

    def stepped(self, steps: int) -> None:
        """Note the rates of the optimizer that has stepped."""
        turn = self._recorder.turn
        assert turn is not None
        self.rates.append(self._recorder.learning_rates(turn))

    def mistake(self, sentence: str) -> None:
        """Fail: there is none."""
        raise AssertionError(sentence)

    def note(self, sentence: str) -> None:
        """Take a note."""

    def observing(self, run: Run, backend: Backend) -> AbstractContextManager[None]:
        """Return a region that does nothing."""
        return nullcontext()


def _weights(sampled: SampledGradient) -> list[float]:
    assert sampled.weights is not None, "the backend samples no weights"
    return [float(value) for value in sampled.weights]


class AutomationTests(KitTests):
    """The contract `Automation`."""

    @requires("automation")
    def test_a_plain_loop_trains_and_is_recorded(self) -> None:
        """The update is the one of float32, with momentum, and the recorder saw an optimizer, its steps and phases."""
        run, bench = self._automate([[FINITE], [FINITE], [FINITE]], momentum=True)
        assert bench.snapshot() == self._trained([[FINITE], [FINITE], [FINITE]], momentum=True)
        assert run.recorder.steps == 3
        (record,) = run.recorder.optimizers.values()
        assert (record.steps, record.skipped, record.scales) == (3, [], [])
        assert {"backward", "step"} <= set(run.recorder.seconds) or "train" in run.recorder.seconds

    @requires("automation")
    def test_gradients_of_a_plain_loop_accumulate(self) -> None:
        """Two backwards and one step are one step of the sum."""
        run, bench = self._automate([[FINITE, FINITE], [FINITE]])
        assert bench.snapshot() == self._trained([[FINITE, FINITE], [FINITE]])
        assert run.recorder.steps == 2

    @requires("automation")
    def test_two_optimizers_of_a_plain_loop_train_each_by_itself(self) -> None:
        """Each gets the updates of float32, and is recorded, by itself where each has a loss scale of its own."""
        run = self._fresh_run()
        with self._inside(run):
            benches = self.plain(), self.plain(momentum=True)
            for slopes in (FINITE, FINITE):
                for bench in benches:
                    bench.train_plainly(slopes)
        for bench, momentum in zip(benches, (False, True), strict=True):
            assert bench.snapshot() == self._trained([[FINITE], [FINITE]], momentum)
        steps = [record.steps for record in run.recorder.optimizers.values()]
        assert steps == ([2, 2] if self.declares("optimizer objects") else [4])

    @requires("automation")
    def test_a_plain_loop_skips_a_step_that_overflows(self) -> None:
        """Parameters and momentum stay as they are, the loss scale backs off, and the recorder saw it."""
        if self.declares("explicit gradients"):
            pytest.skip("gradients are values: what the loop does with them is the script's own business")
        run, bench = self._automate([[FINITE], [OVERFLOW]], momentum=True)
        assert bench.snapshot() == self._trained([[FINITE]], momentum=True)
        (record,) = run.recorder.optimizers.values()
        assert record.skipped == [2]
        assert run.settings.dtype != "float16" or record.scales == [(2, record.initial_scale / 2)]

    @requires("automation")
    def test_a_watched_run_knows_the_learning_rate_of_each_step(self) -> None:
        """Of a loop that halves it before the third step; the parameters show that it did."""
        if not self.subject.tells_rates:
            pytest.skip("the backend does not say learning rates")
        run = self._fresh_run()
        run.recorder.observer = seen = Rates(run.recorder)
        with self._inside(run):
            bench = self.plain()
            for rate in (0.5, 0.5, 0.25, 0.25):
                bench.set_rate(rate)
                bench.train_plainly(FINITE)
        assert seen.rates == [(0.5,), (0.5,), (0.25,), (0.25,)]
        moved = zip(START, FINITE, strict=True)  # by gradient descent
        assert bench.values() == [[a - 1.5 * b for a, b in zip(*pair, strict=True)] for pair in moved]

    @requires("automation")
    def test_a_watched_run_samples_the_weights_before_each_step(self) -> None:
        """Those of the step before are left as they were sampled, whatever is written since."""
        first, second = self._sampled(lambda bench: [bench, bench])
        moved = [[a - 0.5 * b for a, b in zip(*pair, strict=True)] for pair in zip(START, FINITE, strict=True)]
        assert [_weights(entry) for entry in first] == list(map(list, START))
        assert [_weights(entry) for entry in second] == moved
        assert [entry.shape for entry in first] == [(2,), (1,)]
        assert [entry.name for entry in first] == [entry.name for entry in second]

    @requires("automation")
    def test_no_two_parameters_of_a_run_are_sampled_by_the_same_name(self) -> None:
        """Those of several optimizers neither, where these are objects."""
        objects = self.declares("optimizer objects")
        steps = self._sampled(lambda bench: [bench, self.plain()] if objects else [bench])
        names = [entry.name for step in steps for entry in step]
        assert len(set(names)) == len(names) == (4 if objects else 2)

    def _sampled(self, benches: Callable[[Bench], Sequence[Bench]]) -> list[list[SampledGradient]]:
        """Train benches in a watched run, each once; return what was sampled, by step."""
        if not self.declares("probe"):
            pytest.skip("the backend watches nothing")
        from ampx.numerics.probe import Probe, Watching  # the kit runs without it, too

        run = self._fresh_run()
        sampled: list[list[SampledGradient]] = []
        # Where gradients are values, what is differentiated by is sampled before, and has none yet.
        run.recorder.takes_gradients = lambda entries: sampled.append([e for e in entries if e.values is not None])
        run.recorder.observer = Rates(run.recorder)
        with self._inside(run), offer(self.backend, Probe).watch(None, Watching()):
            for bench in benches(self.plain()):
                bench.train_plainly(FINITE)
        return [step for step in sampled if step]

    @requires("automation")
    def test_a_session_of_the_script_s_own_is_recorded_and_not_touched(self) -> None:
        """It trains as without `ampx run`, and the report tells its steps, skips and scales."""
        run = self._fresh_run()
        with self._inside(run):
            amp = self.start(ampx.LossScale(init_scale=1024.0))
            bench = self.bench(amp)
            for slopes in (FINITE, OVERFLOW, FINITE):
                bench.train(slopes)
        assert bench.values() == self._trained([[FINITE], [FINITE]])[0]
        assert run.amp is amp
        (record,) = run.recorder.optimizers.values()
        assert (record.steps, record.skipped, record.initial_scale) == (3, [2], 1024.0)
        assert record.scales == [(2, 512.0)]
        assert "by itself, with ampx;" in run.recorder.notes[-1]
        assert run.explain() == ("the script has it by hand: its own calls decide",)

    @requires("automation")
    def test_leaving_the_automation_restores_the_framework(self) -> None:
        """Casting and session are gone, even after an exception, and a plain loop trains as if nothing had been."""
        run, _ = self._automate([[FINITE]])
        with pytest.raises(ZeroDivisionError), self._inside(self._fresh_run()):
            raise ZeroDivisionError
        assert self.subject.casting() == self.outside
        with pytest.raises(ampx.NotInitializedError):
            ampx.current(self.subject.framework)
        bench = self.plain()
        bench.train_plainly(OVERFLOW)
        assert bench.values() != self.plain().values(), "a step without ampx was skipped"
        assert run.recorder.steps == 1

    @requires("automation")
    def test_levels_that_need_a_model_are_refused(self) -> None:
        """Before anything is patched: which model is to be prepared cannot be told from outside."""
        levels: tuple[OptLevel, ...] = ("O2", "O3")
        for level in levels:
            run = Run(self.backend.name, RunSettings(level=level, device=self.subject.device))
            with pytest.raises(ampx.RunRefusedError, match=f"--level {level} needs"), self._inside(run):
                pass
            assert self.subject.casting() == self.outside

    def _fresh_run(self) -> Run:
        dtype = self.subject.dtype if self.declares("casting") else "float32"
        settings = RunSettings(dtype, "O1" if self.declares("casting") else "O0", self.subject.device)
        return Run(self.backend.name, settings)

    @contextmanager
    def _inside(self, run: Run) -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* emulated", ampx.PrecisionWarning)  # slow hardware is no defect
            with offer(self.backend, Automation).automate(run):
                yield

    def _automate(self, pattern: Sequence[Sequence[Chosen]], momentum: bool = False) -> tuple[Run, Bench]:
        """Train a loop that knows nothing of ampx; each entry is a step, of one or several backwards."""
        run = self._fresh_run()
        with self._inside(run):
            bench = self.plain(momentum)
            for backwards in pattern:
                bench.train_plainly(*backwards)
        return run, bench

    def _trained(self, pattern: Sequence[Sequence[Chosen]], momentum: bool = False) -> tuple[Any, Any]:
        """Return what the same loop leaves without `ampx run`."""
        bench = self.plain(momentum)
        for backwards in pattern:
            bench.train_plainly(*backwards)
        return bench.snapshot()
