"""The scale moves as the specification says, whatever the configuration and the pattern."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from typing import Any

from hypothesis import given, strategies as st

import ampx
from ampx.testing.base import KitTests
from ampx.testing.bench import FINITE, TOO_LARGE, chosen
from ampx.testing.oracle import REFERENCE_PATTERN, REFERENCE_TRACE, Oracle


@st.composite
def configurations(draw: st.DrawFn) -> ampx.LossScale:
    """Draw any configuration, powers of two or not, with bounds near and far, within what FINITE gradients bear."""
    init = draw(st.floats(2.0**-10, 2.0**20) | st.integers(-10, 20).map(lambda power: 2.0**power))
    near_or_far = st.sampled_from((1.0, 2.0, 3.5, 2.0**10))
    return ampx.LossScale(
        init_scale=init,
        min_scale=init / draw(near_or_far),
        max_scale=init * draw(near_or_far),
        growth_factor=draw(st.sampled_from((1.0, 2.0, 4.0)) | st.floats(1.0, 16.0)),
        backoff_factor=draw(st.sampled_from((0.5, 1.0, 0.25)) | st.floats(0.05, 1.0)),
        growth_interval=draw(st.integers(1, 4)),
        hysteresis=draw(st.integers(1, 3)),
        dynamic=draw(st.sampled_from((True, True, True, False))),
        max_consecutive_skips=draw(st.integers(1, 4)),
    )


class ScheduleTests(KitTests):
    """The scale's trace."""

    def test_reference_pattern_gives_the_reference_trace(self) -> None:
        """The pattern on which frameworks are compared."""
        bench = self.bench(self.start(ampx.LossScale(growth_interval=3)))
        assert bench.trace(REFERENCE_PATTERN) == list(REFERENCE_TRACE)

    def test_random_patterns_follow_the_specification(self) -> None:
        """Every number of the state, after every step, for random configurations and overflow patterns."""
        amp = self.start()

        @self.hypothesis
        @given(config=configurations(), pattern=st.lists(st.booleans(), min_size=4, max_size=20))
        def check(config: ampx.LossScale, pattern: list[bool]) -> None:
            oracle, bench = Oracle(asdict(config)), self.bench(amp, loss_scale=config)
            for overflow in pattern:
                before, after = oracle.row, oracle.step(overflow)
                result = bench.train(chosen(overflow))
                assert (result.applied, result.finite) == (not overflow, not overflow)
                assert (result.scale, result.next_scale) == (before.scale, after.scale)
                assert result.consecutive_skips == after.consecutive_skips
                assert bench.row() == asdict(after)
                assert bench.scale == after.scale

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ampx.ScaleCollapsedWarning)
            check()

    def test_hysteresis_tolerates_overflows_in_a_row(self) -> None:
        """Only the third overflow in a row backs off; a finite step in between starts the count anew."""
        bench = self.bench(self.start(ampx.LossScale(init_scale=1024.0, hysteresis=3)))
        assert bench.trace((1, 1, 0, 1, 1, 1, 1)) == [1024.0, 1024.0, 1024.0, 1024.0, 1024.0, 512.0, 512.0]

    def test_growth_stops_at_max_scale(self) -> None:
        """A growth that would pass the bound ends at it."""
        config = ampx.LossScale(init_scale=4.0, growth_interval=1, growth_factor=3.0, max_scale=20.0)
        assert self.bench(self.start(config)).trace((0, 0, 0, 1, 0)) == [12.0, 20.0, 20.0, 10.0, 20.0]

    def test_backoff_stops_at_min_scale(self) -> None:
        """A backoff that would pass the bound ends at it."""
        config = ampx.LossScale(init_scale=8.0, growth_interval=2, backoff_factor=0.25, min_scale=3.0)
        assert self.bench(self.start(config)).trace((1, 1, 0, 0)) == [3.0, 3.0, 3.0, 6.0]

    def test_a_static_scale_skips_but_never_moves(self) -> None:
        """Steps that are not finite are skipped whatever the scale."""
        bench, plain = self.bench(self.start(loss_scale=128)), self.plain()
        results = [bench.train(chosen(overflow)) for overflow in (False, True, True, False)]
        assert [result.applied for result in results] == [True, False, False, True]
        assert [result.consecutive_skips for result in results] == [0, 1, 2, 0]
        assert {result.next_scale for result in results} == {128.0}
        plain.train_plainly(FINITE)
        plain.train_plainly(FINITE)
        assert bench.values() == plain.values()

    def test_backing_off_cures_an_overflow(self) -> None:
        """Gradients that only the scale pushes out of range are applied once the scale has come down."""
        bench, plain = self.bench(self.start(ampx.LossScale(init_scale=2.0**9))), self.plain()
        assert [bench.train(TOO_LARGE).applied for _ in range(3)] == [False, False, True]
        plain.train_plainly(TOO_LARGE)
        assert bench.values() == plain.values()

    def test_a_loss_scale_given_to_wrap_optimizer_wins(self) -> None:
        """The session's configuration is only the default."""
        amp = self.start(ampx.LossScale(init_scale=32.0))
        own: dict[str, Any] = asdict(ampx.LossScale(init_scale=8.0, growth_interval=7, hysteresis=2))
        assert self.bench(amp).scale == 32.0
        assert self.bench(amp, loss_scale=ampx.LossScale(**own)).saved()["config"] == own
