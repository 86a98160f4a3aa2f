"""Sessions begin, replace each other and end; a backend is what it declares."""

from __future__ import annotations

import pkgutil
from typing import Any

import pytest

import ampx
from ampx.backend import CONTRACTS, Device, offer
from ampx.policy import OptLevel
from ampx.rooms import is_there
from ampx.testing.base import KitTests, requires
from ampx.testing.bench import FINITE, OVERFLOW, Bench
from ampx.testing.checks import refused
from ampx.testing.harness import Chosen
from ampx.testing.kit.orders import with_optimizer_objects


def small(bench: Bench) -> Chosen:
    """Return gradients that no dtype overflows with, scaled."""
    return [[2.0**-4] * len(values) for values in bench.values()]


class SessionTests(KitTests):
    """`init`, `enabled`, `shutdown`."""

    def test_a_disabled_session_is_transparent(self) -> None:
        """The script runs as if ampx were not there, casting included."""
        amp = self.start(enabled=False)
        bench, plain = self.bench(amp, momentum=True), self.plain(momentum=True)
        assert self.subject.casting() == self.outside
        assert not amp.enabled
        with amp.autocast():
            assert self.subject.casting() == self.outside
        for slopes in (FINITE, FINITE):
            loss = bench.loss(slopes)
            with amp.scale_loss(loss, bench.opt) as scaled:
                assert scaled is loss
                if self.declares("optimizer objects"):
                    bench.receive(self.subject.backward(scaled, bench.parameters))
            if not self.declares("optimizer objects"):
                bench.accumulate(slopes)
            assert bench.step() == ampx.StepResult(True, None, 1.0, 1.0, 0, None)
            assert bench.scale == 1.0, "a script that divides gradients by the loss scale would change them"
            plain.train_plainly(slopes)
        assert bench.snapshot() == plain.snapshot()
        assert amp.half_function(self.subject.dtype_of)(self.subject.tensor([1.0], "float32")) == "float32"

    def test_a_second_init_replaces_the_first(self) -> None:
        """The former session's casting is gone, module-level calls mean the new one, optimizers go on."""
        first = self.start(ampx.LossScale(init_scale=4.0))
        bench = self.bench(first)
        second = self.start(ampx.LossScale(init_scale=32.0), process_wide=False)
        assert ampx.current(self.subject.framework) is second
        assert self.subject.casting() == self.outside
        assert self.bench(second).scale == 32.0
        assert bench.train() == ampx.StepResult(True, True, 4.0, 4.0, 0, None)
        first.shutdown()
        assert ampx.current(self.subject.framework) is second

    def test_shutdown_restores_the_framework(self) -> None:
        """However the session ends: by call, by call again, by leaving its block, by an exception in it."""
        before = self.subject.surroundings()
        amp = self.start()
        bench = self.bench(amp)
        bench.train()
        amp.shutdown()
        amp.shutdown()
        assert self.subject.casting() == self.outside
        with self.start():
            pass
        assert self.subject.casting() == self.outside
        with pytest.raises(KeyError), self.start():
            raise KeyError("block")
        assert self.subject.casting() == self.outside
        assert self.subject.surroundings() == before
        with pytest.raises(ampx.NotInitializedError):
            ampx.current()

    def test_wrapped_optimizers_outlive_their_session(self) -> None:
        """After `shutdown` a wrapped optimizer still unscales, skips and moves its scale."""
        amp = self.start()
        bench, plain = self.bench(amp), self.plain()
        amp.shutdown()
        assert bench.train().applied
        plain.train_plainly(FINITE)
        assert not bench.train(OVERFLOW).applied
        assert bench.values() == plain.values()
        assert bench.scale == 2.0**15

    def test_the_session_tells_what_it_does(self) -> None:
        """`effective` agrees with what was asked for, and with the framework."""
        amp = self.start(ampx.LossScale(init_scale=2.0))
        effective, device = amp.effective, self.backend.device(self.subject.device)
        casts = self.declares("casting")
        assert (effective.framework, effective.device) == (self.subject.framework, device.name)
        assert effective.dtype == (self.subject.dtype if casts else None)
        assert effective.loss_scale == ampx.LossScale(init_scale=2.0)
        assert effective.policy.compute_dtype == (self.subject.dtype if casts else "float32")
        assert effective.reason
        assert amp.framework == self.backend.name


