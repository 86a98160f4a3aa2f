"""What `ampx.convert` refuses, and how it compares outputs; the kit tests what it returns."""

import math
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest

import ampx
from ampx.shipping.convert import compared
from ampx.shipping.layers import (
    arguments,
    check_computed,
    check_float32,
    denied_names,
    largest,
    leaves_first,
    named_outputs,
    positional,
)
from toy.framework import Dense, Module, Tensor

pytestmark = pytest.mark.usefixtures("toys")
BATCH = Tensor([1.0, 2.0])


class Calls(Module):
    """A layer that is a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def model(*weights):
    return Module(**{f"layer{index}": Dense(Tensor([weight], parameter=True)) for index, weight in enumerate(weights)})


def convert(what=None, **options):
    what = model(2.0) if what is None else what
    return ampx.convert(what, **{"batches": [BATCH], "framework": "toy", **options})


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"tolerance": 0}, ampx.InvalidOptionError, "tolerance=0"),
        ({"tolerance": "small"}, ampx.InvalidOptionError, "tolerance='small'"),
        ({"keep_io": 1}, ampx.InvalidOptionError, "keep_io=1"),
        ({"batches": (BATCH,)}, ampx.InvalidOptionError, r"batches=\[batch\]"),
        ({"batches": {"x": BATCH}}, ampx.InvalidOptionError, r"batches=\[batch\]"),
        ({"batches": 3}, ampx.InvalidOptionError, "int"),
        ({"dtype": "float32"}, ampx.UnsupportedDtypeError, "float32"),
        ({"deny": ["matmul"]}, ampx.UnsupportedOpError, "names no module"),
        ({"deny": ["module:head"]}, ampx.UnsupportedOpError, "layer0"),
    ],
)
def test_what_is_no_option_is_refused_and_says_what_is(options, error, word):
    with pytest.raises(error, match=word):
        convert(**options)


def test_what_is_not_compared_is_warned_of():
    with pytest.warns(ampx.PrecisionWarning, match="not compared"):
        convert(batches=[])


def test_the_framework_is_that_of_the_model_also_inside_of_a_pair():
    with pytest.raises(ampx.AmpxError, match="toy"):  # several toys share one module
        ampx.convert((model(2.0), 1), batches=[BATCH])


def test_a_weight_that_the_dtype_cannot_hold_is_named():
    with pytest.raises(ampx.ConversionError, match=r"layer1 \(1e\+06\)"):
        convert(model(1.0, 1e6))


def test_an_output_beyond_the_tolerance_is_named_with_what_is_to_stay_in_float32():
    weights = (2.0, 2.0, 1 + 2.0**-12)
    with pytest.raises(ampx.ConversionError, match=r"(?s)output of batch 0.*deny=\['module:layer2'\]"):
        convert(model(*weights), tolerance=1e-5)
    assert convert(model(*weights), tolerance=1e-5, deny=["module:layer2"]) is not None


def test_a_model_that_does_not_run_in_low_precision_says_what_it_raised():
    calls = []

    def fails_the_second_time(x):
        calls.append(x)
        if len(calls) > 1:
            raise TypeError("no kernel\nfor float16")
        return x

    with pytest.raises(
        ampx.ConversionError, match=r"does not run in float16, on batch 0: TypeError: no kernel;"
    ) as error:
        convert(Module(inner=Calls(fails_the_second_time)))
    assert "No set of modules" in str(error.value)


def test_outputs_are_compared_by_place_shape_and_where_they_are_finite():
    reference = {
        "same": np.array([3.0, 4.0], np.float32),
        "off": np.array([3.0, 4.0], np.float32),
        "infinite": np.array([1.0, np.inf], np.float32),
        "finite": np.array([1.0, 1.0], np.float32),
        "shape": np.array([1.0], np.float32),
        "classes": np.array([1, 2, 3, 4]),
        "gone": np.array([1.0], np.float32),
    }
    outputs = {
        **{name: reference[name] for name in ("same", "infinite")},
        "off": np.array([3.0, 4.5], np.float32),
        "finite": np.array([1.0, np.nan], np.float32),
        "shape": np.array([1.0, 1.0], np.float32),
        "classes": np.array([1, 2, 3, 5]),
        "new": np.array([1.0], np.float32),
    }
    errors = {entry.output: entry.error for entry in compared(outputs, reference)}
    assert errors == {
        "same": 0.0,
        "off": pytest.approx(0.1),
        "infinite": 0.0,
        "finite": math.inf,
        "shape": math.inf,
        "classes": 0.25,
        "gone": math.inf,
        "new": math.inf,
    }
    assert not any(entry.agrees(math.inf) for entry in compared(outputs, reference) if math.isinf(entry.error))


def test_outputs_are_named_by_their_places():
    pair = namedtuple("pair", ["first", "second"])

    @dataclass
    class Record:
        logits: float
        name: str

    tree = {"a": [1.0, pair(2.0, "text")], "b": Record(3.0, "text")}
    names = named_outputs(tree, lambda leaf: leaf if isinstance(leaf, float) else None)
    assert names == {"output['a'][0]": 1.0, "output['a'][1].first": 2.0, "output['b'].logits": 3.0}
    assert named_outputs(1.0, lambda leaf: leaf) == {"output": 1.0}


def test_a_batch_holds_positional_arguments_named_ones_or_is_the_only_one():
    pair = namedtuple("pair", ["first", "second"])
    assert arguments((1, 2)) == ((1, 2), {})
    assert arguments({"x": 1}) == ((), {"x": 1})
    assert arguments(pair(1, 2)) == ((pair(1, 2),), {})
    assert arguments([1, 2]) == (([1, 2],), {})


def test_modules_without_others_inside_come_first():
    assert leaves_first(["", "block", "block.a", "block.b", "head"]) == ("block.a", "block.b", "head", "block")


def test_a_device_that_does_not_compute_a_dtype_is_named_with_what_it_does():
    backend = ampx.plugins.default_registry().load("toy")
    check_computed(backend, "cpu", "float32")
    with pytest.raises(ampx.UnsupportedDtypeError, match=r"dtype='float8_e4m3' is not computed by .* on 'cpu'"):
        check_computed(backend, "cpu", "float8_e4m3")


def test_denied_modules_are_those_of_a_pattern_and_all_inside():
    names = ("", "encoder", "encoder.0", "encoder.0.fc", "encoders", "head")
    assert denied_names(["module:enc*.0", "module:head"], names) == {"encoder.0", "encoder.0.fc", "head"}
    assert denied_names(["module:encoder"], names) == {"encoder", "encoder.0", "encoder.0.fc"}
    assert denied_names([], names) == frozenset()


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, -3.0, math.inf], 3.0), ([math.nan, math.inf], 0.0), ([], 0.0), ([[0.5], [-0.25]], 0.5)],
)
def test_the_largest_weight_is_the_largest_that_is_finite(values, expected):
    assert largest(np.array(values, np.float32)) == expected


def test_a_model_that_is_in_low_precision_already_is_refused_with_the_names_of_its_weights():
    check_float32([])
    with pytest.raises(ampx.InvalidOptionError, match=r"\(w0, w1, w2, w3, w4\).*Load its checkpoint"):
        check_float32([f"w{index}" for index in range(9)])


def test_a_batch_is_what_a_framework_takes_by_position_or_is_refused():
    assert positional((1, 2), int, "numbers") == (1, 2)
    assert positional(3, int, "numbers") == (3,)
    for batch, kinds in (((1, "x"), "int, str"), ({"x": 1}, "int"), ([1], "list")):
        with pytest.raises(ampx.InvalidOptionError, match=rf"a batch of {kinds}; accepted: numbers by position"):
            positional(batch, int, "numbers")
