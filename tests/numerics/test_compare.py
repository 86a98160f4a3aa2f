"""A comparison names the module that parts, and leaves alone what only rounds."""

import json
import math

import numpy as np
import pytest

import ampx
from ampx.numerics.compare import bound, compared, relative_error
from ampx.numerics.probe import Reading, Replayed, Stats
from ampx.numerics.rounding import describe, round_to
from toy.framework import Dense, Module, Tensor, total

pytestmark = pytest.mark.usefixtures("toys")


def read(module, values, direction="forward"):
    values = np.asarray(values, np.float32)
    return Reading(module, "Dense", "", direction, 0, "float16", describe(values), Stats(), values)


def replayed(loss=1.0, **gradients):
    return Replayed(loss, {name: np.asarray(values, np.float32) for name, values in gradients.items()}, {})


@pytest.mark.parametrize(
    ("value", "reference", "error"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 5.0], [3.0, 4.0], 0.2),
        ([0.0], [0.0], 0.0),
        ([1.0], [0.0], 1.0),
        ([math.inf, 1.0], [1.0, 1.0], math.inf),
        ([math.nan], [math.inf], 0.0),
    ],
)
def test_the_error_is_the_norm_of_the_difference_over_that_of_the_reference(value, reference, error):
    assert relative_error(np.array(value), np.array(reference)) == pytest.approx(error)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3"])
def test_a_hundred_rounded_layers_stay_within_what_rounding_explains(dtype):
    source = np.random.default_rng(0)
    exact = low = source.normal(size=(32, 64)).astype(np.float32)
    reference, rounded = [], []
    for layer in range(100):
        weight = (source.normal(size=(64, 64)) / 8).astype(np.float32)
        exact = exact @ weight
        exact /= np.float32(np.abs(exact).std() + 1e-3)
        low = round_to(low, dtype) @ round_to(weight, dtype)
        low = round_to(low / np.float32(np.abs(low).std() + 1e-3), dtype)
        reference.append(read(f"{layer}", exact))
        rounded.append(read(f"{layer}", low))
    comparison = compared((replayed(), reference), (replayed(), rounded), dtype)
    assert comparison.parts_at is None
    assert comparison.modules[-1].error > 2.0 ** -{"float16": 11, "bfloat16": 8, "float8_e4m3": 4}[dtype]


@pytest.mark.parametrize(
    ("penalty", "loss", "wrong"),
    [([3.0, -1.0], [3.0, -1.0], []), ([3.0, -1.0], [0.0, 0.0], [1]), ([2.0, -1.0], [3.0, -1.0], [0])],
)
def test_the_loss_scale_is_taken_from_gradients_of_a_loss_and_not_from_those_inside_of_it(penalty, loss, wrong):
    """`penalty` has been asked for by the script, and carries no scale. What is wrong stays wrong either way."""
    exact = [read(name, [3.0, -1.0], "backward") for name in ("penalty", "loss")]
    low = [read("penalty", penalty, "backward"), read("loss", 1024.0 * np.array(loss), "backward")]
    modules = compared((replayed(), exact), (replayed(), low), "float16", 1024.0).modules
    assert [at for at, entry in enumerate(modules) if entry.parts] == wrong


def test_the_first_module_that_loses_its_digits_is_named_and_the_worst_are_listed():
    values = np.arange(1, 9)
    reference = [read(name, values) for name in "abcd"] + [read("d", values, "backward")]
    low = [read("a", values), read("b", values * 1.5), read("c", values * 2), read("d", values)]
    low.append(read("d", values * 1.25 * 8.0, "backward"))  # as it is in the backward: times the loss scale
    comparison = compared((replayed(), reference), (replayed(), low), "float16", 8.0)
    assert comparison.parts_at.module == "b"
    assert [(entry.module, entry.error) for entry in comparison.worst()] == [
        ("c", 1.0),
        ("b", 0.5),
        ("a", 0.0),
        ("d", 0.0),
    ]
    assert [(entry.module, entry.error) for entry in comparison.worst("backward")] == [("d", 0.25)]
    assert "'b'" in comparison.verdict
    assert comparison.modules[1].bound == bound("float16", 1) == 8 * 2.0**-11 * math.sqrt(2)


