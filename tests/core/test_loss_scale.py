"""The state machine against tables written by hand and against a second implementation."""

import json
import math
import struct
from dataclasses import asdict
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ampx import InvalidOptionError, LossScale, LossScaleState, next_state
from ampx.scale_state import round_to_float32

INF = math.inf
HUGE = pytest.param(10**400, id="huge")


def trace(config, pattern, start=None):
    state, scales = start or config.initial_state(), []
    for overflow in pattern:
        state = next_state(config, state, not overflow)
        scales.append(state.scale)
    return scales


def test_reference_pattern_gives_the_measured_scales():
    # Measured on torch's own GradScaler, Paddle and Keras with the same settings.
    scales = trace(LossScale(growth_interval=3), [0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0])
    expected = "65536 65536 131072 65536 65536 65536 32768 16384 16384 16384 32768 32768 32768 65536"
    assert scales == [float(number) for number in expected.split()]


@pytest.mark.parametrize(
    ("config", "state", "finite", "expected"),
    [
        # finite: the tracker counts, skips end, hysteresis is refilled
        ({"growth_interval": 3, "hysteresis": 2}, (8, 0, 1, 4), True, (8, 1, 2, 0)),
        ({"growth_interval": 3}, (8, 2, 1, 0), True, (16, 0, 1, 0)),
        ({"growth_interval": 3}, (8, 7, 1, 0), True, (16, 0, 1, 0)),  # a tracker beyond the interval grows at once
        ({"growth_interval": 1}, (8, 0, 1, 0), True, (16, 0, 1, 0)),
        ({"growth_interval": 1, "max_scale": 12, "init_scale": 8}, (8, 0, 1, 0), True, (12, 0, 1, 0)),
        ({"growth_interval": 1, "max_scale": 12, "init_scale": 8}, (12, 0, 1, 0), True, (12, 0, 1, 0)),
        ({"growth_interval": 1, "max_scale": 3.4e38}, (3e38, 0, 1, 0), True, (3.4e38, 0, 1, 0)),  # never inf
        # not finite: hysteresis is used up before the scale moves
        ({"hysteresis": 3}, (8, 5, 3, 0), False, (8, 0, 2, 1)),
        ({"hysteresis": 3}, (8, 0, 2, 1), False, (8, 0, 1, 2)),
        ({"hysteresis": 3}, (8, 0, 1, 2), False, (4, 0, 3, 3)),
        ({}, (8, 1999, 1, 0), False, (4, 0, 1, 1)),  # an overflow on the step that would have grown
        ({"min_scale": 6, "init_scale": 8}, (8, 0, 1, 0), False, (6, 0, 1, 1)),
        ({"min_scale": 6, "init_scale": 8}, (6, 0, 1, 9), False, (6, 0, 1, 10)),
        # static: only the skips are counted
        ({"dynamic": False}, (128, 3, 1, 0), False, (128, 3, 1, 1)),
        ({"dynamic": False, "growth_interval": 1}, (128, 3, 1, 5), True, (128, 3, 1, 0)),
    ],
)
def test_one_step(config, state, finite, expected):
    after = next_state(LossScale(**config), LossScaleState(float(state[0]), *state[1:]), finite)
    scale = struct.unpack("f", struct.pack("f", expected[0]))[0]
    assert (after.scale, after.growth_tracker, after.hysteresis_tracker, after.consecutive_skips) == (
        scale,
        *expected[1:],
    )


def float32(exact):
    """Round a fraction to the nearest float32, ties to even, without struct."""
    if exact == 0:
        return exact
    exponent = max(math.floor(math.log2(exact)), -126)
    while exact >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while exponent > -126 and exact < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    return round(exact / unit) * unit


class Model:
    """The specification once more, in rational numbers, by counting events since the last change."""

    def __init__(self, init, growth, backoff, interval, hysteresis, low, high):
        self.growth, self.backoff = float32(Fraction(growth)), float32(Fraction(backoff))
        self.interval, self.hysteresis = interval, hysteresis
        self.low, self.high = float32(Fraction(low)), float32(Fraction(high))
        self.scale = float32(Fraction(init))
        self.good, self.bad = 0, 0

    def step(self, overflow):
        if overflow:
            self.good, self.bad = 0, self.bad + 1
            if self.bad == self.hysteresis:
                self.scale, self.bad = max(self.low, float32(self.scale * self.backoff)), 0
        else:
            self.good, self.bad = self.good + 1, 0
            if self.good == self.interval:
                self.scale, self.good = min(self.high, float32(self.scale * self.growth)), 0
        return float(self.scale)


@settings(max_examples=150, deadline=None)
@given(
    growth=st.floats(1.0, 8.0),
    backoff=st.floats(0.01, 1.0),
    interval=st.integers(1, 5),
    hysteresis=st.integers(1, 4),
    bounds=st.tuples(*[st.floats(1e-3, 1e7)] * 3).map(sorted),
    pattern=st.lists(st.booleans(), min_size=1, max_size=60),
)
def test_random_traces_equal_an_independent_model(growth, backoff, interval, hysteresis, bounds, pattern):
    low, init, high = bounds
    config = LossScale(init, growth, backoff, interval, hysteresis, low, high)
    model = Model(init, growth, backoff, interval, hysteresis, low, high)
    assert trace(config, pattern) == [model.step(overflow) for overflow in pattern]


