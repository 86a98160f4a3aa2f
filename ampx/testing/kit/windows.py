"""Skipped steps, accumulation, groups and losses with scales of their own."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import pytest

import ampx
from ampx.testing.base import KitTests, requires
from ampx.testing.bench import FINITE, NAN, OTHER, OVERFLOW, TOO_LARGE, Bench, multi_backward
from ampx.testing.checks import refused
from ampx.testing.kit.orders import moved, on_parameters


def column(bench: Bench, name: str) -> dict[int, Any]:
    """Return one of the saved numbers of every loss."""
    return {row["loss_id"]: row[name] for row in bench.saved()["losses"]}


def set_scales(bench: Bench, scales: Mapping[int, float]) -> None:
    """Set the scales of losses, by loading a state."""
    state = bench.state_dict()
    losses = state["groups"][0]["losses"]
    every = {0: losses[0]["scale"], **scales}
    losses[:] = [{**losses[0], "loss_id": loss_id, "scale": scale} for loss_id, scale in every.items()]
    bench.load(state)


class SkipTests(KitTests):
    """A step that is not finite leaves no trace."""

    def test_skipped_steps_leave_everything_bit_identical(self) -> None:
        """Parameters and optimizer state are untouched by inf, NaN and overflow in the multiplication."""
        bench = self.bench(self.start(), momentum=True)
        bench.train()
        before = bench.snapshot()
        for slopes in (OVERFLOW, NAN, TOO_LARGE):
            result = bench.train(slopes)
            assert (result.applied, result.finite) == (False, False)
            assert bench.snapshot() == before

    def test_training_goes_on_after_a_skip(self) -> None:
        """The next steps are those of plain training on the finite gradients."""
        bench, plain = self.bench(self.start(), momentum=True), self.plain(momentum=True)
        for slopes in (FINITE, OVERFLOW, OTHER, NAN, FINITE):
            bench.train(slopes)
            if slopes not in (OVERFLOW, NAN):
                plain.train_plainly(slopes)
        assert bench.snapshot() == plain.snapshot()


class AccumulationTests(KitTests):
    """Several backwards, one step."""

    def test_accumulated_gradients_equal_plain_accumulation(self) -> None:
        """Micro batches add up to what they add up to in float32."""
        bench, plain = self.bench(self.start(ampx.LossScale(growth_interval=1))), self.plain()
        for _ in range(2):
            for slopes in (FINITE, OTHER, FINITE):
                bench.accumulate(slopes)
            assert bench.step().applied
            plain.train_plainly(FINITE, OTHER, FINITE)
        assert bench.values() == plain.values()
        assert bench.scale == 2.0**18

    def test_an_overflow_in_one_micro_batch_drops_the_window(self) -> None:
        """Wherever it is in the window, the whole window is skipped and counts once."""
        bench = self.bench(self.start())
        before = bench.snapshot()
        for position in range(3):
            for micro_batch in range(3):
                bench.accumulate(OVERFLOW if micro_batch == position else FINITE)
            result = bench.step()
            assert (result.applied, result.consecutive_skips) == (False, position + 1)
            assert result.next_scale == 2.0 ** (15 - position)
            assert bench.snapshot() == before


class GroupTests(KitTests):
    """Optimizers that share one scale, and optimizers that do not."""

    @requires("optimizer objects")
    def test_a_list_shares_one_scale_that_moves_once(self) -> None:
        """Overflow in both members is one overflow; the scale moves after the last member's step."""
        amp = self.start(ampx.LossScale(growth_interval=2))
        a, b = self.group(amp)
        assert len(amp.state_dict()["groups"]) == 1
        for slopes, scale in ((OVERFLOW, 2.0**15), (FINITE, 2.0**15), (FINITE, 2.0**16)):
            before = a.scale
            multi_backward([a, b], (slopes, slopes))
            a.step()
            assert (a.scale, b.scale) == (before, before)
            b.step()
            assert (a.scale, b.scale) == (scale, scale)

    @requires("optimizer objects")
    def test_each_member_of_a_list_skips_for_itself(self) -> None:
        """The finite member is applied, the other is not and says so at once; the shared scale backs off."""
        amp = self.start()
        a, b = self.group(amp)
        plain, before = self.plain(), b.snapshot()
        multi_backward([a, b], (FINITE, OVERFLOW))
        b.step()
        at_once = self.subject.last_step(b.opt)
        assert (at_once.applied, at_once.finite, at_once.consecutive_skips) == (False, False, 1)
        assert at_once.scale == at_once.next_scale == 2.0**16
        a.step()
        assert [self.subject.last_step(bench.opt).applied for bench in (a, b)] == [True, False]
        plain.train_plainly(FINITE)
        assert a.values() == plain.values()
        assert b.snapshot() == before
        assert a.scale == b.scale == 2.0**15

    @requires("optimizer objects")
    def test_members_of_a_list_may_take_turns(self) -> None:
        """A member that has no part in a window does not hold the scale back."""
        a, b = self.group(self.start(ampx.LossScale(growth_interval=1)))
        assert a.train().next_scale == 2.0**17
        assert b.train().next_scale == 2.0**18
        assert a.train().scale == 2.0**18

    def test_separate_optimizers_own_their_scales(self) -> None:
        """An overflow of one leaves the other's scale alone."""
        amp = self.start(ampx.LossScale(growth_interval=1))
        a, b = self.bench(amp), self.bench(amp)
        a.accumulate(OVERFLOW)
        b.accumulate(FINITE)
        assert not a.step().applied
        assert b.step().applied
        assert (a.scale, b.scale) == (2.0**15, 2.0**17)
        if self.declares("optimizer objects"):
            assert len(amp.state_dict()["groups"]) == 2