def test_gradients_are_compared_by_parameter_and_together():
    exact = replayed(2.0, first=[3.0, 0.0], second=[0.0, 4.0])
    comparison = compared((exact, []), (replayed(2.5, first=[3.0, 0.0], second=[0.0, 5.0]), []), "bfloat16")
    assert comparison.loss_error == 0.25
    assert comparison.gradient_error == pytest.approx(0.2)
    assert comparison.parameters == (("first", 0.0), ("second", 0.25))
    assert comparison.agrees(0.25)
    assert not comparison.agrees(0.24)


def test_a_value_that_is_not_finite_beside_the_sample_counts_and_is_plain_json():
    exact, broken = read("a", [1.0]), read("a", [1.0])
    broken = Reading(**{**vars(broken), "value": describe([1.0, math.inf])})
    comparison = compared((replayed(), [exact]), (replayed(math.nan), [broken]), "float16")
    assert comparison.parts_at.error == math.inf
    assert not comparison.agrees(1e9)
    assert json.loads(json.dumps(comparison.to_json(), allow_nan=False))["loss"] == "nan"


def test_a_float32_that_fails_itself_is_no_matter_of_precision():
    comparison = compared((replayed(math.nan), []), (replayed(math.nan), []), "float16")
    assert "float32 itself fails" in comparison.verdict


def model(*weights):
    return Module(**{f"layer{index}": Dense(Tensor([w], parameter=True)) for index, w in enumerate(weights)})


def step_of(*inputs):
    return lambda model: total(model(Tensor(inputs)))


def test_one_batch_of_a_model_is_compared_in_code():
    comparison = ampx.compare(step_of(1.0, 2.0), model(2.0, 300.0, 400.0), framework="toy", dtype="float16")
    assert (comparison.parts_at.module, comparison.parts_at.error) == ("layer2", math.inf)
    assert comparison.scale == 1.0  # the gradient of the first output is 120,000: no scale is small enough
    sound = ampx.compare(step_of(1.1, 2.1), model(2.3, 3.1), framework="toy", dtype="bfloat16")
    assert sound.parts_at is None
    assert 0 < sound.gradient_error < 2.0**-7
    denied = ampx.compare(
        step_of(1.0), model(2.0, 300.0, 400.0, 2.0**-9), framework="toy", dtype="float16", deny=["module:layer[23]"]
    )
    assert denied.parts_at is None
    smaller = ampx.compare(step_of(2.0**-10), model(2.0, 300.0, 4.0), framework="toy", dtype="float16")
    assert smaller.scale == 8.0  # 8 * 1200 is within two bits of the largest number, 16 * 1200 is not


@pytest.mark.parametrize("call", [ampx.compare, ampx.diagnose, ampx.tune])
def test_model_and_step_in_the_wrong_order_are_named(call):
    for wrong in ((model(2.0), step_of(1.0)), (3.0, model(2.0))):
        with pytest.raises(ampx.InvalidOptionError, match="in this order"):
            call(*wrong)


def test_the_session_says_dtype_and_framework_and_a_dtype_that_the_device_lacks_is_simulated():
    ampx.init("toy", dtype="bfloat16")
    assert ampx.compare(step_of(1.1), model(2.0)).dtype == "bfloat16"
    low = ampx.compare(step_of(1.1, 3.3), model(2.0, 300.0), dtype="float8_e4m3")
    assert low.simulated
    assert low.parts_at.module == "layer1"  # 448 is the largest number


def test_what_a_replay_cannot_show_is_refused():
    with pytest.raises(ampx.UnsupportedLevelError, match="'O0', 'O1'"):
        ampx.compare(step_of(1.0), model(2.0), framework="toy", level="O2")
    with pytest.raises(ampx.UnsupportedDtypeError, match="neither computed nor simulated"):
        ampx.compare(step_of(1.0), model(2.0), framework="toy-explicit", dtype="float8_e4m3")
    with pytest.raises(ampx.UnsupportedByBackendError, match="does not support"):
        ampx.compare(step_of(1.0), model(2.0), framework="toy-bare", dtype="float32")
    with pytest.raises(ampx.InvalidOptionError, match="is not a list"):
        ampx.compare(step_of(1.0), model(2.0), framework="toy", dtype="float16", deny="module:layer0")