@pytest.mark.parametrize("value", [0.1, 1 / 3, 65536.0, 1e-30, 3.4e38, 16777217.0])
def test_rounding_to_float32_is_nearest_even(value):
    assert Fraction(round_to_float32(value)) == float32(Fraction(value))


def test_every_scale_of_a_trace_is_a_float32():
    config = LossScale(init_scale=1000.1, growth_factor=1.1, backoff_factor=0.3, growth_interval=1)
    for scale in trace(config, [0, 0, 1, 0, 1, 0, 0, 0]):
        assert struct.unpack("f", struct.pack("f", scale))[0] == scale


class Traced:
    """A scalar that refuses to be looked at, as under jit: only `where` may choose."""

    def __init__(self, value):
        self.value = value

    def __bool__(self):
        raise AssertionError("a traced value was turned into a bool")

    __float__ = __int__ = __index__ = __hash__ = __bool__

    def __eq__(self, other):
        raise AssertionError("a traced value was compared by ==")

    def __isub__(self, other):
        raise AssertionError("a traced value was changed in place")

    __iadd__ = __imul__ = __isub__


def raw(value):
    return value.value if isinstance(value, Traced) else value


for _name in ("__add__", "__sub__", "__mul__", "__ge__", "__le__", "__gt__", "__lt__"):

    def _operation(self, other, _name=_name):
        return Traced(getattr(float(self.value), _name)(float(raw(other))))

    setattr(Traced, _name, _operation)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 3), st.booleans())
def test_traced_values_give_the_same_trace_without_being_looked_at(pattern, hysteresis, dynamic):
    config = LossScale(growth_interval=2, hysteresis=hysteresis, dynamic=dynamic)

    def where(condition, if_true, if_false):
        return Traced(raw(if_true) if raw(condition) else raw(if_false))

    host = config.initial_state()
    traced = LossScaleState(*(Traced(value) for value in vars(host).values()))
    for overflow in pattern:
        host = next_state(config, host, not overflow)
        traced = next_state(config, traced, Traced(not overflow), where)
        assert [raw(value) for value in vars(traced).values()] == list(vars(host).values())


NUMBERS = ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")
COUNTS = ("growth_interval", "hysteresis", "max_consecutive_skips")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [0, -1.0, INF, -INF, math.nan, "2", None, True, 1e39, HUGE, 1e-40, [2.0]])
def test_a_number_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(InvalidOptionError, match=name) as caught:
        LossScale(**{name: value})
    assert type(caught.value) is InvalidOptionError
    assert "accepted:" in str(caught.value)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 1.0, 2.5, "2", None, True, 2**31, math.nan])
def test_a_count_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(InvalidOptionError, match=name):
        LossScale(**{name: value})


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"growth_factor": 0.5}, "growth_factor"),
        ({"backoff_factor": 1.5}, "backoff_factor"),
        ({"dynamic": 1}, "dynamic"),
        ({"dynamic": "no"}, "dynamic"),
        ({"init_scale": 0.5}, "init_scale"),
        ({"init_scale": 2.0**25}, "init_scale"),
        ({"min_scale": 2.0**20}, "init_scale"),
        ({"min_scale": 16, "max_scale": 8, "init_scale": 12}, "init_scale"),
    ],
)
def test_values_that_do_not_fit_together_are_refused(options, name):
    with pytest.raises(InvalidOptionError, match=name):
        LossScale(**options)


def test_a_static_scale_may_lie_outside_the_bounds():
    assert LossScale.static(0.25).initial_state().scale == 0.25


@pytest.mark.parametrize(
    ("value", "scale", "dynamic"),
    [("dynamic", 65536.0, True), (128, 128.0, False), (0.5, 0.5, False), (LossScale(init_scale=4), 4.0, True)],
)
def test_parse_accepts(value, scale, dynamic):
    config = LossScale.parse(value)
    assert (config.initial_state().scale, config.dynamic) == (scale, dynamic)


def test_numbers_of_numpy_are_numbers_and_are_saved_as_those_of_python():
    config = LossScale(init_scale=np.float32(8), growth_factor=np.float16(4), growth_interval=np.int64(3))
    assert config == LossScale(init_scale=8.0, growth_factor=4.0, growth_interval=3)
    assert json.loads(json.dumps(asdict(config))) == asdict(config)
    assert LossScale.parse(np.float32(8)) == LossScale.static(8.0)
    for wrong in ({"growth_interval": np.float32(3)}, {"init_scale": np.float32("nan")}, {"dynamic": np.bool_(True)}):
        with pytest.raises(InvalidOptionError):
            LossScale(**wrong)


@pytest.mark.parametrize("value", ["static", "128", True, None, 0, -1, INF, math.nan, [], {}, HUGE])
def test_parse_refuses(value):
    with pytest.raises(InvalidOptionError):
        LossScale.parse(value)
