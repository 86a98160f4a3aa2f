"""What a step tells: its result, the gate, events, the names of what is not finite."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import pytest

import ampx
from ampx import debug
from ampx.plugins import default_registry
from ampx.testing.base import KitTests, requires
from ampx.testing.bench import FINITE, OVERFLOW, Bench, chosen
from ampx.testing.oracle import REFERENCE_PATTERN, Oracle

CONFIG = ampx.LossScale(init_scale=8.0, growth_interval=2, hysteresis=2, max_consecutive_skips=3)
PATTERN = (0, 1, 1, 0, 0, 1, 0, 1, 1)


class Scheduler:
    """Counts its steps."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, ...]] = []

    def step(self, *args: Any) -> None:
        """Count."""
        self.steps.append(args)


class Watcher:
    """A plugin that implements nothing but `ampx_event`."""

    def __init__(self) -> None:
        self.seen: list[ampx.Event] = []

    @ampx.hookimpl
    def ampx_event(self, event: ampx.Event) -> None:
        """Remember."""
        self.seen.append(event)


class ResultTests(KitTests):
    """`StepResult` and `gate`."""

    def test_step_results_tell_what_happened(self) -> None:
        """Every field, before any step, after an applied one and after skipped ones."""
        bench = self.bench(self.start(ampx.LossScale(init_scale=8.0, growth_interval=1)))
        assert bench.amp.last_step(bench.opt) is None
        assert bench.train() == ampx.StepResult(True, True, 8.0, 16.0, 0, None)
        assert bench.train(OVERFLOW) == ampx.StepResult(False, False, 16.0, 8.0, 1, None)
        assert bench.train(OVERFLOW) == ampx.StepResult(False, False, 8.0, 4.0, 2, None)
        assert bench.train() == ampx.StepResult(True, True, 4.0, 8.0, 0, None)

    def test_results_are_plain_values(self) -> None:
        """Outside traced code the fields are Python's own types, so that they can be logged and saved."""
        for overflow in (False, True):
            result = self.bench(self.start()).train(chosen(overflow))
            kinds = [type(value) for value in dataclasses.astuple(result)]
            assert kinds == [bool, bool, float, float, int, type(None)]

    def test_the_gate_steps_only_after_applied_steps(self) -> None:
        """The scheduler waits for skipped steps, and gets its arguments."""
        amp = self.start()
        bench, scheduler = self.bench(amp), Scheduler()
        gate = amp.gate(scheduler, bench.handle)
        assert not gate.step("before any step")
        for number, overflow in enumerate((False, True, False)):
            bench.train(chosen(overflow))
            assert gate.step(number) is not overflow
        assert scheduler.steps == [(0,), (2,)]
        assert gate.steps is scheduler.steps

    def test_the_gate_waits_for_every_optimizer(self) -> None:
        """One skipped optimizer of several holds the scheduler back."""
        amp = self.start()
        a, b, scheduler = self.bench(amp), self.bench(amp), Scheduler()
        gate = amp.gate(scheduler, [a.handle, b.handle])
        for first, second in ((False, True), (True, False), (False, False)):
            a.train(chosen(first))
            b.train(chosen(second))
            gate.step()
        assert len(scheduler.steps) == 1


