"""A step in mixed precision is the float32 step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ampx
from ampx.policy import Dtype
from ampx.testing.base import KitTests, requires
from ampx.testing.bench import FINITE, OVERFLOW, START, multi_backward

OTHER = ((-1.5, 0.125), (2.0,))
NORM = math.sqrt(0.25**2 + 0.5**2 + 1.5**2)


def near(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Compare to the accuracy of float32: frameworks compute norms in different orders."""
    flat = [(x, y) for vector, other in zip(a, b, strict=True) for x, y in zip(vector, other, strict=True)]
    return all(math.isclose(x, y, rel_tol=1e-5, abs_tol=1e-6) for x, y in flat)


class NumericsTests(KitTests):
    """Steps, gradients and losses."""

    def test_the_harness_gives_chosen_gradients(self) -> None:
        """The gradient oracle works, or no other test means anything."""
        plain = self.plain()
        for slopes in (FINITE, OVERFLOW):
            grads = plain.gradients(slopes)
            if grads is None:
                assert self.subject.gradients(plain.parameters) == [list(values) for values in slopes]
                self.subject.zero_grad(plain.raw)
            else:
                assert [self.subject.numbers(grad) for grad in grads] == [list(values) for values in slopes]
        assert all(math.isfinite(value) for value in self.subject.numbers(plain.loss(OVERFLOW)))

    def test_the_harness_trains_in_float32(self) -> None:
        """A plain step of gradient descent at learning rate 0.5 moves the parameters as arithmetic says."""
        plain = self.plain()
        plain.train_plainly(FINITE)
        assert plain.values() == [
            [value - 0.5 * slope for value, slope in zip(values, slopes, strict=True)]
            for values, slopes in zip(START, FINITE, strict=True)
        ]

    def test_steps_equal_float32_steps_bit_for_bit(self) -> None:
        """At scales that are powers of two, parameters and optimizer state are those of plain training."""
        for exponent in (0, 7, 16, 24):
            amp = self.start(ampx.LossScale(init_scale=2.0**exponent))
            bench, plain = self.bench(amp, momentum=True), self.plain(momentum=True)
            for slopes in (FINITE, OTHER, FINITE):
                assert bench.train(slopes).applied, "no gradient came through `scale`, or `unscale` finds inf or NaN"
                plain.train_plainly(slopes)
                assert bench.snapshot() == plain.snapshot(), "gradients on parameters are unscaled in place, and once"

    def test_scaled_loss_is_the_float32_loss_times_the_scale(self) -> None:
        """A float32 loss is multiplied by exactly the current scale."""
        amp = self.start(ampx.LossScale(init_scale=2.0**11))
        bench = self.bench(amp)
        loss = bench.loss()
        expected = [value * 2.0**11 for value in self.subject.numbers(loss)]
        with amp.scale_loss(loss, bench.opt) as scaled:
            assert self.subject.numbers(scaled) == expected
            assert self.subject.dtype_of(scaled) == "float32"

    @requires("casting")
    def test_low_precision_losses_are_cast_before_scaling(self) -> None:
        """A loss in the compute dtype is not multiplied there, where it would become inf."""
        amp = self.start(ampx.LossScale(init_scale=2.0**24))
        bench = self.bench(amp)
        dtype: Dtype = "float16" if "float16" in self.backend.capabilities.dtypes else "bfloat16"
        loss = self.subject.recorded(lambda: self.backend.cast(bench.loss(), dtype))
        value = self.subject.numbers(loss)[0]
        assert abs(value) * 2.0**24 > 65504, "the harness's loss is too small for this test"
        with amp.scale_loss(loss, bench.opt) as scaled:
            assert self.subject.dtype_of(scaled) == "float32"
            assert self.subject.numbers(scaled) == [value * 2.0**24]

    def test_a_tree_of_losses_keeps_its_shape(self) -> None:
        """Lists, tuples and dicts of losses come back scaled, leaf by leaf."""
        amp = self.start(ampx.LossScale(init_scale=4.0))
        bench = self.bench(amp)
        tree = {"a": bench.loss(), "b": [bench.loss(), (bench.loss(),)]}
        value = self.subject.numbers(tree["a"])[0]
        with amp.scale_loss(tree, bench.opt) as scaled:
            assert isinstance(scaled, dict)
            assert isinstance(scaled["b"][1], tuple)
            leaves = [scaled["a"], scaled["b"][0], scaled["b"][1][0]]
            assert [self.subject.numbers(leaf) for leaf in leaves] == [[4.0 * value]] * 3

    @requires("optimizer objects")
    def test_several_optimizers_take_one_loss(self) -> None:
        """Optimizers wrapped one by one, with different scales, get one backward and each divides rightly."""
        amp = self.start()
        a = self.bench(amp, loss_scale=ampx.LossScale(init_scale=2.0**10))
        b = self.bench(amp, loss_scale=ampx.LossScale(init_scale=2.0**4))
        plain_a, plain_b = self.plain(), self.plain()
        for slopes in ((FINITE, OTHER), (OTHER, FINITE)):
            multi_backward([a, b], slopes)
            results = a.step(), b.step()
            assert [result.scale for result in results] == [2.0**4, 2.0**4]
            plain_a.train_plainly(slopes[0])
            plain_b.train_plainly(slopes[1])
        assert (a.values(), b.values()) == (plain_a.values(), plain_b.values())