class PerLossTests(KitTests):
    """`scale_loss(…, loss_id=…)`."""

    @requires("per_loss_scales")
    def test_every_loss_id_has_its_own_scale(self) -> None:
        """The loss that overflows backs off, the other grows, and the step is skipped for both."""
        bench = self.bench(self.start(ampx.LossScale(growth_interval=1)))
        before = bench.snapshot()
        for bad, grown, fallen in ((1, 2.0**17, 2.0**15), (0, 2.0**16, 2.0**16)):
            for loss_id in (0, 1):
                bench.accumulate(OVERFLOW if loss_id == bad else FINITE, loss_id)
            assert not bench.step().applied
            assert bench.snapshot() == before
            assert column(bench, "scale") == {1 - bad: grown, bad: fallen}
            assert column(bench, "consecutive_skips") == {1 - bad: 0, bad: 1}
        for loss_id in (0, 1):
            bench.accumulate(FINITE, loss_id)
        assert bench.step().applied
        assert bench.values() == moved(FINITE, FINITE)

    @requires("per_loss_scales")
    def test_losses_of_different_scales_add_true_gradients(self) -> None:
        """In any order they add up to what they add up to in float32, and the result has the smallest scale."""
        for order in ((0, 1), (1, 0), (5, 0, 5), (0, 0, 1, 1, 0), (2,)):
            bench = self.bench(self.start())
            set_scales(bench, {loss_id: 2.0 ** (4 + loss_id) for loss_id in order})
            parts = [[[slope * 2.0**place for slope in slopes] for slopes in FINITE] for place in range(len(order))]
            for loss_id, slopes in zip(order, parts, strict=True):
                bench.accumulate(slopes, loss_id)
            result = bench.step()
            assert (result.applied, result.scale) == (True, 2.0 ** (4 + min(order)))
            assert bench.values() == moved(*parts)

    @requires("per_loss_scales")
    def test_an_overflow_early_in_a_window_of_several_losses_is_remembered(self) -> None:
        """Of one loss, whatever comes after it; only its scale backs off."""
        bench = self.bench(self.start())
        before = bench.snapshot()
        for loss_id, slopes in ((0, OVERFLOW), (1, FINITE), (0, FINITE), (1, FINITE)):
            bench.accumulate(slopes, loss_id)
        assert not bench.step().applied
        assert bench.snapshot() == before
        assert column(bench, "scale") == {0: 2.0**15, 1: 2.0**16}
        assert column(bench, "consecutive_skips") == {0: 1, 1: 0}

    @requires("per_loss_scales")
    def test_a_sum_of_losses_that_overflows_is_skipped(self) -> None:
        """Each is finite, and their sum beyond float32. Nobody can tell which scale is to blame: one backs off."""
        huge = [[3e38 for _ in slopes] for slopes in FINITE]
        bounds: list[dict[str, Any]] = [{}, {"max_grad_norm": 100.0}]
        for options in bounds if self.declares("clipping") else bounds[:1]:
            bench = self.bench(self.start(ampx.LossScale(init_scale=1.0, min_scale=0.25)), **options)
            before = bench.snapshot()
            for loss_id in (0, 1):
                bench.accumulate(huge, loss_id)
            result = bench.step()
            assert (result.applied, result.finite) == (False, False)
            assert bench.snapshot() == before
            assert 0.5 in column(bench, "scale").values()
            for loss_id in (0, 1):
                bench.accumulate(FINITE, loss_id)
            assert bench.step().applied
            assert bench.values() == moved(FINITE, FINITE)

    @requires("per_loss_scales")
    def test_a_loss_whose_body_raised_is_not_counted(self) -> None:
        """The id of a failed body takes no part in the step."""
        amp = self.start(ampx.LossScale(growth_interval=1))
        bench, plain = self.bench(amp), self.plain()
        bench.accumulate(FINITE)
        with pytest.raises(KeyError), amp.scale_loss(bench.loss(), bench.opt, loss_id=1):
            raise KeyError("body")
        rows = copy.deepcopy(bench.saved()["losses"][1:])
        assert bench.step().applied
        assert bench.saved()["losses"][1:] == rows
        plain.train_plainly(FINITE)
        assert bench.values() == plain.values()

    @requires("per_loss_scales")
    def test_a_body_that_raises_keeps_the_gradients_of_other_losses(self) -> None:
        """Those of its own backward are gone, as often as it raises."""
        amp = self.start()
        bench = self.bench(amp)
        set_scales(bench, {1: 8.0})
        bench.accumulate(FINITE)

        def fail() -> None:
            with amp.scale_loss(bench.loss(OVERFLOW), bench.opt, loss_id=1) as scaled:
                self.subject.backward(scaled, bench.parameters)
                raise KeyError("body")

        for _ in range(2):
            with pytest.raises(KeyError, match="body"):
                fail()
        bench.accumulate(OTHER, loss_id=1)
        assert bench.step().applied
        assert bench.values() == moved(FINITE, OTHER)

    @requires("per_loss_scales")
    @on_parameters
    def test_a_loss_that_gave_no_gradient_does_not_count(self) -> None:
        """What is known of its scale stays; one that never counted has no row."""
        amp = self.start()
        bench, elsewhere = self.bench(amp), self.plain()
        for loss_id, slopes in ((0, FINITE), (2, OVERFLOW)):
            bench.accumulate(slopes, loss_id)
        assert not bench.step().applied
        bench.accumulate(FINITE)
        for loss_id in (1, 2):
            with amp.scale_loss(elsewhere.loss(), bench.opt, loss_id=loss_id) as scaled:
                self.subject.backward(scaled, elsewhere.parameters)
        bench.accumulate(FINITE)
        assert bench.step().applied
        assert bench.values() == moved(FINITE, FINITE)
        assert column(bench, "growth_tracker") == {0: 2, 2: 0}
        assert column(bench, "scale") == {0: 2.0**16, 2: 2.0**15}

    @requires("per_loss_scales")
    @on_parameters
    def test_clearing_between_losses_drops_the_gradients_of_earlier_ones(self) -> None:
        """By the raw optimizer before a body, and by the wrapped one in it; the earlier loss does not count."""
        for inside in (False, True):
            amp = self.start()
            bench = self.bench(amp)
            bench.accumulate(OVERFLOW)
            if not inside:
                self.subject.zero_grad(bench.raw)
            with amp.scale_loss(bench.loss(), bench.opt, loss_id=1) as scaled:
                if inside:
                    self.subject.zero_grad(bench.opt)
                self.subject.backward(scaled, bench.parameters)
            assert bench.step().applied
            assert bench.values() == moved(FINITE)
            assert column(bench, "growth_tracker") == {0: 0, 1: 1}
            assert bench.row()["scale"] == 2.0**16

    @requires("per_loss_scales")
    @on_parameters
    def test_clipping_sees_the_sum_of_all_losses(self) -> None:
        """The norm is that of all unscaled gradients together."""
        if not self.declares("clip_grad_norm"):
            pytest.skip(f"backend {self.backend.name!r} does not clip")
        amp = self.start()
        bench = self.bench(amp)
        set_scales(bench, {1: 4.0})
        bench.accumulate(FINITE)
        bench.accumulate(OTHER, loss_id=1)
        sums = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(FINITE, OTHER, strict=True)]
        norm = math.hypot(*(slope for slopes in sums for slope in slopes))
        assert float(amp.clip_grad_norm(bench.opt, 1.0)) == pytest.approx(norm, rel=1e-6)
        assert bench.step().applied
        expected = moved([[slope / norm for slope in slopes] for slopes in sums])
        assert bench.values() == [pytest.approx(values, rel=1e-6, abs=1e-6) for values in expected]

    @requires("per_loss_scales")
    @on_parameters
    def test_the_window_after_one_of_several_losses_starts_afresh(self) -> None:
        """Its gradients are those of one loss, which are unscaled once."""
        bench = self.bench(self.start())
        for loss_id in (0, 1):
            bench.accumulate(FINITE, loss_id)
        assert bench.step(forget=False).applied
        self.subject.zero_grad(bench.raw)  # not the wrapped one's, which forgets the window, too
        bench.accumulate(OTHER)
        bench.amp.unscale(bench.opt)
        with refused(ampx.ProtocolError, passed="after unscale", accepted="would be added", advice="Call"):
            bench.accumulate(OTHER)
        assert bench.step().applied
        assert bench.values() == moved(FINITE, FINITE, OTHER)

    def test_a_loss_id_is_a_number_from_0(self) -> None:
        """Anything else is refused before anything happens."""
        bench = self.bench(self.start())
        wrong: Any
        for wrong in (-1, "a", 1.0, True, None):
            with refused(ampx.InvalidOptionError, passed=f"loss_id={wrong!r}", accepted="from 0", advice="Change"):
                bench.accumulate(loss_id=wrong)
        assert bench.train().applied
