"""What the precision debugger stands on: modules are watched and forced into dtypes, a batch is replayed.

The model is a row of layers that multiply by one weight each, so that arithmetic says what every value and every
gradient is. The numbers are powers of two unless rounding is what is tested: no sum rounds, in no dtype.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final

import pytest

import ampx
from ampx.backend import CastPlan, offer
from ampx.formats import FORMATS, digits_of
from ampx.numerics.probe import Direction, Probe, Reading, Replayed, Stats, Watching
from ampx.testing.base import KitTests, requires
from ampx.testing.checks import refused

# Zero, what float16 flushes, what it cannot hold, and what nothing can.
INPUTS: Final = (1.0, -2.0, 0.0, 2.0**-27, 2.0**16, math.inf, math.nan)
WEIGHTS: Final = (2.0, 4.0, 0.5)
ROW: Final = tuple(2.0**-power for power in range(1, 33))


class PrecisionTests(KitTests):
    """Base: runs a row of layers."""

    def see(
        self,
        weights: Sequence[float],
        inputs: Sequence[float],
        *around: AbstractContextManager[Any],
        plan: CastPlan | None = None,
        watching: Watching | None = None,
        chain: tuple[Any, Any, list[str]] | None = None,
    ) -> tuple[list[str], list[Reading]]:
        """Return the names of the layers, and the readings of a batch."""
        model, step, names = chain or self.subject.chain(weights, inputs)
        with ExitStack() as stack:
            for region in around:
                stack.enter_context(region)
            with self.probe.watch(model, watching or Watching(samples=64)) as watch:
                self.probe.replay(model, step, plan)
            return list(names), watch.readings()

    @property
    def probe(self) -> Probe:
        """What the backend offers."""
        return offer(self.backend, Probe)

    @property
    def simulated(self) -> frozenset[str]:
        """The dtypes to which the harness's device rounds."""
        return self.probe.simulates(self.backend.device(self.subject.device))

    def low(self) -> tuple[Any, float]:
        """Return the compute dtype, and the smallest number that it rounds to 1."""
        dtype = self.subject.dtype
        return dtype, 1 + 2.0 ** -(FORMATS[dtype].bits + 1)

    def larger(self, model: Any) -> tuple[Any, str, Callable[[Any], Any]]:
        """Return what `Harness.larger` returns."""
        larger = self.subject.larger(model)
        if larger is None:
            pytest.skip(f"the harness of {self.subject.framework} has no model whose part is called by itself")
        return larger

    def kept(self, dtype: str) -> str:
        """Return the dtype of what a module returns that is forced into a dtype: what is simulated is rounded only."""
        return "float32" if dtype in self.simulated else dtype


def only(readings: Sequence[Reading], name: str, direction: Direction = "forward") -> Reading:
    """Return the only reading of a module in a direction."""
    matches = [
        reading
        for reading in readings
        if (reading.module, reading.direction, reading.operation) == (name, direction, "")
    ]
    assert len(matches) == 1, f"{len(matches)} readings of {name!r} {direction}; it ran once"
    return matches[0]


def numbers(reading: Reading) -> list[float]:
    """Return the sample of a reading."""
    return [] if reading.sample is None else [float(value) for value in reading.sample]


def first_nonfinite(readings: Sequence[Reading], direction: Direction) -> Reading | None:
    """Return the first value in a direction that is not finite."""
    return next((entry for entry in readings if entry.direction == direction and entry.value.nonfinite), None)


