"""Orders of calls: each gives the numbers of plain arithmetic, or is refused before anything changes.

One test is one row of docs/explanation/order-of-calls.md, and the first line of its docstring is the row's first cell.
Only orders that published code needs are reconciled: the docstring names the program, by its path in `tests/`.
The oracle is arithmetic on the gradients that a test chooses: gradient descent with learning rate 0.5, without
momentum, from the bench's first weights.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

import ampx
from ampx.session import Amp
from ampx.testing.base import KitTests, requires
from ampx.testing.bench import FINITE, NAN, OTHER, OVERFLOW, START, Bench, multi_backward
from ampx.testing.checks import refused
from ampx.testing.harness import Chosen


def on_parameters(test: Callable[[Any], None]) -> Callable[[Any], None]:
    """Run a test where gradients hang on parameters; nothing adds to gradients that are values."""

    @functools.wraps(test)
    def selected(self: KitTests) -> None:
        if not self.declares("implicit gradients"):
            pytest.skip(f"backend {self.backend.name!r} has gradients as values: the order has no meaning")
        test(self)

    return selected


def with_optimizer_objects(test: Callable[[Any], None]) -> Callable[[Any], None]:
    """Run a test where an optimizer knows what was scaled for it; a pure function of its state does not."""

    @functools.wraps(test)
    def selected(self: KitTests) -> None:
        if not self.declares("optimizer objects"):
            pytest.skip(f"backend {self.backend.name!r} has the optimizer's state as a value: the order has no meaning")
        test(self)

    return selected


def moved(*gradients: Chosen, start: Chosen = START) -> list[list[float]]:
    """Return the weights after one step with the sum of these gradients."""
    sums = [[sum(slopes) for slopes in zip(*vectors, strict=True)] for vectors in zip(*gradients, strict=True)]
    return [[w - 0.5 * g for w, g in zip(*pair, strict=True)] for pair in zip(start, sums, strict=True)]


class OrderTests(KitTests):
    """What happens in each order of calls."""

    def sharing(self, amp: Amp) -> tuple[Bench, Bench]:
        """Wrap two optimizers that both hold the first parameter."""
        a, b = self.plain(), self.plain()
        b.parameters = [a.parameters[0], b.parameters[1]]
        b.raw = self.subject.optimizer(b.parameters, momentum=False)
        return a.wrap(amp), b.wrap(amp)

    def unscale(self, bench: Bench) -> None:
        """Unscale, where gradients hang on parameters."""
        if self.declares("implicit gradients"):
            ampx.unscale(bench.opt)

    def backward(self, bench: Bench, slopes: Chosen = FINITE) -> None:
        """Run a backward that ampx has no part in."""
        bench.receive(self.subject.backward(bench.loss(slopes), bench.parameters))

    def trains(self, bench: Bench) -> None:
        """Check that the optimizer trains once its gradients are cleared."""
        bench.pending = None
        self.subject.zero_grad(bench.opt)
        before = bench.values()
        assert bench.train().applied
        assert bench.values() == moved(FINITE, start=before)

    def adds_to_what_is_left(self, bench: Bench) -> None:
        """Check that a body adds to gradients of `OTHER` that a backward left, or is refused."""
        before, saved = bench.snapshot(), bench.saved()
        if self.subject.brings_backwards:
            bench.accumulate(FINITE)
            assert bench.step().applied
            assert bench.values() == moved(OTHER, FINITE)
            return
        with refused(ampx.ProtocolError, passed="or another backward", accepted="accepted: cleared", advice="Call"):
            bench.accumulate(FINITE)
        assert (bench.snapshot(), bench.saved()) == (before, saved)
        self.trains(bench)

    # -- bodies and the step ---------------------------------------------------------------------------

    def test_several_bodies_one_step(self) -> None:
        """Several bodies come before one step.

        Who writes it: `programs/plain/torch_accumulation_clipping.py`, `programs/mxnet/word_language_model.py`,
        Accelerate, Lightning.
        """
        bench = self.bench(self.start(ampx.LossScale(growth_interval=1)))
        for slopes in (FINITE, OTHER, FINITE):
            bench.accumulate(slopes)
        result = bench.step()
        assert (result.applied, result.scale, result.next_scale) == (True, 2.0**16, 2.0**17)
        assert bench.values() == moved(FINITE, OTHER, FINITE)

    @with_optimizer_objects
    def test_a_loss_scale_loaded_between_two_bodies(self) -> None:
        """The loss scale is loaded between two bodies of one step.

        Who writes it: `programs/plain/torch_accumulation_clipping.py`.
        """
        amp = self.start(ampx.LossScale(init_scale=2.0**8))
        bench = self.bench(amp)
        bench.accumulate(FINITE)
        state = amp.state_dict()
        state["groups"][0]["losses"][0]["scale"] = 2.0**4
        amp.load_state_dict(state)
        bench.accumulate(OTHER)
        assert bench.step().scale == 2.0**8
        assert bench.values() == moved(FINITE, OTHER)
        assert bench.train().scale == 2.0**4

    @requires("per_loss_scales")
    def test_bodies_of_several_loss_ids(self) -> None:
        """Bodies of several loss ids come before one step.

        Who writes it: `programs/apex/gan.py`.
        """
        bench = self.bench(self.start(ampx.LossScale(growth_interval=1)))
        bench.train(FINITE)  # the first id's scale is 2**17 from here on, the other's 2**16
        for loss_id, slopes in ((0, FINITE), (1, OTHER), (0, OTHER)):
            bench.accumulate(slopes, loss_id)
        assert bench.step().applied
        assert bench.values() == moved(FINITE, OTHER, OTHER, start=moved(FINITE))

    @with_optimizer_objects
    def test_a_body_without_backward(self) -> None:
        """A body has no backward.

        Who writes it: none needed: a step without gradients.
        """
        amp = self.start()
        bench = self.bench(amp)
        with amp.scale_loss(bench.loss(), bench.opt):
            pass
        saved = bench.saved()
        assert not bench.step(forget=False).applied
        assert (bench.values(), bench.saved()) == ([list(weights) for weights in START], saved)
        assert bench.train().applied
        assert bench.values() == moved(FINITE)

    @with_optimizer_objects
    def test_backward_after_the_body(self) -> None:
        """Backward runs on the scaled loss after its body.

        Who writes it: tapes, as in `docs/how-to/use-tensorflow.md`; Paddle's `GradScaler`.
        """
        amp = self.start()
        bench = self.bench(amp)
        with amp.scale_loss(bench.loss(), bench.opt) as scaled:
            pass
        bench.receive(self.subject.backward(scaled, bench.parameters))
        assert bench.step().applied
        assert bench.values() == moved(FINITE)

    @requires("sees_backward")
    def test_backward_of_the_loss_itself(self) -> None:
        """Backward runs on the loss itself, in its body."""
        amp = self.start()
        bench = self.bench(amp, momentum=True)
        before, saved, loss = bench.snapshot(), bench.saved(), bench.loss()
        with amp.scale_loss(loss, bench.opt):
            bench.receive(self.subject.backward(loss, bench.parameters))
        calls: list[Callable[[], Any]] = [lambda: bench.step(forget=False)]
        if self.declares("implicit gradients"):
            calls.append(lambda: amp.unscale(bench.opt))
        for call in calls:
            with refused(
                ampx.NotScaledError, passed="that was passed to scale_loss", accepted="yields", advice="Call opt.zero"
            ):
                call()
        assert bench.snapshot() == before
        assert bench.saved() == saved

    @with_optimizer_objects
    def test_a_body_in_a_body(self) -> None:
        """A body starts inside another of the same optimizer."""
        amp = self.start()
        bench = self.bench(amp)
        with amp.scale_loss(bench.loss(), bench.opt) as scaled:
            with refused(ampx.NestedScaleError, passed="entered again", accepted="scaled twice", advice="Leave"):
                amp.scale_loss(bench.loss(), bench.opt).__enter__()
            bench.receive(self.subject.backward(scaled, bench.parameters))
        assert bench.step().applied
        assert bench.values() == moved(FINITE)

    @with_optimizer_objects
    def test_a_body_in_a_body_of_another(self) -> None:
        """A body starts inside one of another optimizer.

        Who writes it: none needed.
        """
        amp = self.start()
        a, b = self.bench(amp), self.bench(amp, loss_scale=ampx.LossScale(init_scale=4.0))
        with amp.scale_loss(a.loss(FINITE), a.opt) as scaled:
            b.accumulate(OTHER)
            a.receive(self.subject.backward(scaled, a.parameters))
        for bench, slopes, scale in ((b, OTHER, 4.0), (a, FINITE, 2.0**16)):
            result = bench.step()
            assert (result.applied, result.scale) == (True, scale)
            assert bench.values() == moved(slopes)

    @with_optimizer_objects
    def test_a_step_in_a_body(self) -> None:
        """Step, unscale or clip_grad_norm is called inside a body."""
        amp = self.start()
        bench = self.bench(amp)
        with amp.scale_loss(bench.loss(), bench.opt) as scaled:
            bench.receive(self.subject.backward(scaled, bench.parameters))
            pending, before = bench.pending, bench.snapshot()
            calls: list[Callable[[], Any]] = [lambda: bench.step(forget=False)]
            if self.declares("implicit gradients"):
                calls.append(lambda: amp.unscale(bench.opt))
            if self.declares("clip_grad_norm"):
                calls.append(lambda: amp.clip_grad_norm(bench.opt, 1.0))
            for call in calls:
                with refused(ampx.NestedScaleError, passed="inside a scale_loss body", accepted="", advice="Call"):
                    call()
            bench.pending = pending
            assert bench.snapshot() == before
        assert bench.step().applied
        assert bench.values() == moved(FINITE)

    @with_optimizer_objects
    def test_a_region_entered_twice(self) -> None:
        """A region is entered a second time."""
        amp = self.start()
        bench = self.bench(amp)
        region = amp.scale_loss(bench.loss(), bench.opt)
        with region as scaled:
            bench.receive(self.subject.backward(scaled, bench.parameters))
        with refused(ampx.ProtocolError, passed="entered a second time", accepted="once", advice="Call scale_loss"):
            region.__enter__()
        assert bench.step().applied
        assert bench.values() == moved(FINITE)

    # -- steps -----------------------------------------------------------------------------------------

    def test_a_step_without_gradients(self) -> None:
        """A step finds no gradients.

        Who writes it: `torch.distributed.checkpoint`, which steps to make optimizer states;
        `programs/plain/torch_several_optimizers.py`.
        """
        bench = self.bench(self.start(ampx.LossScale(growth_interval=2)))
        bench.train()
        before, saved = bench.snapshot(), bench.saved()
        if self.declares("explicit gradients"):
            bench.accumulate()
            bench.pending = None
        result = bench.step()
        assert (result.applied, result.scale, result.next_scale) == (False, 2.0**16, 2.0**16)
        assert bench.snapshot() == before
        assert bench.saved() == saved
        assert bench.train().next_scale == 2.0**17

    @with_optimizer_objects
    def test_a_step_on_gradients_that_no_body_scaled(self) -> None:
        """A step finds gradients that went through no body."""
        bench = self.bench(self.start(), momentum=True)
        bench.train()
        before, saved = bench.snapshot(), bench.saved()
        self.backward(bench)
        with refused(
            ampx.NotScaledError, passed="did not go through scale_loss", accepted="", advice="with ampx.scale_loss"
        ):
            bench.step()
        assert bench.snapshot() == before
        assert bench.saved() == saved

    @with_optimizer_objects
    def test_two_steps_after_one_body(self) -> None:
        """A second step comes without another body."""
        bench = self.bench(self.start())
        bench.accumulate()
        pending = bench.pending
        bench.step(forget=False)
        bench.pending = pending
        with refused(
            ampx.NotScaledError, passed="did not go through scale_loss", accepted="", advice="with ampx.scale_loss"
        ):
            bench.step()
        assert bench.values() == moved(FINITE)

    @with_optimizer_objects
    def test_a_raw_step_while_gradients_are_pending(self) -> None:
        """The raw optimizer is stepped while scaled gradients are pending."""
        if not self.subject.guards_raw_steps:
            pytest.skip(f"the harness of {self.backend.name!r} does not say that raw steps are guarded")
        bench = self.bench(self.start())
        for unscales in (False, True):
            bench.accumulate()
            if unscales:
                self.unscale(bench)
            before, pending = bench.snapshot(), bench.pending
            with refused(ampx.RawStepError, passed="was stepped while gradients", accepted="", advice="Call"):
                self.subject.plain_step(bench.raw, pending)
            assert bench.snapshot() == before
            assert bench.step().applied
        assert bench.values() == moved(FINITE, FINITE)

    @with_optimizer_objects
    def test_a_raw_step_while_nothing_is_pending(self) -> None:
        """The raw optimizer is stepped while nothing is pending.

        Who writes it: `programs/styles/torch_amp/warmup_raw.py`.
        """
        bench = self.bench(self.start())
        bench.train_plainly(FINITE)
        assert bench.values() == moved(FINITE)
        assert bench.train(OTHER).applied
        bench.train_plainly(FINITE)
        assert bench.values() == moved(FINITE, OTHER, FINITE)

    @requires("closures")
    def test_a_step_with_a_closure(self) -> None:
        """A step gets a closure that clears, scales and runs backward.

        Who writes it: `programs/styles/apex_amp/closure.py`, Lightning.
        """
        amp = self.start()
        bench, calls = self.bench(amp), []

        def closure() -> object:
            calls.append(1)
            self.subject.zero_grad(bench.opt)
            loss = bench.loss()
            with amp.scale_loss(loss, bench.opt) as scaled:
                self.subject.backward(scaled, bench.parameters)
            return loss

        self.subject.step_closure(bench.opt, closure)
        assert bench.values() == moved(FINITE)
        assert len(calls) == 1

    # -- clearing --------------------------------------------------------------------------------------

    @on_parameters
    def test_nothing_cleared_after_an_applied_step(self) -> None:
        """Nobody clears the gradients of a step that was applied.

        Who writes it: `programs/styles/apex_amp/nan_guard_without_zero.py`, by apex's own rule.
        """
        bench = self.bench(self.start(ampx.LossScale(growth_interval=1)))
        for slopes in (FINITE, OTHER):  # the scale grows in between
            bench.accumulate(slopes)
            assert bench.step(forget=False).applied
        assert bench.values() == moved(FINITE, OTHER, start=moved(FINITE))
        assert bench.scale == 2.0**18

    @on_parameters
    def test_nothing_cleared_after_a_skipped_step(self) -> None:
        """Nobody clears the gradients of a step that was skipped."""
        bench = self.bench(self.start())
        bench.accumulate(OVERFLOW)
        assert not bench.step(forget=False).applied
        before, saved = bench.snapshot(), bench.saved()
        for _ in range(2):
            with refused(ampx.ProtocolError, passed="skipped step", accepted="accepted: cleared", advice="Call"):
                bench.accumulate(FINITE)
        assert (bench.snapshot(), bench.saved()) == (before, saved)
        self.trains(bench)

    @with_optimizer_objects
    def test_pending_gradients_cleared(self) -> None:
        """Pending gradients are cleared before the step.

        Who writes it: `programs/styles/apex_amp/nan_guard.py`.
        """
        bench = self.bench(self.start())
        saved = bench.saved()
        for unscales in (False, True):
            bench.accumulate(OVERFLOW)
            if unscales:
                self.unscale(bench)
            bench.pending = None
            self.subject.zero_grad(bench.opt)
            assert bench.saved() == saved
        self.trains(bench)

    @on_parameters
    def test_gradients_cleared_behind_the_wrapper(self) -> None:
        """Gradients are cleared by the model or the raw optimizer, and not by the wrapped one.

        Who writes it: `programs/apex/gan.py`, `programs/mxnet/word_language_model.py`,
        `programs/styles/apex_amp/sam_like.py`.
        """
        bench = self.bench(self.start())

        def step(slopes: Chosen) -> None:
            bench.accumulate(slopes)
            bench.step(forget=False)

        def unscale(slopes: Chosen) -> None:
            bench.accumulate(slopes)
            ampx.unscale(bench.opt)

        before = bench.values()
        for call, slopes in ((bench.accumulate, FINITE), (unscale, FINITE), (step, OVERFLOW), (step, FINITE)):
            call(slopes)
            self.subject.zero_grad(bench.raw)
        assert bench.values() == moved(FINITE, start=before)
        bench.accumulate(OTHER)
        assert bench.step().applied
        assert bench.values() == moved(FINITE, OTHER, start=before)

    @on_parameters
    def test_gradients_cleared_in_a_body(self) -> None:
        """Gradients are cleared inside a body, before its backward.

        Who writes it: none needed: `zero_grad` starts over from everywhere.
        """
        amp = self.start()
        bench = self.bench(amp)
        bench.accumulate(OTHER)
        with amp.scale_loss(bench.loss(FINITE), bench.opt) as scaled:
            self.subject.zero_grad(bench.opt)
            self.subject.backward(scaled, bench.parameters)
        assert bench.step().applied
        assert bench.values() == moved(FINITE)

    # -- unscaled gradients ----------------------------------------------------------------------------

    @on_parameters
    def test_unscale_twice(self) -> None:
        """Unscale or clip_grad_norm is called a second time.

        Who writes it: Accelerate, whose `clip_grad_norm_` unscales all optimizers each time.
        """
        amp = self.start()
        bench = self.bench(amp)
        bench.accumulate()
        for opts in (bench.opt, [bench.opt]):
            amp.unscale(opts)
            assert self.subject.gradients(bench.parameters) == [list(slopes) for slopes in FINITE]
        if self.declares("clip_grad_norm"):
            for _ in range(2):
                assert float(amp.clip_grad_norm(bench.opt, 100.0)) == pytest.approx(math.sqrt(2.5625), rel=1e-6)
        assert bench.step().applied
        assert bench.values() == moved(FINITE)

    @on_parameters
    def test_unscale_without_a_body(self) -> None:
        """Unscale or clip_grad_norm comes where no body was, or after the step."""
        amp = self.start()
        bench = self.bench(amp)
        calls: list[Callable[[], Any]] = [lambda: amp.unscale(bench.opt)]
        if self.declares("clip_grad_norm"):
            calls.append(lambda: amp.clip_grad_norm(bench.opt, 1.0))
        self.backward(bench)
        for call in calls:
            with refused(ampx.NotScaledError, passed="did not go through scale_loss", accepted="", advice="Call"):
                call()
        assert self.subject.gradients(bench.parameters) == [list(slopes) for slopes in FINITE]
        self.subject.zero_grad(bench.opt)
        bench.accumulate()
        bench.step(forget=False)
        for call in calls:
            with refused(ampx.NotScaledError, passed="did not go through scale_loss", accepted="", advice="Call"):
                call()
        assert bench.values() == moved(FINITE)

    @on_parameters
    def test_a_body_after_unscale(self) -> None:
        """A body starts after unscale or clip_grad_norm."""
        amp = self.start()
        bench = self.bench(amp)
        bench.accumulate()
        amp.unscale(bench.opt)
        with refused(ampx.ProtocolError, passed="after unscale", accepted="would be added", advice="Call"):
            bench.accumulate()
        assert bench.step().applied
        assert bench.values() == moved(FINITE)

    @on_parameters
    def test_writes_after_unscale(self) -> None:
        """Gradients are written after unscale.

        Who writes it: `programs/plain/torch_accumulation_clipping.py`, Horovod's sums.
        """
        amp = self.start()
        calls: list[Callable[[Any], Any]] = [amp.unscale]
        if self.declares("clip_grad_norm"):
            calls.append(lambda opt: amp.clip_grad_norm(opt, 100.0))
        bounds: list[dict[str, Any]] = [{}, {"max_grad_norm": 50.0}] if self.declares("clipping") else [{}]
        for call, bound in itertools.product(calls, bounds):
            bench = self.bench(amp, **bound)
            for written in (OTHER, OVERFLOW, NAN):
                bench.accumulate(FINITE)
                call(bench.opt)
                self.subject.write_gradients(bench.raw, bench.parameters, written)
                assert bench.step().applied is (written is OTHER)
            assert bench.values() == moved(OTHER)
            assert bench.scale == 2.0**14

    @on_parameters
    def test_writes_while_scaled(self) -> None:
        """Gradients are written while they are scaled.

        Who writes it: sums over processes by hand, as in `tests/mxnet/test_distributed.py`.
        """
        bench = self.bench(self.start(ampx.LossScale(init_scale=4.0)))
        bench.accumulate(FINITE)
        self.subject.write_gradients(bench.raw, bench.parameters, [[4.0 * slope for slope in row] for row in OTHER])
        assert bench.step().applied
        assert bench.values() == moved(OTHER)

    # -- other losses, other optimizers ----------------------------------------------------------------

    @on_parameters
    def test_a_loss_that_no_body_scaled_before_a_body(self) -> None:
        """A loss that went through no body runs backward before a body.

        Who writes it: `programs/styles/apex_amp/plain_backward_first.py`.
        """
        bench = self.bench(self.start())
        self.backward(bench, OTHER)
        self.adds_to_what_is_left(bench)

    @on_parameters
    def test_a_loss_that_no_body_scaled_after_a_body(self) -> None:
        """A loss that went through no body runs backward while scaled gradients are pending."""
        if not self.subject.watches_true:
            pytest.skip(f"the harness of {self.backend.name!r} does not say that a backward outside of bodies is seen")
        bench = self.bench(self.start())
        bench.accumulate(FINITE)
        self.backward(bench, OTHER)
        before, saved = bench.snapshot(), bench.saved()
        with refused(ampx.ProtocolError, passed="a backward outside", accepted="accepted: cleared", advice="Call"):
            bench.step(forget=False)
        assert (bench.snapshot(), bench.saved()) == (before, saved)
        self.trains(bench)

    @with_optimizer_objects
    def test_one_loss_of_several_optimizers(self) -> None:
        """One body is for several optimizers.

        Who writes it: `programs/plain/torch_several_optimizers.py`.
        """
        amp = self.start()
        a, b = self.bench(amp), self.bench(amp, loss_scale=ampx.LossScale(init_scale=4.0))
        multi_backward([a, b], (FINITE, OTHER))
        for bench, slopes in ((a, FINITE), (b, OTHER)):
            result = bench.step()
            assert (result.applied, result.scale) == (True, 4.0)
            assert bench.values() == moved(slopes)

    @with_optimizer_objects
    def test_one_loss_of_optimizers_with_pending_gradients_of_two_scales(self) -> None:
        """One body is for optimizers whose pending gradients carry different scales."""
        amp = self.start()
        benches = [self.bench(amp, loss_scale=ampx.LossScale(init_scale=scale)) for scale in (8.0, 2.0)]
        for bench in benches:
            bench.accumulate()
        with refused(ampx.ProtocolError, passed="carry different loss scales", accepted="share", advice="Step them"):
            multi_backward(benches, (OTHER, OTHER))
        for bench in benches:
            assert bench.step().applied
            assert bench.values() == moved(FINITE)

    @on_parameters
    def test_a_loss_of_another_left_gradients(self) -> None:
        """A body of another optimizer left gradients on this one's parameters.

        Who writes it: `programs/apex/gan.py`, `programs/torch_amp/gan.py`.
        """
        if not self.subject.watches_others:
            pytest.skip(f"the harness of {self.backend.name!r} does not say that other optimizers' bodies are watched")
        amp = self.start()
        a, b = self.bench(amp), self.bench(amp, loss_scale=ampx.LossScale(init_scale=4.0))
        both = [*a.parameters, *b.parameters]
        with amp.scale_loss(self.subject.loss(both, [*FINITE, *OTHER]), b.opt) as scaled:
            self.subject.backward(scaled, both)
        assert b.step().applied
        a.accumulate(OTHER)
        assert a.step().applied
        assert (a.values(), b.values()) == (moved(FINITE, OTHER), moved(OTHER))

    @on_parameters
    def test_a_loss_of_another_added_to_pending_gradients(self) -> None:
        """A body of another optimizer adds to pending gradients of this one."""
        if not self.subject.watches_others:
            pytest.skip(f"the harness of {self.backend.name!r} does not say that other optimizers' bodies are watched")
        amp = self.start()
        a, b = self.bench(amp), self.bench(amp, loss_scale=ampx.LossScale(init_scale=4.0))
        both = [*a.parameters, *b.parameters]
        a.accumulate(FINITE)
        with amp.scale_loss(self.subject.loss(both, [*OTHER, *OTHER]), b.opt) as scaled:
            self.subject.backward(scaled, both)
        before, saved = a.snapshot(), a.saved()
        for call in (lambda: a.step(forget=False), lambda: amp.unscale(a.opt), a.accumulate):
            with refused(ampx.ProtocolError, passed="scale", accepted="accepted: ", advice="all"):
                call()
        assert (a.snapshot(), a.saved()) == (before, saved)
        assert b.step().applied
        assert b.values() == moved(OTHER)
        self.trains(a)

    @on_parameters
    def test_optimizers_that_share_a_parameter_one_after_the_other(self) -> None:
        """Two optimizers hold one parameter, and each is cleared before the other's body.

        Who writes it: `infogan.py` of PyTorch-GAN.
        """
        a, b = self.sharing(self.start())
        assert a.train(FINITE).applied
        assert b.train(OTHER).applied
        shared, own = moved(FINITE)
        assert a.values() == [moved(OTHER, start=[shared, START[1]])[0], own]
        assert b.values()[1] == moved(OTHER)[1]

    @on_parameters
    def test_optimizers_that_share_a_parameter_at_once(self) -> None:
        """Two optimizers hold one parameter, and both wait for their steps.

        Who writes it: `curl_sac.py` of CURL, whose encoder has two optimizers.
        """
        if not self.subject.shares_parameters:
            self.refuses_to_share()
            return
        amp = self.start()
        a, b = self.sharing(amp)
        three = [*a.parameters, b.parameters[1]]
        with amp.scale_loss(self.subject.loss(three, [*FINITE, OTHER[1]]), [a.opt, b.opt]) as scaled:
            self.subject.backward(scaled, three)
        assert a.step(forget=False).applied
        assert b.step(forget=False).applied
        # Both apply the shared gradient, as without ampx.
        assert a.values() == moved(FINITE, (FINITE[0], (0.0,)))
        assert b.values()[1] == moved(OTHER)[1]

    @on_parameters
    def test_a_body_of_one_that_shares_a_parameter_before_the_step_of_the_other(self) -> None:
        """Two optimizers hold one parameter, and one that has stepped gets a body before the other's step."""
        if not self.subject.shares_parameters:  # the order does not come about
            self.refuses_to_share()
            return
        amp = self.start()
        a, b = self.sharing(amp)
        three, own = [*a.parameters, b.parameters[1]], a.parameters[1:]
        with amp.scale_loss(self.subject.loss(three, [*FINITE, OTHER[1]]), [a.opt, b.opt]) as scaled:
            self.subject.backward(scaled, three)
        assert a.step(forget=False).applied
        with amp.scale_loss(self.subject.loss(own, FINITE[1:]), a.opt) as scaled:
            self.subject.backward(scaled, own)
        before, saved = b.snapshot(), b.saved()
        with refused(ampx.ProtocolError, passed="scale", accepted="accepted: cleared", advice="Call opt.zero_grad"):
            b.step(forget=False)
        assert (b.snapshot(), b.saved()) == (before, saved)
        self.subject.zero_grad(a.opt)
        self.trains(b)

    def refuses_to_share(self) -> None:
        """Check that the gradients of one of two that share are not unscaled, before anything changes."""
        amp = self.start()
        benches = self.sharing(amp)
        a, b = benches
        three = [*a.parameters, b.parameters[1]]
        with amp.scale_loss(self.subject.loss(three, [*FINITE, OTHER[1]]), [a.opt, b.opt]) as scaled:
            self.subject.backward(scaled, three)
        before = [(bench.snapshot(), bench.saved()) for bench in benches]
        with refused(ampx.ProtocolError, passed="parameter", accepted="accepted: ", advice="Step"):
            for bench in benches:
                amp.unscale(bench.opt)
        assert [(bench.snapshot(), bench.saved()) for bench in benches] == before
        for bench in benches:
            self.subject.zero_grad(bench.opt)
        self.trains(a)

    # -- exceptions ------------------------------------------------------------------------------------

    @with_optimizer_objects
    def test_an_exception_before_backward(self) -> None:
        """An exception leaves a body before its backward.

        Who writes it: `find_executable_batch_size` of Accelerate.
        """
        amp = self.start()
        bench, casting = self.bench(amp), self.subject.casting()

        def fail() -> None:
            with pytest.raises(KeyError, match="body"), amp.scale_loss(bench.loss(), bench.opt):
                raise KeyError("body")
            assert self.subject.casting() == casting

        fail()  # nothing is pending
        self.backward(bench)
        with pytest.raises(ampx.NotScaledError):
            bench.step()
        bench.pending = None
        self.subject.zero_grad(bench.opt)
        bench.accumulate(FINITE)
        fail()  # the first body's gradients are, at their scale
        assert bench.step().applied
        assert bench.values() == moved(FINITE)
        assert not bench.train(OVERFLOW).applied

    @on_parameters
    def test_an_exception_after_backward(self) -> None:
        """An exception leaves a body after its backward, and the gradients are not cleared.

        Who writes it: none needed: a body that finds gradients.
        """
        amp = self.start()
        bench = self.bench(amp)

        def fail() -> None:
            with amp.scale_loss(bench.loss(OTHER), bench.opt) as scaled:
                self.subject.backward(scaled, bench.parameters)
                raise KeyError("body")

        with pytest.raises(KeyError, match="body"):
            fail()
        with refused(
            ampx.NotScaledError, passed="did not go through scale_loss", accepted="", advice="with ampx.scale_loss"
        ):
            bench.step(forget=False)
        self.adds_to_what_is_left(bench)

    @on_parameters
    def test_an_exception_in_the_update(self) -> None:
        """An exception leaves the update of a step."""
        amp = self.start()
        bench = self.bench(amp)

        def fail() -> None:
            if fails:
                raise KeyError("update")

        fails = True
        self.subject.watch_update(bench.raw, fail)
        bench.accumulate()
        with pytest.raises(KeyError, match="update"):
            bench.step(forget=False)
        fails = False
        before = bench.snapshot()
        calls: list[Callable[[], Any]] = [lambda: bench.step(forget=False), bench.accumulate]
        calls.append(lambda: amp.unscale(bench.opt))
        for call in calls:
            with refused(ampx.ProtocolError, passed="interrupted", accepted="accepted: zero_grad", advice="Call"):
                call()
        assert bench.snapshot() == before
        self.trains(bench)

    # -- sessions and copies ---------------------------------------------------------------------------

    @with_optimizer_objects
    def test_a_session_that_ends_in_a_body(self) -> None:
        """The session ends inside a body.

        Who writes it: notebooks, where a cell runs again.
        """
        amp = self.start()
        bench = self.bench(amp)
        with amp.scale_loss(bench.loss(), bench.opt) as scaled:
            amp.shutdown()
            bench.receive(self.subject.backward(scaled, bench.parameters))
        assert self.subject.casting() == self.outside
        assert bench.step().applied
        assert bench.values() == moved(FINITE)

    @with_optimizer_objects
    def test_a_session_that_ends_before_the_step(self) -> None:
        """The session ends, or another replaces it, between body and step.

        Who writes it: notebooks, where a cell runs again.
        """
        amp = self.start()
        bench = self.bench(amp)
        for end in (lambda: self.start(ampx.LossScale(init_scale=2.0)), amp.shutdown):
            bench.accumulate()
            end()
            result = bench.step()
            assert (result.applied, result.scale) == (True, 2.0**16)
        assert bench.values() == moved(FINITE, FINITE)

    @with_optimizer_objects
    def test_a_disabled_session_while_gradients_are_pending(self) -> None:
        """A body of a disabled session comes while scaled gradients are pending."""
        bench = self.bench(self.start())
        bench.accumulate()
        with refused(ampx.ProtocolError, passed="enabled=False", accepted="accepted: ", advice="Call"):
            self.start(enabled=False).scale_loss(bench.loss(OTHER), bench.opt).__enter__()
        assert bench.step().applied
        assert bench.values() == moved(FINITE)

    @with_optimizer_objects
    def test_a_copy_while_gradients_are_pending(self) -> None:
        """An optimizer is copied while scaled gradients are pending.

        Who writes it: none needed.
        """
        if "deepcopy" not in self.subject.copies:
            pytest.skip(f"the harness of {self.backend.name!r} does not say that optimizers can be copied")
        amp = self.start()
        bench = self.bench(amp)
        bench.accumulate(OTHER)
        opt, parameters = copy.deepcopy((bench.opt, bench.parameters))
        self.subject.zero_grad(opt)  # gradients may have come along, of which nothing is known
        with amp.scale_loss(self.subject.loss(parameters, FINITE), opt) as scaled:
            grads = self.subject.backward(scaled, parameters)
        self.subject.step(opt, grads)
        assert [self.subject.numbers(parameter) for parameter in parameters] == moved(FINITE)
        assert bench.step().applied
        assert bench.values() == moved(OTHER)
