"""Skipped steps, accumulation, groups and losses with scales of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import ampx
from ampx.testing.base import KitTests, requires
from ampx.testing.bench import FINITE, NAN, OTHER, OVERFLOW, TOO_LARGE, multi_backward
from ampx.testing.checks import refused


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
        bench.accumulate(FINITE, loss_id=0)
        bench.accumulate(OVERFLOW, loss_id=1)
        assert not bench.step().applied
        assert bench.snapshot() == before
        assert [bench.row(loss_id)["scale"] for loss_id in (0, 1)] == [2.0**17, 2.0**15]
        assert [bench.row(loss_id)["consecutive_skips"] for loss_id in (0, 1)] == [0, 1]

    @requires("per_loss_scales")
    def test_losses_of_different_scales_add_true_gradients(self) -> None:
        """Gradients that came with different scales add up to what they add up to in float32."""
        bench, plain = self.bench(self.start(ampx.LossScale(growth_interval=1))), self.plain()
        bench.train(FINITE)
        plain.train_plainly(FINITE)
        for loss_id, slopes in ((0, FINITE), (1, OTHER), (0, OTHER)):
            bench.accumulate(slopes, loss_id)
        assert bench.step().applied
        plain.train_plainly(FINITE, OTHER, OTHER)
        assert bench.values() == plain.values()

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

    def test_a_loss_id_is_a_number_from_0(self) -> None:
        """Anything else is refused before anything happens."""
        bench = self.bench(self.start())
        wrong: Any
        for wrong in (-1, "a", True):
            with refused(ampx.InvalidOptionError, passed=f"loss_id={wrong!r}", accepted="from 0", advice="Change"):
                bench.accumulate(loss_id=wrong)
        assert bench.train().applied
