"""Mistakes are refused with their own error, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ampx
from ampx.rooms import is_there
from ampx.testing.base import KitTests, requires
from ampx.testing.bench import FINITE, OVERFLOW, Bench
from ampx.testing.checks import refused
from ampx.testing.kit.orders import on_parameters


class OptimizerErrorTests(KitTests):
    """Mistakes about optimizers."""

    def test_wrapping_twice_is_refused(self) -> None:
        """The wrapped one again, the raw one again, and one twice in a list."""
        amp = self.start()
        bench, fresh = self.bench(amp), self.plain()
        wrongs = [bench.wrapped, [fresh.raw, fresh.raw], [fresh.raw, bench.wrapped]]
        if self.declares("optimizer objects"):  # a value has no identity: wrapped again, it is another optimizer
            wrongs.append(bench.raw)
        for wrong in wrongs:
            with refused(ampx.AlreadyWrappedError, passed="wrapped already", accepted="unscaled twice", advice="Use"):
                amp.wrap_optimizer(wrong)
        if self.declares("optimizer objects"):
            assert len(amp.state_dict()["groups"]) == 1
        assert bench.train().applied
        assert fresh.wrap(amp).train().applied

    def test_wrapping_something_else_is_refused(self) -> None:
        """No optimizer of the framework, no wrapping."""
        amp = self.start()
        no_optimizers: list[Any] = [object(), None, self.subject.parameter([1.0]), "sgd"]
        for wrong in no_optimizers:
            with refused(ampx.NotAnOptimizerError, passed=type(wrong).__name__, accepted="list of them", advice="Pass"):
                amp.wrap_optimizer(wrong)
        if self.declares("optimizer objects"):
            assert amp.state_dict()["groups"] == []

    def test_unknown_or_absurd_options_are_refused(self) -> None:
        """Options of `wrap_optimizer` and `init` are checked before anything happens."""
        amp = self.start()
        bench = self.plain()
        for options, passed in (
            ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0"),
            ({"max_grad_norm": 0}, "max_grad_norm=0"),
            ({"max_grad_value": "1"}, "max_grad_value='1'"),
            ({"loss_scale": "fast"}, "loss_scale='fast'"),
            ({"loss_scale": -2.0}, "init_scale=-2.0"),
            ({"colour": "red"}, "colour"),
        ):
            with refused(ampx.InvalidOptionError, passed=passed, accepted="accepted: ", advice=""):
                amp.wrap_optimizer(bench.raw, **options)
        if self.declares("optimizer objects"):
            assert amp.state_dict()["groups"] == []
        assert bench.wrap(amp).train().applied

    def test_absurd_settings_leave_the_session_alone(self) -> None:
        """`init` refuses what it cannot do, and the former session goes on."""
        bench = self.bench(self.start())
        casting = self.subject.casting()
        wrong: tuple[tuple[type[Exception], dict[str, Any], str], ...] = (
            (ampx.UnsupportedLevelError, {"level": "O9"}, "level='O9'"),
            (ampx.UnsupportedDtypeError, {"dtype": "int8"}, "dtype='int8'"),
            (ampx.UnsupportedDeviceError, {"device": "abacus"}, "device='abacus'"),
            (ampx.InvalidOptionError, {"on_unsupported": "cry"}, "on_unsupported='cry'"),
            (ampx.InvalidOptionError, {"nan_loss": "maybe"}, "nan_loss='maybe'"),
            (ampx.InvalidOptionError, {"loss_scale": 0.0}, "init_scale=0.0"),
        )
        for error, options, passed in wrong:
            with refused(error, passed=passed, accepted="accepted: ", advice=""):
                self.start(**options)
        assert ampx.current(self.subject.framework) is bench.amp
        assert self.subject.casting() == casting
        assert bench.train().applied

    def test_calls_without_a_session_say_so(self) -> None:
        """Every module-level call that needs `init` names it."""
        bench = self.plain()
        calls: tuple[Callable[[], Any], ...] = (
            lambda: ampx.wrap_optimizer(bench.raw),
            lambda: ampx.scale_loss(bench.loss(), bench.raw),
            lambda: ampx.unscale(bench.raw),
            lambda: ampx.clip_grad_norm(bench.raw, 1.0),
            lambda: ampx.gate(object(), bench.raw),
            lambda: ampx.prepare(bench.raw),
            *([lambda: ampx.trace_overflow(bench.raw)] if is_there("ampx.numerics") else []),
            lambda: ampx.autocast().__enter__(),
            ampx.state_dict,
            lambda: ampx.load_state_dict({}),
            lambda: ampx.on_event(print),
            ampx.current,
        )
        for call in calls:
            with refused(ampx.NotInitializedError, passed="no session", accepted="active sessions", advice="ampx.init"):
                call()

    def test_a_session_that_was_shut_down_wraps_nothing(self) -> None:
        """`wrap_optimizer` on an ended session is refused."""
        amp = self.start()
        amp.shutdown()
        with refused(ampx.ProtocolError, passed="was shut down", accepted="an active session", advice="Call"):
            amp.wrap_optimizer(self.plain().raw)


class ProtocolErrorTests(KitTests):
    """Calls in an order that would corrupt training."""

    def test_scaling_for_a_raw_optimizer_is_refused(self) -> None:
        """`scale_loss` needs what `wrap_optimizer` returned; so do the other calls."""
        amp = self.start()
        bench = self.plain()
        calls: tuple[Callable[[], Any], ...] = (
            lambda: amp.scale_loss(bench.loss(), bench.raw),
            lambda: amp.unscale(bench.raw),
            lambda: amp.clip_grad_norm(bench.raw, 1.0),
            lambda: amp.gate(object(), bench.raw),
            lambda: amp.state_dict(bench.raw),
            lambda: amp.load_state_dict({}, bench.raw),
        )
        for call in calls:
            with refused(ampx.NotWrappedError, passed="did not return", accepted="wrapped", advice="wrap_optimizer"):
                call()

    @requires("optimizer objects")
    def test_scaling_for_no_optimizer_or_one_twice_is_refused(self) -> None:
        """An empty list, or the same optimizer twice, is a mistake."""
        amp = self.start()
        bench = self.bench(amp)
        for wrong, passed in (([], "an empty list"), ([bench.opt, bench.opt], "twice")):
            with refused(ampx.InvalidOptionError, passed=passed, accepted="different ones", advice="Pass"):
                amp.scale_loss(bench.loss(), wrong)
        assert bench.train().applied

    @on_parameters
    def test_a_list_refused_for_one_optimizer_leaves_all_as_they_were(self) -> None:
        """The gradients of a skipped step were not cleared, and the others are left by a step, or of another loss."""
        for pending in (False, True)[: 1 + self.declares("per_loss_scales")]:
            amp = self.start()
            fine, skipped = benches = self.bench(amp), self.bench(amp)
            fine.accumulate()
            if not pending:
                fine.step(forget=False)
            skipped.accumulate(OVERFLOW)
            skipped.step(forget=False)

            def look(bench: Bench) -> str:
                return repr((bench.snapshot(), bench.saved(), self.subject.gradients(bench.parameters)))  # NaN, too

            before = [look(bench) for bench in benches]
            for order in (benches, benches[::-1]):
                loss = self.subject.loss([*fine.parameters, *skipped.parameters], [*FINITE, *FINITE])
                with refused(ampx.ProtocolError, passed="skipped step", accepted="accepted: cleared", advice="Call"):
                    amp.scale_loss(loss, [bench.opt for bench in order], loss_id=int(pending)).__enter__()
            assert [look(bench) for bench in benches] == before


class LossErrorTests(KitTests):
    """Losses that cannot be scaled."""

    def test_losses_that_cannot_be_scaled_are_refused(self) -> None:
        """Not floating, detached, no tensor, NaN: each its own error, and training goes on."""
        amp = self.start(nan_loss="raise")
        bench, tensor, casting = self.bench(amp), self.subject.tensor, self.subject.casting()
        wrong: tuple[tuple[type[Exception], Any, str, str, str], ...] = (
            (ampx.LossDtypeError, tensor([1], "int64"), "int", "floating", ""),
            (ampx.LossDtypeError, tensor([True], "bool"), "bool", "floating", ""),
            (ampx.LossDtypeError, "loss", "str", "accepted: ", ""),
            (ampx.LossDtypeError, None, "None", "accepted: ", ""),
            (ampx.DetachedLossError, tensor([1.0], "float32"), "detached", "from the parameters", "Remove"),
            (ampx.NonFiniteLossError, self.subject.nan_loss(bench.parameters), "NaN", "nan_loss='skip'", "look at"),
        )
        for error, loss, passed, accepted, advice in wrong:
            if error is ampx.DetachedLossError and not self.subject.detaches:
                continue
            hint = "If the framework cannot tell, set detaches = False in the harness."
            hint = hint if error is ampx.DetachedLossError else ""
            for losses in (loss, [bench.loss(), loss]):
                with refused(error, passed=passed, accepted=accepted, advice=advice, hint=hint):
                    amp.scale_loss(losses, bench.opt).__enter__()
                assert self.subject.casting() == casting
        assert bench.train().applied

    @requires("vector_losses")
    def test_vector_losses_are_added_up(self) -> None:
        """A loss of several elements gives the gradients of their sum."""
        amp = self.start(nan_loss="raise")
        bench, plain = self.bench(amp), self.plain()
        bench.accumulate_loss(self.subject.wide_loss)
        assert bench.step().applied
        plain.train_plainly(((2.0, 2.0), (0.0,)))
        assert bench.values() == plain.values()

    def test_scaling_twice_is_refused(self) -> None:
        """A loss that came out of `scale_loss` does not go in again, for any optimizer."""
        amp = self.start()
        a, b = self.bench(amp), self.bench(amp)
        with amp.scale_loss(a.loss(), a.opt) as scaled:
            if self.declares("optimizer objects"):
                a.receive(self.subject.backward(scaled, a.parameters))
        for bench in (a, b):
            with refused(ampx.AlreadyScaledError, passed="came out of scale_loss", accepted="twice", advice="Pass"):
                amp.scale_loss(scaled, bench.opt).__enter__()
        assert (a.step() if self.declares("optimizer objects") else a.train()).applied

    def test_a_nan_loss_is_skipped_on_request(self) -> None:
        """`nan_loss="skip"` makes it an overflow like any other."""
        amp = self.start(nan_loss="skip")
        bench = self.bench(amp)
        before = bench.snapshot()
        bench.accumulate_loss(self.subject.nan_loss)
        result = bench.step()
        assert (result.applied, result.next_scale) == (False, 2.0**15)
        assert bench.snapshot() == before