class CapabilityTests(KitTests):
    """What is declared is there; what is not is refused."""

    def test_the_backend_describes_itself(self) -> None:
        """Its name is the registered one, and its devices compute no dtype that is not declared."""
        can = self.backend.capabilities
        assert self.backend.name == self.subject.framework
        assert isinstance(can, ampx.Capabilities)
        assert "O0" in can.levels
        assert can.devices
        device = self.backend.device(self.subject.device)
        assert isinstance(device, Device)
        assert device.native | device.emulated <= can.dtypes
        assert device.preferred is None or device.preferred in device.native
        assert self.backend.device(device.name).name == device.name

    def test_what_is_offered_is_there(self) -> None:
        """The class that is named for a contract fulfils it."""
        for name in self.backend.offers:
            if name != "demo" and is_there(CONTRACTS[name].partition(":")[0]):  # its data set is not always installed
                assert offer(self.backend, pkgutil.resolve_name(CONTRACTS[name])).backend is self.backend

    def test_only_raw_optimizers_are_optimizers(self) -> None:
        """Asked of raw ones, wrapped ones and other things, `is_optimizer` answers yes, no, no."""
        bench = self.bench(self.start())
        assert [self.backend.is_optimizer(candidate) for candidate in (bench.raw, object(), None)] == [
            True,
            False,
            False,
        ]
        if isinstance(bench.wrapped, ampx.WrappedOptimizer):  # else `wrap_optimizer` knows what it returned
            assert not self.backend.is_optimizer(bench.wrapped)

    def test_levels_that_are_not_declared_are_refused(self) -> None:
        """`init` names those that are."""
        for level in sorted({"O0", "O1", "O2", "O3"} - self.backend.capabilities.levels):
            with refused(ampx.UnsupportedByBackendError, passed=f"level='{level}'", accepted="O0", advice="Choose"):
                self.start(level=level)
        for level in sorted(self.backend.capabilities.levels):
            assert self.start(level=level).effective.level == level

    def test_dtypes_that_the_device_lacks_are_refused(self) -> None:
        """By an error, or on request by a warning and what the device can do."""
        if not self.backend.capabilities.dtypes:
            pytest.skip("the backend casts nothing: there is no dtype to refuse")
        device = self.backend.device(self.subject.device)
        for dtype in sorted({"float16", "bfloat16"} - device.native - device.emulated):
            with refused(
                ampx.UnsupportedDtypeError, passed=f"dtype='{dtype}'", accepted="supported: ", advice="Choose"
            ):
                self.start(dtype=dtype, level="O1")
            with pytest.warns(ampx.PrecisionWarning, match="falling back"):
                fallen = self.start(dtype=dtype, level="O1", on_unsupported="warn")
            assert fallen.effective.dtype == device.preferred
        assert not self.declares("casting") or self.subject.dtype in device.native | device.emulated


