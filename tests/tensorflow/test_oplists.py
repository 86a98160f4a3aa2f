"""`allow` and `deny`: layers by name and by class, operations of functions, and what is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ampx
from ampx_tensorflow import rewrite
from ampx_tensorflow.oplists import ListsPlan

pytestmark = pytest.mark.filterwarnings("ignore::ampx.errors.PrecisionWarning")
X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")


def init(**options):
    return ampx.init("tensorflow", dtype="bfloat16", device="cpu", **options)


class Head(keras.layers.Dense):
    """A class of the user's own."""


def net():
    inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="low"), Head(4, name="own")], name="block")
    return keras.Sequential([keras.Input((4,)), inner, Head(1, name="head")])


def computes(model):
    return {
        layer.name: layer.compute_dtype for layer in model._flatten_layers() if isinstance(layer, keras.layers.Dense)
    }


CASES = {
    "a class": ({"deny": [Head]}, {"low": "bfloat16", "own": "float32", "head": "float32"}),
    "a class, with its subclasses": ({"deny": [keras.layers.Dense]}, dict.fromkeys(("low", "own", "head"), "float32")),
    "a name and a class": (
        {"deny": ["module:block"], "allow": [Head]},
        {"low": "float32", "own": "bfloat16", "head": "bfloat16"},
    ),
    "deny before allow": (
        {"deny": ["module:head"], "allow": [Head]},
        {"low": "bfloat16", "own": "bfloat16", "head": "float32"},
    ),
}


@pytest.mark.parametrize("when", ["before init", "after init"])
@pytest.mark.parametrize(("entries", "expected"), CASES.values(), ids=CASES)
def test_layers_compute_as_their_names_and_classes_say(entries, expected, when):
    model = net() if when == "before init" else None
    amp = init(**entries)
    model = amp.prepare(model or net())
    assert computes(model) == expected
    assert model(X).dtype.name == expected["head"]
    assert tf.function(lambda: model(tf.constant(X)))().dtype.name == expected["head"]


def test_what_is_inside_a_denied_class_is_denied():
    model = keras.Sequential([keras.Input((3, 4)), keras.layers.LSTM(2)])
    init(deny=[keras.layers.LSTM]).prepare(model)
    assert model.layers[0].cell.compute_dtype == "float32"
    assert model(np.ones((1, 3, 4), "float32")).dtype == tf.float32


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_classes_keep_their_variables_in_float32_at_the_levels_that_lower_them(level):
    model = init(level=level, deny=[Head]).prepare(net())
    kinds = {variable.path.split("/")[-2]: variable.value.dtype.name for variable in model.variables}
    assert kinds == {"low": "bfloat16", "own": "float32", "head": "float32"}


def test_entries_that_wait_for_a_model_are_not_forgotten():
    amp, model = init(deny=[Head]), net()
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.1))
    model.compile(opt, "mse", run_eagerly=True)
    with pytest.raises(ampx.UnsupportedOpError, match="Head"):
        model.fit(X, X[:, :1], verbose=0)
    amp.prepare(model)
    model.fit(X, X[:, :1], verbose=0)
    assert opt.last_step.applied


# -- operations of functions -----------------------------------------------------------------------


WEIGHTS = tf.constant(np.random.default_rng(1).normal(size=(64, 64)).astype("float32"))
VALUES = tf.constant(np.random.default_rng(2).normal(size=(64, 64)).astype("float32"))


@pytest.fixture
def rewriter():
    with init() as amp:
        try:
            rewrite.check(amp.plan)
        except ampx.UnsupportedByBackendError as error:
            pytest.skip(str(error))


def chain():
    """Products before and after a tanh, as one function; its result tells which of them were rounded."""
    return tf.function(lambda x: tf.matmul(tf.tanh(tf.matmul(x, WEIGHTS)), WEIGHTS))


def test_denied_operations_of_functions_compute_in_float32(rewriter):
    plain = chain()(VALUES)
    rounded = init().prepare(chain())(VALUES)
    assert not np.array_equal(rounded, plain)
    with pytest.warns(ampx.PrecisionWarning, match="layers compute in float32"):
        amp = init(deny=["MatMul"])
    np.testing.assert_array_equal(amp.prepare(chain())(VALUES), plain)
    assert keras.layers.Dense(2)(X).dtype == tf.float32


def test_a_function_that_ran_under_other_lists_is_rewritten_anew(rewriter):
    function = chain()
    plain = function(VALUES)
    rounded = init().prepare(function)(VALUES)
    denied = init(deny=["MatMul"]).prepare(function)
    np.testing.assert_array_equal(denied(VALUES), plain)
    np.testing.assert_array_equal(init().prepare(function)(VALUES), rounded)


def test_the_environment_of_the_process_is_added_to_and_restored(monkeypatch):
    name = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_DENYLIST_ADD"
    monkeypatch.setenv(name, "Exp")
    plan = init(deny=["Tanh"], allow=["Softmax"]).plan
    assert isinstance(plan, ListsPlan)
    changes = plan.environment()
    assert changes[name] == "Exp,Tanh"
    lists = {each.rsplit("REWRITE_")[1]: set(names.split(",")) for each, names in changes.items()}
    assert lists == {
        "DENYLIST_ADD": {"Exp", "Tanh"},
        "ALLOWLIST_ADD": {"Softmax"},
        "ALLOWLIST_REMOVE": {"Tanh"},
        "DENYLIST_REMOVE": {"Softmax"},
        "INFERLIST_REMOVE": {"Tanh", "Softmax"},
        "CLEARLIST_REMOVE": {"Tanh", "Softmax"},
    }


# -- refused ---------------------------------------------------------------------------------------

REFUSED = {
    "nothing that is known": ({"deny": ["nosuch"]}, r"no operation of TensorFlow\. Write a layer's name"),
    "almost an operation": ({"deny": ["sofmax"]}, r"no operation of TensorFlow\. Did you mean 'Softmax'\?"),
    "no class of layers": ({"deny": [int]}, "no class of layers"),
    "every layer": ({"deny": [keras.layers.Layer]}, "every model"),
    "both lists": ({"deny": [Head], "allow": [Head]}, "in allow and in deny"),
    "operations and layers": ({"deny": ["MatMul", Head]}, "one of both"),
    "operations where variables are cast": ({"deny": ["MatMul"], "level": "O2"}, "variables"),
}


@pytest.mark.parametrize(("options", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_honoured_is_refused(options, text):
    with pytest.raises(ampx.UnsupportedOpError, match=text):
        init(**options)


def test_models_are_refused_where_operations_are_named():
    with pytest.raises(ampx.UnsupportedOpError, match="MatMul"):
        init(deny=["MatMul"]).prepare(net())


def test_models_of_tf_keras_are_refused_where_layers_are_named():
    tf_keras = pytest.importorskip("tf_keras", reason="tf_keras is not installed")
    with pytest.raises(ampx.UnsupportedOpError, match="tf_keras"):
        init(deny=["module:a"]).prepare(tf_keras.Sequential([tf_keras.layers.Dense(1, name="a")]))