class ClippingTests(KitTests):
    """Clipping works on unscaled gradients."""

    @requires("clipping")
    def test_max_grad_norm_clips_true_gradients(self) -> None:
        """The step is that of gradients shortened to the bound; the result tells the norm before."""
        bench, plain = self.bench(self.start(), max_grad_norm=0.5), self.plain()
        result = bench.train()
        plain.train_plainly([[value * 0.5 / NORM for value in slopes] for slopes in FINITE])
        assert near(bench.values(), plain.values())
        assert math.isclose(result.grad_norm, NORM, rel_tol=1e-5)

    @requires("clipping")
    def test_gradients_below_the_norm_stay_bit_for_bit(self) -> None:
        """A bound that is not reached changes nothing, and the norm is reported all the same; a skip has none."""
        bench, plain = self.bench(self.start(), max_grad_norm=100.0), self.plain()
        result = bench.train()
        plain.train_plainly(FINITE)
        assert bench.values() == plain.values()
        assert math.isclose(result.grad_norm, NORM, rel_tol=1e-5)
        assert bench.train(OVERFLOW).grad_norm is None

    @requires("clipping")
    def test_max_grad_value_clips_every_element(self) -> None:
        """Elements beyond the bound are cut to it."""
        bench, plain = self.bench(self.start(), max_grad_value=0.375), self.plain()
        bench.train()
        plain.train_plainly([[max(-0.375, min(0.375, value)) for value in slopes] for slopes in FINITE])
        assert bench.values() == plain.values()

    @requires("clipping")
    def test_a_norm_beyond_float32_clips_rightly(self) -> None:
        """The squares overflow: a norm of inf would leave zeros. Arithmetic in float64 is the oracle."""
        bound = 2.0
        for size in (1e25, 3e38):
            slopes = ((size, -size / 2), (0.0,))
            norm = math.hypot(*slopes[0])
            clipped = [[slope * bound / norm for slope in row] for row in slopes]
            amp, plain = self.start(1.0), self.plain()
            plain.train_plainly(clipped)
            bench = self.bench(amp, max_grad_norm=bound)
            result = bench.train(slopes)
            assert near(bench.values(), plain.values()), "the squares are beyond float32: add them up in float64"
            assert math.isclose(result.grad_norm, norm, rel_tol=1e-6)
            if self.declares("clip_grad_norm"):
                bench = self.bench(amp)
                bench.accumulate(slopes)
                assert math.isclose(float(amp.clip_grad_norm(bench.opt, bound)), norm, rel_tol=1e-6)
                assert near(self.subject.gradients(bench.parameters), clipped)
                assert bench.step().applied
                assert near(bench.values(), plain.values())

    @requires("clipping")
    def test_clipping_skips_on_overflow(self) -> None:
        """Clipping never turns inf into a finite update."""
        bench = self.bench(self.start(), max_grad_norm=0.5, max_grad_value=1.0)
        before = bench.snapshot()
        assert not bench.train(OVERFLOW).applied
        assert bench.snapshot() == before

    def test_without_clipping_no_norm_is_told(self) -> None:
        """`grad_norm` is None where it was not asked for."""
        assert self.bench(self.start()).train().grad_norm is None

    @requires("implicit gradients")
    def test_unscale_makes_true_gradients_once(self) -> None:
        """The gradients on the parameters carry the scale before `unscale`, not after, however often."""
        amp = self.start(ampx.LossScale(init_scale=2.0**9))
        bench, plain = self.bench(amp), self.plain()
        bench.accumulate()
        scaled = [[value * 2.0**9 for value in slopes] for slopes in FINITE]
        assert self.subject.gradients(bench.parameters) == scaled
        for _ in range(3):
            amp.unscale(bench.opt)
            assert self.subject.gradients(bench.parameters) == [list(slopes) for slopes in FINITE]
        assert bench.step().applied
        plain.train_plainly(FINITE)
        assert bench.values() == plain.values()

    @requires("implicit gradients")
    def test_unscale_keeps_the_overflow_in_mind(self) -> None:
        """An overflow seen by `unscale` skips the step and counts once."""
        amp = self.start(ampx.LossScale(init_scale=2.0**9))
        bench = self.bench(amp)
        before = bench.snapshot()
        bench.accumulate(OVERFLOW)
        amp.unscale(bench.opt)
        result = bench.step()
        assert (result.applied, result.next_scale, result.consecutive_skips) == (False, 2.0**8, 1)
        assert bench.snapshot() == before

    @requires("clip_grad_norm")
    def test_clip_grad_norm_unscales_and_tells_the_norm(self) -> None:
        """It returns the norm so far, the step's result the first; the step applies what is left, not divided again."""
        amp = self.start()
        for by_step, bound in ((None, 0.25), (0.125, 0.125)):
            bench, plain = self.bench(amp, max_grad_norm=by_step), self.plain()
            bench.accumulate()
            assert math.isclose(float(amp.clip_grad_norm(bench.opt, 0.5)), NORM, rel_tol=1e-5)
            assert math.isclose(float(amp.clip_grad_norm(bench.opt, 0.25)), 0.5, rel_tol=1e-5)
            result = bench.step()
            assert result.applied
            assert math.isclose(result.grad_norm, NORM, rel_tol=1e-5)
            plain.train_plainly([[value * bound / NORM for value in slopes] for slopes in FINITE])
            assert near(bench.values(), plain.values())