class LevelTests(KitTests):
    """`prepare`, and the levels that need it."""

    @property
    def levels(self) -> list[OptLevel]:
        """The levels that need `prepare`."""
        return sorted(self.backend.capabilities.levels & {"O2", "O3"})

    def over(self, model: Any) -> Bench:
        """Make an optimizer over the parameters of a model."""
        bench = self.plain()
        bench.parameters = self.subject.parameters_of(model)
        bench.raw = self.subject.optimizer(bench.parameters, momentum=False)
        return bench

    def look(self, model: Any) -> list[tuple[str, list[float]]]:
        """Read the parameters of a model, and their dtypes."""
        return [(self.subject.dtype_of(p), self.subject.numbers(p)) for p in self.subject.parameters_of(model)]

    @requires("prepare")
    def test_prepare_gives_the_parameters_their_dtype(self) -> None:
        """At O3 every parameter has the compute dtype; at O0 and O1 the model stays as it is."""
        for level in sorted(self.backend.capabilities.levels & {"O0", "O1", "O3"}):
            amp, model = self.start(level=level), self.subject.model()
            kind, before = type(model), self.look(model)
            prepared = amp.prepare(model)
            assert {dtype for dtype, _ in self.look(prepared)} == {self.subject.dtype if level == "O3" else "float32"}
            if level != "O3":
                assert prepared is model
                assert (type(model), self.look(model)) == (kind, before)

    @requires("prepare")
    def test_preparing_the_same_again_changes_nothing(self) -> None:
        """Neither the parameters, nor what the optimizer updates."""
        for level in self.levels:
            amp, model = self.start(level=level), self.subject.model()
            bench = self.over(model)
            model, opt = amp.prepare(model, amp.wrap_optimizer(bench.raw))
            before = self.look(model)
            again, other = amp.prepare(model, opt)
            assert self.look(again) == self.look(amp.prepare(again)) == before
            if self.declares("optimizer objects"):
                assert (again, other) == (model, opt)
            bench.parameters = self.subject.parameters_of(again)
            assert bench.join(amp, other).train(small(bench)).applied

    @requires("prepare")
    def test_a_level_that_needs_prepare_does_not_train_without_it(self) -> None:
        """It would train in float32: the loss or the step is refused, and `prepare` may come after that."""
        for level in self.levels:
            amp, model = self.start(level=level), self.subject.model()
            bench = self.over(model).wrap(amp)
            before = self.look(model)
            with pytest.raises(ampx.ProtocolError, match="prepare"):
                bench.train(small(bench))
            assert self.look(model) == before
            bench.pending = None
            if self.declares("optimizer objects"):
                self.subject.zero_grad(bench.opt)
            model, opt = amp.prepare(model, bench.wrapped)
            bench.parameters = self.subject.parameters_of(model)
            assert bench.join(amp, opt).train(small(bench)).applied

    @requires("prepare")
    @with_optimizer_objects
    def test_preparing_while_gradients_are_pending_is_refused(self) -> None:
        """They belong to the parameters as they were; the other model stays in float32."""
        amp, first, second = self.start(level=self.levels[0]), self.subject.model(), self.subject.model()
        bench = self.plain()
        bench.raw = self.subject.optimizer(
            [*self.subject.parameters_of(first), *self.subject.parameters_of(second)], momentum=False
        )
        first, opt = amp.prepare(first, amp.wrap_optimizer(bench.raw))
        bench.parameters = self.subject.parameters_of(first)
        bench.join(amp, opt).accumulate(small(bench))
        before = self.look(second)
        with pytest.raises(ampx.ProtocolError, match="pending"):
            amp.prepare(second, opt)
        assert self.look(second) == before

    @requires("prepare")
    def test_only_models_and_optimizers_are_prepared(self) -> None:
        """The error says what came instead, and comes before anything is changed."""
        for level in sorted(self.backend.capabilities.levels - {"O0"}):
            amp, model = self.start(level=level), self.subject.model()
            before = self.look(model)
            for wrong in (3, "model"):
                name = type(wrong).__name__
                with refused(ampx.InvalidOptionError, passed=name, accepted="accepted", advice="Pass"):
                    amp.prepare(model, wrong)
                if level in self.levels:  # at O1 there may be nothing to do to a model, whatever it is
                    with refused(ampx.InvalidOptionError, passed=name, accepted="accepted", advice="Pass"):
                        amp.prepare(wrong)
            assert self.look(model) == before

    @requires("master_weights")
    def test_master_weights_gather_small_updates(self) -> None:
        """At O2, updates too small for a low-precision parameter add up in float32, and it follows."""
        bench = self.prepared(self.start(level="O2"))
        assert {self.subject.dtype_of(parameter) for parameter in bench.parameters} == {self.subject.dtype}
        before = bench.values()
        slopes = [[2.0**-12] * len(values) for values in before]
        for _ in range(128):
            assert bench.train(slopes).applied
        for values, moved in zip(before, bench.values(), strict=True):
            for old, new in zip(values, moved, strict=True):
                # A parameter below 2 is rounded by at most 2**-8 in bfloat16.
                assert abs(old - new - 128 * 0.5 * 2.0**-12) <= 2.0**-8, "the updates were lost or doubled"