class WatchTests(PrecisionTests):
    """The verb `watch`."""

    @requires("probe")
    def test_readings_equal_a_count_in_numpy(self) -> None:
        """Outputs and their gradients, inf and NaN among them, in the order in which they were computed."""
        import numpy as np  # only authors of these verbs need it

        from ampx.numerics.rounding import describe, sample

        names, readings = self.see(WEIGHTS, INPUTS, watching=Watching("float16", samples=4))
        value = np.array(INPUTS, np.float32)
        for position, name in enumerate(names):
            received, value = value, value * np.float32(WEIGHTS[position])
            reading = only(readings, name)
            assert (reading.value, reading.inputs) == (describe(value), describe(received))
            assert (reading.dtype, reading.call, reading.seconds) == ("float32", 0, None)
            assert reading.kind
            np.testing.assert_array_equal(reading.sample, sample(value, 4))
            gradient = np.full(len(INPUTS), math.prod(WEIGHTS[position + 1 :]), np.float32)
            reading = only(readings, name, "backward")
            assert (reading.value, reading.inputs) == (describe(gradient), Stats())
            np.testing.assert_array_equal(reading.sample, sample(gradient, 4))
        seen = [(reading.module, reading.direction) for reading in readings if reading.module in names]
        assert seen == [*((name, "forward") for name in names), *((name, "backward") for name in reversed(names))]

    @requires("probe")
    def test_the_layer_with_a_planted_overflow_is_the_first_that_is_not_finite(self) -> None:
        """In the forward pass, and in a backward pass whose forward pass is finite."""
        names, readings = self.see((1.0, 2.0**100, 2.0**100, 1.0), (1.0, 2.0))
        culprit = first_nonfinite(readings, "forward")
        assert culprit is not None
        assert culprit.module == names[2]
        names, readings = self.see((1.0, 1.0, 2.0**100, 2.0**100), (2.0**-120, 2.0**-121))
        assert first_nonfinite(readings, "forward") is None
        culprit = first_nonfinite(readings, "backward")
        assert culprit is not None
        assert culprit.module == names[1]

    @requires("probe")
    def test_watching_changes_nothing(self) -> None:
        """A step returns the same inside, and nothing is read any more behind the region."""
        low, near = self.low()
        model, step, _ = chain = self.subject.chain((near, 3.0, near), ROW)
        plan = self.start().plan if self.declares("casting") else None
        outside = self.probe.replay(model, step, plan)
        with self.probe.watch(model, Watching(low, operations=True, samples=3, times=True)):
            inside = self.probe.replay(model, step, plan)
        assert same(inside, outside)
        self._watching_ends(chain)

    def _watching_ends(self, chain: tuple[Any, Any, list[str]]) -> None:
        model, step, _ = chain
        with self.probe.watch(model, Watching()) as watch:
            step(model)
        count = len(watch.readings())
        step(model)
        assert len(watch.readings()) == count > 0

    @requires("probe")
    def test_patterns_choose_the_modules(self) -> None:
        """Only these are read, call by call, and a pattern that matches nothing is an error."""
        model, step, names = self.subject.chain(WEIGHTS, ROW)
        with self.probe.watch(model, Watching(modules=(names[1],), times=True)) as watch:
            step(model)
            step(model)
        readings = watch.readings()
        assert {reading.module for reading in readings} == {names[1]}
        forward = [reading for reading in readings if reading.direction == "forward"]
        assert [reading.call for reading in forward] == [0, 1]
        assert all(reading.seconds is not None and reading.seconds > 0 for reading in forward)
        with (
            refused(ampx.UnsupportedOpError, passed="'nowhere.*'", accepted="accepted: ", advice=""),
            self.probe.watch(model, Watching(modules=(names[1], "nowhere.*"))),
        ):
            pass

    @requires("probe")
    def test_every_model_is_watched_where_none_is_named(self) -> None:
        """It has the names that it has when it is passed."""
        model, step, names = self.subject.chain(WEIGHTS, ROW)
        with self.probe.watch(None, Watching()) as watch:
            step(model)
        assert [only(watch.readings(), name).value.elements for name in names] == [len(ROW)] * len(names)

    @requires("probe")
    def test_models_of_one_class_have_names_of_their_own(self) -> None:
        """The first that is called has plain names, others begin with their class, and from the second on a number."""
        if self.subject.models_are_values:
            pytest.skip(f"models of {self.subject.framework} are values: one of a class is like another")
        chains = [self.subject.chain(WEIGHTS, ROW) for _ in range(4)]
        with self.probe.watch(None, Watching()) as watch:
            for model, step, _ in chains:
                step(model)
        readings = [entry for entry in watch.readings() if entry.direction == "forward"]
        kind = only(readings, "").kind
        for prefix, (_, _, names) in zip(("", f"{kind}:", f"{kind}#2:", f"{kind}#3:"), chains, strict=True):
            assert [only(readings, prefix + name).value.elements for name in names] == [len(ROW)] * len(names)

    @requires("probe")
    def test_a_part_that_is_called_by_itself_is_named_within_its_model(self) -> None:
        """It need not be known that the model will be called."""
        model, _, names = self.subject.chain(WEIGHTS, ROW)
        _, part, call = self.larger(model)
        with self.probe.watch(None, Watching()) as watch:
            call(self.subject.batch(ROW))
        assert [only(watch.readings(), f"{part}.{name}").value.elements for name in names] == [len(ROW)] * len(names)

    @requires("probe")
    def test_a_model_has_its_names_within_a_larger_one_once_that_is_called(self) -> None:
        """So have the values and gradients that were read before; another model keeps its names."""
        model, step, names = self.subject.chain(WEIGHTS, ROW)
        other, step_of_other, _ = self.subject.chain(WEIGHTS, ROW)
        larger, part, _ = self.larger(model)

        def compute(larger: Any) -> Any:
            return self.subject.recorded(lambda: step(model) + step_of_other(other) + step(larger))

        with self.probe.watch(None, Watching()) as watch:
            self.probe.replay(larger, compute, None)
        twice, kind = [part, *(f"{part}.{name}" for name in names)], f"{type(model).__name__}:"
        expected = Counter([*twice, *twice, "", kind, *(f"{kind}{name}" for name in names)])
        for direction in ("forward", "backward"):
            assert Counter(entry.module for entry in watch.readings() if entry.direction == direction) == expected

    @requires("probe")
    def test_a_sample_is_of_the_whole_value_of_a_module(self) -> None:
        """Of several tensors together there are no more elements than were asked for, at one distance."""
        import numpy as np

        inputs = np.arange(1.0, 8.0, dtype=np.float32)
        fork = self.subject.fork([float(value) for value in inputs])
        if fork is None:
            pytest.skip(f"the harness of {self.subject.framework} has no module that returns several tensors")
        model, step, name = fork
        _, readings = self.see((), (), watching=Watching(samples=4), chain=(model, step, [name]))
        expected = np.concatenate([inputs, 2 * inputs])[::4]  # 4 has no factor of the seven elements of each
        np.testing.assert_array_equal(only(readings, name).sample, expected)
        gradients = np.repeat(np.float32([1.0, 3.0]), len(inputs))[::4]
        np.testing.assert_array_equal(only(readings, name, "backward").sample, gradients)

    @requires("probe")
    def test_operations_and_times_are_read_where_they_are_asked_for(self) -> None:
        """An operation stands with the innermost module that it ran in, and with what it received."""
        names, readings = self.see(WEIGHTS, ROW, watching=Watching(operations=True, times=True))
        for name in names:
            inside = [reading for reading in readings if reading.module == name and reading.operation]
            seen = [f"{entry.operation} {entry.direction}" for entry in inside]
            assert any(entry.direction == "forward" and entry.inputs.elements > len(ROW) for entry in inside), (
                f"in module {name!r} no operation was read that received the batch and the weight, but {seen}"
            )
            assert (only(readings, name).seconds or 0) > 0
        plain = self.see(WEIGHTS, ROW)[1]
        assert not any(reading.operation or reading.seconds for reading in plain)


