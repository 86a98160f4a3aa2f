"""Rounding in NumPy is what the dtypes do, bit by bit."""

import math

import numpy as np
import pytest

from ampx.formats import FORMATS
from ampx.numerics.probe import Stats
from ampx.numerics.rounding import describe, is_rounded, round_to, sample
from toy import framework

LOW = ("bfloat16", "float16", "float8_e5m2", "float8_e4m3")


def numbers():
    """Floats with all exponents, those next to where a dtype overflows or flushes among them."""
    source = np.random.default_rng(0)
    bits = source.integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32)
    edges = [
        np.float32(sign * edge * near)
        for form in FORMATS.values()
        for edge in (form.largest, form.smallest_normal, form.smallest, form.smallest / 2)
        for near in (1 - 2**-9, 1, 1 + 2**-9, 1 + 2**-5, 1.5)
        for sign in (1, -1)
        if abs(edge * near) < 3.4e38
    ]
    near_one = 1 + np.arange(-4096, 4096, dtype=np.float32) * np.float32(2.0**-13)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], np.float32)
    return np.concatenate([bits, np.array(edges, np.float32), near_one, special])


def same(actual, expected):
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.signbit(actual)[~np.isnan(actual)], np.signbit(expected)[~np.isnan(expected)])


def test_float16_is_rounded_as_numpy_rounds_it():
    with np.errstate(over="ignore"):
        same(round_to(numbers(), "float16"), numbers().astype(np.float16).astype(np.float32))


def test_bfloat16_is_rounded_as_the_bits_of_float32_say():
    expected = [framework.round_to(float(value), "bfloat16") for value in numbers()]
    same(round_to(numbers(), "bfloat16"), np.array(expected, np.float32))


@pytest.mark.parametrize("dtype", LOW)
def test_every_dtype_is_rounded_as_ml_dtypes_rounds_it(dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = np.float16 if dtype == "float16" else getattr(ml_dtypes, dtype.replace("e4m3", "e4m3fn"))
    with np.errstate(all="ignore"):
        same(round_to(numbers(), dtype), numbers().astype(kind).astype(np.float32))


@pytest.mark.parametrize("dtype", LOW)
def test_a_dtype_holds_its_largest_and_smallest_numbers_and_no_others(dtype):
    form = FORMATS[dtype]
    kept = np.array([form.largest, form.smallest_normal, form.smallest, 1 + 2.0 ** (1 - form.bits)], np.float32)
    same(round_to(kept, dtype), kept)
    assert round_to(form.smallest / 2, dtype) == 0  # a tie, and zero is even
    assert round_to(form.smallest * 0.75, dtype) == np.float32(form.smallest)
    assert round_to(1 + 2.0**-form.bits, dtype) == 1  # a tie, and 1 is even
    beyond = round_to(min(form.largest * (1 + 2.0**-form.bits) * 1.02, 3.4e38), dtype)
    assert np.isinf(beyond) if form.infinite else np.isnan(beyond)


def test_describe_counts_what_a_loop_over_the_elements_counts():
    values = numbers()
    for dtype in ("float16", "bfloat16"):
        finite = [float(value) for value in values if math.isfinite(value)]
        rounded = [framework.round_to(value, dtype) for value in finite]
        assert describe(values.reshape(-1, 1), dtype) == Stats(
            elements=len(values),
            nonfinite=len(values) - len(finite),
            nan=sum(math.isnan(value) for value in values),
            zeros=finite.count(0.0),
            largest=max(map(abs, finite)),
            smallest=min(abs(value) for value in finite if value),
            lowest=min(finite),
            flushed=sum(value != 0 and low == 0 for value, low in zip(finite, rounded, strict=True)),
            overflowed=sum(not math.isfinite(low) for low in rounded),
        )


def test_nothing_and_nothing_finite_have_no_largest_number():
    assert describe([]) == Stats()
    assert describe([math.inf, math.nan]) == Stats(elements=2, nonfinite=2, nan=1)


@pytest.mark.parametrize(
    ("elements", "samples", "kept"), [(7, 4, [0, 2, 4, 6]), (4, 4, [0, 1, 2, 3]), (9, 2, [0, 5]), (6, 4, [0, 5])]
)
def test_a_sample_is_strided_in_row_major_order(elements, samples, kept):
    assert sample(np.arange(elements, dtype=np.float32).reshape(-1, 1), samples).tolist() == kept


@pytest.mark.parametrize("dtype", LOW)
def test_a_format_knows_where_numbers_flush_and_where_they_overflow(dtype):
    form = FORMATS[dtype]
    flushes, overflows = np.float32(form.flushes_to), np.float32(form.overflows_from)
    values = [flushes, np.nextafter(flushes, np.float32(1)), np.nextafter(overflows, np.float32(0)), overflows]
    low = round_to(values, dtype)
    np.testing.assert_array_equal(low[:3], np.float32([0.0, form.smallest, form.largest]))
    assert not np.isfinite(low[3])


@pytest.mark.parametrize(
    ("values", "rounded"),
    [
        ([0.5, -1.0078125], True),  # 1 + 2**-7
        ([0.5, 1.00390625], False),
        ([0.5, 0.5, -0.5], False),  # one magnitude, as of weights that are clipped
        ([0.0], False),
        ([0.5, math.inf], False),
        ([0.5, 1.0, math.nan], False),
    ],
)
def test_several_finite_numbers_that_bfloat16_can_hold_are_rounded_ones(values, rounded):
    assert is_rounded(np.array(values, np.float32), "bfloat16") is rounded
