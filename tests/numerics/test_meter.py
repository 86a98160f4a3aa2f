"""The meter's numbers equal what arithmetic says."""

import json
import math

import numpy as np
import pytest

from ampx.numerics.meter import Meter, count


def test_updates_that_round_to_nothing_are_counted_only_where_there_is_a_gradient():
    before = np.array([1.0, 1.0, 1.0, 0.0, 1.0], np.float16)
    gradient = np.array([1.0, -16.0, 0.0, 1.0, math.inf], np.float16)
    after = (before - np.float16(2.0**-12) * gradient).astype(np.float16)  # float16 holds 1 - 2**-11 and 1 + 2**-10
    entry = count("weight", "float16", before, after, gradient)
    assert (entry.sampled, entry.moved, entry.unchanged, entry.nonfinite) == (5, 3, 1, 1)
    assert entry.lost == 1 / 3


def test_gradients_that_flush_are_counted_in_the_compute_dtype():
    gradient = np.array([2.0**-26, 2.0**-25, 2.0**-24, 0.0, 1.0], np.float32)
    weights = np.zeros(5, np.float32)
    assert count("w", "float32", weights, weights - gradient, gradient).flushed == 2
    assert count("w", "float32", weights, weights - gradient, gradient, "bfloat16").flushed == 0


@pytest.mark.parametrize(("largest", "bits"), [(65504.0, 0.0), (65504.0 / 8, 3.0), (65504.0 * 2, -1.0)])
def test_headroom_is_the_bits_to_the_largest_number(largest, bits):
    entry = count("w", "float32", np.zeros(2), np.ones(2), np.array([0.5, -largest]))
    assert entry.headroom == pytest.approx(bits)


def test_a_parameter_without_a_gradient_loses_nothing_and_has_no_headroom():
    frozen = count("frozen", "float32", np.ones(3), np.ones(3), None)
    zero = count("zero", "float32", np.ones(3), np.ones(3), np.zeros(3))
    meter = Meter(1, "float16", 1.0, (frozen, zero))
    assert (meter.lost, meter.flushed, meter.headroom) == (0.0, 0.0, None)


def test_a_meter_adds_its_parameters_up_and_is_plain_json():
    half = count("a", "float16", np.ones(4), np.array([1, 1, 2, 2.0]), np.ones(4))
    whole = count("b", "float16", np.ones(4), np.ones(4), np.full(4, 2.0**-30))
    meter = Meter(100, "float16", 1024.0, (half, whole))
    assert (meter.lost, meter.flushed) == (6 / 8, 4 / 8)
    assert meter.headroom == pytest.approx(math.log2(65504))
    assert json.loads(json.dumps(meter.to_json(), allow_nan=False))["lost"] == 0.75