def same(a: Replayed, b: Replayed) -> bool:
    """Return whether two replays agree bit by bit."""
    return (
        a.loss == b.loss
        and a.parameters == b.parameters
        and a.gradients.keys() == b.gradients.keys()
        and all((a.gradients[name] == b.gradients[name]).all() for name in a.gradients)
    )


class ForceTests(PrecisionTests):
    """The verb `force`."""

    @requires("probe")
    def test_a_module_computes_in_the_low_dtype_forward_and_backward(self) -> None:
        """Its output and the gradient that it returns are rounded, those of the others are not."""
        low, near = self.low()
        model, _, names = chain = self.subject.chain((1.0, near, 1.0), (near,))
        _, readings = self.see((), (), self.probe.force(model, {names[1]: low}), chain=chain)
        assert [only(readings, name).dtype for name in names[:2]] == ["float32", self.kept(low)]
        assert [numbers(only(readings, name)) for name in names[:2]] == [[near], [1.0]]
        if self.kept(low) == low:  # else the weight that multiplies it is not rounded
            assert numbers(only(readings, names[0], "backward")) == [1.0]

    @requires("probe")
    def test_a_module_computes_in_float32_where_all_else_is_low(self) -> None:
        """Its own dtype is that of its output, and no digit is lost in it."""
        if not self.declares("casting"):
            pytest.skip(f"backend {self.backend.name!r} casts nothing: there is nothing else that is low")
        low, near = self.low()
        plan = self.start().plan
        model, _, names = chain = self.subject.chain((near, near, near), (1.0,))
        _, readings = self.see((), (), self.probe.force(model, {names[1]: "float32"}), plan=plan, chain=chain)
        assert [only(readings, name).dtype for name in names] == [low, "float32", low]
        assert [numbers(only(readings, name)) for name in names] == [[1.0], [near], [1.0]]

    @requires("probe")
    def test_a_module_is_forced_by_its_name_within_a_larger_model_and_by_its_former_one(self) -> None:
        """The former holds in all calls, the other from the call of the larger model on, also by itself."""
        low, _ = self.low()
        for in_the_larger, expected in ((False, [low] * 3), (True, ["float32", low, low])):
            model, step, names = self.subject.chain(WEIGHTS, ROW)
            larger, part, _ = self.larger(model)
            name = f"{part}.{names[1]}"
            with (
                self.probe.force(None, {name if in_the_larger else names[1]: low}),
                self.probe.watch(None, Watching()) as watch,
            ):
                for called in (model, larger, model):
                    step(called)
            dtypes = [entry.dtype for entry in watch.readings() if (entry.module, entry.direction) == (name, "forward")]
            assert dtypes == [self.kept(dtype) for dtype in expected]

    @requires("probe")
    def test_the_last_pattern_that_matches_holds(self) -> None:
        """A module in a forced one obeys its own entry."""
        low, _ = self.low()
        for dtypes in ({"*": "float32", "last": low}, {"last": low, "*": "float32"}):
            model, _, names = chain = self.subject.chain(WEIGHTS, ROW)
            entries = {names[-1] if name == "last" else name: dtype for name, dtype in dtypes.items()}
            _, readings = self.see((), (), self.probe.force(model, entries), chain=chain)
            held = self.kept(list(entries.values())[-1])
            assert [only(readings, name).dtype for name in names] == ["float32", "float32", held]

    @requires("probe")
    def test_leaving_the_region_restores_the_model(self) -> None:
        """By its end, and by an exception in it."""
        low, near = self.low()
        chain = self.subject.chain((1.0, 1.0), (near,))
        with self.probe.force(chain[0], {"*": low}):
            pass
        with pytest.raises(KeyError), self.probe.force(chain[0], {"*": low}):
            raise KeyError("region")
        names, readings = self.see((), (), chain=chain)
        assert numbers(only(readings, names[-1])) == [near]
        assert self.subject.numbers(chain[1](chain[0])) == [near]

    @requires("probe")
    def test_a_pattern_of_no_module_and_an_unsupported_dtype_are_refused(self) -> None:
        """Before anything runs."""
        model, _, names = self.subject.chain(WEIGHTS, ROW)
        for error, dtypes, passed in (
            (ampx.UnsupportedOpError, {"nowhere.*": "float32"}, "'nowhere.*'"),
            (ampx.UnsupportedDtypeError, {names[0]: "float12"}, "'float12'"),
        ):
            with (
                refused(error, passed=passed, accepted="accepted: ", advice=""),
                self.probe.force(model, dtypes),
            ):
                pass

    @requires("probe")
    def test_a_denied_module_computes_in_float32(self) -> None:
        """By an entry of `deny` in `init`, whose name `prepare` compares with those of the model."""
        if not self.declares("process casting"):
            pytest.skip(f"backend {self.backend.name!r} does not cast by itself: there is nothing to keep out of it")
        low, near = self.low()
        model, step, names = self.subject.chain((near, near, near), (1.0,))
        model = self.start(deny=[f"module:{names[1]}"]).prepare(model)
        with self.probe.watch(model, Watching(samples=64)) as watch:
            step(model)
        readings = [only(watch.readings(), name) for name in names]
        assert [reading.dtype for reading in readings] == [low, "float32", low]
        assert [numbers(reading) for reading in readings] == [[1.0], [near], [1.0]]
        amp = self.start(deny=["module:nowhere.*"])
        with refused(ampx.UnsupportedOpError, passed="nowhere.*", accepted="", advice="Correct"):
            amp.prepare(self.subject.chain(WEIGHTS, ROW)[0])

    @requires("probe")
    def test_to_fewer_digits_values_are_rounded_whatever_their_size(self) -> None:
        """Inputs, outputs and gradients of outputs, which stay float32; the dtype's range does not count."""
        import numpy as np

        between = 1 + 2.0**-8 * 1.5  # of two numbers with eight digits, this is nearer to the second
        inputs = (between, 2.0**-60 * between, -between, 2.0**100 * between, -3.4e38, math.inf, 0.0)
        model, _, names = chain = self.subject.chain((1.0, 2.0**-2, between), inputs)
        _, readings = self.see((), (), self.probe.force(model, {names[1]: digits_of(8)}), chain=chain)
        reading, near = only(readings, names[1]), 1 + 2.0**-7
        received = np.array([near, 2.0**-60 * near, -near, 2.0**100 * near, -3.4e38, math.inf, 0.0], np.float32)
        assert reading.dtype == "float32"
        assert reading.sample is not None
        np.testing.assert_array_equal(reading.sample[:4], received[:4] / 4)
        np.testing.assert_allclose(reading.sample[4:], received[4:] / 4, rtol=2.0**-8)
        gradient = np.full(len(inputs), near / 4, np.float32)
        np.testing.assert_array_equal(only(readings, names[0], "backward").sample, gradient)

    @requires("simulates")
    def test_a_simulated_dtype_rounds_inputs_outputs_and_gradients(self) -> None:
        """As the dtype itself would; what is rounded keeps the dtype that it has."""
        import numpy as np

        from ampx.numerics.rounding import round_to

        for dtype in sorted(self.simulated):
            between = 1 + 2.0 ** -FORMATS[dtype].bits * 1.5  # the dtype has 1, and nothing else next to this
            inputs = (between, 2.0**-40, -between, 2.0**17)  # the last is beyond float16
            model, _, names = chain = self.subject.chain((1.0, 2.0, between), inputs)
            region = self.probe.force(model, {names[1]: dtype})
            _, readings = self.see((), (), region, chain=chain)
            received = round_to(inputs, dtype)
            reading = only(readings, names[1])
            assert reading.dtype == "float32"
            np.testing.assert_array_equal(reading.sample, received * 2)
            gradient = round_to(np.full(len(inputs), between, np.float32), dtype) * 2
            np.testing.assert_array_equal(only(readings, names[0], "backward").sample, gradient)