class EventTests(KitTests):
    """Listeners and plugins."""

    def test_events_tell_skips_changes_and_collapse(self) -> None:
        """Exactly the events of the specification, in order, with every field."""
        amp = self.start()
        other = self.bench(amp)
        seen: list[ampx.Event] = []
        amp.on_event(seen.append)
        bench = self.bench(amp, loss_scale=CONFIG)
        assert self._run(bench, PATTERN) == 0
        assert [self._told(event) for event in seen] == self._expected(PATTERN)
        assert other.scale == 2.0**16

    def test_the_third_skip_in_a_row_collapses_once(self) -> None:
        """`ScaleCollapsed` comes at the limit, not after it, with one warning; a finite step arms it again."""
        amp = self.start()
        other = self.bench(amp)
        seen: list[ampx.Event] = []
        amp.on_event(seen.append)
        bench, pattern = self.bench(amp, loss_scale=CONFIG), (1, 1, 1, 1, 1, 0, 1, 1, 1)
        assert self._run(bench, pattern) == 2
        assert other.scale == 2.0**16
        assert [self._told(event) for event in seen] == self._expected(pattern)

    def test_removed_listeners_hear_nothing(self) -> None:
        """The function that `on_event` gives removes that listener only; a second call does nothing."""
        amp = self.start()
        bench = self.bench(amp)
        gone: list[ampx.Event] = []
        stays: list[ampx.Event] = []
        remove = amp.on_event(gone.append)
        ampx.on_event(stays.append)
        bench.train(OVERFLOW)
        remove()
        remove()
        bench.train(OVERFLOW)
        assert (len(gone), len(stays)) == (2, 4)

    def test_plugins_receive_the_same_events(self) -> None:
        """The hook `ampx_event` hears what listeners hear."""
        watcher = Watcher()
        seen: list[ampx.Event] = []
        ampx.register_plugin(watcher, "kit-watcher")
        try:
            amp = self.start(ampx.LossScale(growth_interval=3))
            amp.on_event(seen.append)
            self.bench(amp).trace(REFERENCE_PATTERN)
        finally:
            default_registry().manager.unregister(watcher)
        assert len(seen) == 9
        assert watcher.seen == seen

    @requires("implicit gradients")
    def test_losses_that_reach_nothing_warn_once(self) -> None:
        """Steps without gradients whose losses were scaled: the optimizer was made from another model, say."""
        amp = self.start()
        bench, elsewhere = self.bench(amp), self.plain()
        before = bench.snapshot()

        def train() -> None:
            for _ in range(5):
                with amp.scale_loss(elsewhere.loss(), bench.opt) as scaled:
                    self.subject.backward(scaled, elsewhere.parameters)
                assert not bench.step().applied

        with pytest.warns(ampx.NoGradientsWarning, match="made from another model") as caught:
            train()
        assert [warning.category for warning in caught] == [ampx.NoGradientsWarning]
        assert bench.snapshot() == before
        assert bench.train().applied

    @requires("names_gradients")
    def test_a_collapse_names_the_parameters(self) -> None:
        """The event and the warning name what is not finite."""
        amp = self.start(ampx.LossScale(max_consecutive_skips=1))
        seen: list[ampx.Event] = []
        amp.on_event(seen.append)
        bench = self.bench(amp)
        with pytest.warns(ampx.ScaleCollapsedWarning, match="1 steps in a row") as caught:
            bench.train(OVERFLOW)
        collapse = seen[-1]
        assert isinstance(collapse, ampx.ScaleCollapsed)
        assert len(collapse.parameters) == 1
        assert collapse.parameters[0] in str(caught[0].message)

    @requires("names_gradients")
    def test_debug_counts_nonfinite_elements(self) -> None:
        """After a skipped step, `nonfinite_parameters` tells which and how many; after a good one nothing."""
        bench, hang = self.bench(self.start()), self.declares("implicit gradients")
        for slopes, expected in (
            (OVERFLOW, [(1, 2)]),
            (((math.inf, math.nan), (-math.inf,)), [(2, 2), (1, 1)]),
            (FINITE, []),
        ):
            bench.accumulate(slopes)
            bench.step(forget=not hang)
            reports = debug.nonfinite_parameters(bench.opt)
            assert [(report.nonfinite, report.elements) for report in reports] == expected
            if hang:
                self.subject.zero_grad(bench.opt)

    @requires("probe")
    def test_tracing_names_the_first_overflowing_module(self) -> None:
        """Inside the region, the first module with a non-finite output is found."""
        self.start()
        model, step, names = self.subject.chain((1.0, math.inf, 1.0), (1.0,))
        with ampx.trace_overflow(model) as trace:
            step(model)
        assert trace.first is not None
        assert (trace.first.module, trace.first.inputs.nonfinite) == (names[1], 0)
        assert names[1] in str(trace)

    def _run(self, bench: Bench, pattern: tuple[int, ...]) -> int:
        """Train over a pattern; count the warnings of a collapse."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            bench.trace(pattern)
        return sum(issubclass(warning.category, ampx.ScaleCollapsedWarning) for warning in caught)

    def _told(self, event: ampx.Event) -> tuple[Any, ...]:
        return (type(event), *(getattr(event, field.name) for field in dataclasses.fields(ampx.Event)))

    def _expected(self, pattern: tuple[int, ...]) -> list[tuple[Any, ...]]:
        oracle, expected = Oracle(dataclasses.asdict(CONFIG)), []
        for step, overflow in enumerate(pattern, start=1):
            before, after = oracle.row.scale, oracle.step(bool(overflow))
            kinds: list[type[ampx.Event]] = [ampx.StepSkipped] if overflow else []
            kinds += [ampx.ScaleChanged] if after.scale != before else []
            kinds += [ampx.ScaleCollapsed] if overflow and after.consecutive_skips == 3 else []
            place = (self.subject.framework, 1, 0, step)
            expected += [(kind, *place, before, after.scale, after.consecutive_skips) for kind in kinds]
        return expected