class ReplayTests(PrecisionTests):
    """The verb `replay`."""

    @requires("probe")
    def test_a_replay_equals_arithmetic_whatever_the_scale(self) -> None:
        """Loss, gradients and parameters are those of the batch; the scale is out of them."""
        inputs = (1.0, 2.0, -4.0)
        for scale in (1.0, 2.0**10):
            model, step, _ = self.subject.chain(WEIGHTS, inputs)
            replayed = self.probe.replay(model, step, None, scale)
            whole = math.prod(WEIGHTS) * sum(inputs)
            assert replayed.loss == whole
            assert sorted(float(gradient.item()) for gradient in replayed.gradients.values()) == sorted(
                whole / weight for weight in WEIGHTS
            )
            assert all(gradient.dtype.name == "float32" for gradient in replayed.gradients.values())
            assert replayed.parameters.keys() == replayed.gradients.keys()
            assert sorted(stats.largest for stats in replayed.parameters.values()) == sorted(WEIGHTS)

    @requires("probe")
    def test_a_replay_draws_the_same_mask_twice(self) -> None:
        """And the model's noise is on: a mask is drawn."""
        model, step, _ = self.subject.chain(WEIGHTS, ROW, noise=True)
        first = self.probe.replay(model, step, None)
        assert same(self.probe.replay(model, step, None), first)
        plain, whole, _ = self.subject.chain(WEIGHTS, ROW)
        assert self.probe.replay(plain, whole, None).loss != first.loss

    @requires("probe")
    def test_a_replay_leaves_everything_as_it_was(self) -> None:
        """Weights, buffers, pending gradients and random state."""
        model, step, _ = self.subject.chain(WEIGHTS, ROW, noise=True)
        if self.declares("implicit gradients"):
            self.subject.backward(step(model), self.subject.parameters_of(model))
        before = self.subject.model_state(model)
        self.probe.replay(model, step, None, 2.0)
        if self.declares("casting"):
            self.probe.replay(model, step, self.start().plan)
        assert self.subject.model_state(model) == before

        def fail(model: Any) -> None:
            step(model)
            raise KeyError("step")

        with pytest.raises(KeyError, match="step"):
            self.probe.replay(model, fail, None)
        assert self.subject.model_state(model) == before

    @requires("probe")
    def test_a_wrapped_optimizer_does_not_see_a_replay(self) -> None:
        """Between the body and the step it changes neither pending gradients nor their loss scale."""
        if not self.declares("implicit gradients"):
            pytest.skip(f"backend {self.backend.name!r} has gradients as values: a replay cannot touch them")
        amp = self.start(ampx.LossScale(init_scale=2.0**4))  # at which gradients are finite in any dtype
        model, step, _ = self.subject.chain(WEIGHTS, (1.0, 2.0, -4.0))
        parameters = self.subject.parameters_of(model)
        opt = amp.wrap_optimizer(self.subject.optimizer(parameters, momentum=False))
        for _ in range(2):
            with amp.scale_loss(self.subject.recorded(lambda: step(model)), opt) as scaled:
                self.subject.backward(scaled, parameters)
            pending = self.subject.gradients(parameters)
            self.probe.replay(model, step, None)
            assert self.subject.gradients(parameters) == pending
            self.subject.step(opt, None)
            assert self.subject.last_step(opt).applied
            self.subject.zero_grad(opt)

    @requires("probe")
    def test_a_plan_casts_and_without_one_all_is_float32(self) -> None:
        """Also where a session has casting on for the whole process."""
        _, near = self.low()
        model, step, _ = self.subject.chain((1.0,), (near,))
        amp = self.start()
        assert self.probe.replay(model, step, None).loss == near
        if self.declares("casting"):
            assert self.probe.replay(model, step, amp.plan).loss == 1.0
        if self.declares("process casting"):
            assert self.subject.casting() != self.outside

    @requires("probe")
    def test_a_step_that_returns_no_loss_is_refused(self) -> None:
        """The error says what came instead, and nothing has changed; no gradient flows from a constant."""
        model, _, _ = self.subject.chain(WEIGHTS, ROW)
        before = self.subject.model_state(model)
        with pytest.raises(ampx.LossError, match="str"):
            self.probe.replay(model, lambda model: "loss", None)
        constants = [self.subject.tensor([1], "int64"), self.subject.tensor([1.0], "float32")]
        if not self.declares("vector_losses"):
            constants.append(self.subject.tensor([1.0, 2.0], "float32"))
        for wrong in (1.0, *constants):
            with pytest.raises(ampx.LossError):
                self.probe.replay(model, functools.partial(lambda loss, model: loss, wrong), None)
        assert self.subject.model_state(model) == before
