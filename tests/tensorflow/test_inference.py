"""`ampx.convert` in Keras: policies and weights of every layer, files of converted models, and what is refused."""

import numpy as np
import pytest

keras = pytest.importorskip("keras", reason="Keras is not installed")

import tensorflow as tf  # noqa: E402 -- after the check that there is anything to test

import ampx  # noqa: E402

# Keras', where it saves variables.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
IMAGES = np.random.default_rng(0).normal(size=(4, 8, 8, 1)).astype("float32")


def network():
    """A network with a layer that is called twice, normalization, and a nested model."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 1))
    features = keras.layers.BatchNormalization(name="norm")(keras.layers.Conv2D(8, 3, name="conv")(inputs))
    rows = keras.layers.Flatten()(keras.layers.ReLU()(features))
    shared = keras.layers.Dense(16, name="shared")
    head = keras.Sequential([keras.Input((16,)), keras.layers.Dense(10, name="out")], name="head")
    first = shared(keras.layers.Dense(16, name="narrow")(rows))
    model = keras.Model(inputs, {"scores": head(shared(first)), "choice": keras.ops.argmax(first, -1)})
    model.get_layer("norm").moving_mean.assign(np.linspace(0, 0.1, 8))
    return model


def dtypes(model):
    return {variable.path: variable.dtype for variable in model.weights}


def numbers(outputs):
    return {name: np.asarray(value) for name, value in outputs.items()}


def test_layers_are_half_and_norms_are_not():
    model = network()
    low = ampx.convert(model, batches=[IMAGES])
    assert {path.split("/")[-2]: dtype for path, dtype in dtypes(low).items()} == {
        **dict.fromkeys(("conv", "narrow", "shared", "out"), "float16"),
        "norm": "float32",
    }
    assert len(low.weights) == len(model.weights)  # the layer that is called twice is one
    assert set(dtypes(model).values()) == {"float32"}
    expected, outputs = numbers(model(IMAGES)), numbers(low(IMAGES))
    assert outputs["scores"].dtype == np.float32
    np.testing.assert_allclose(outputs["scores"], expected["scores"], rtol=0.02, atol=0.02)
    assert outputs["choice"].tolist() == expected["choice"].tolist()
    kept = ampx.convert(model, batches=[IMAGES], deny=["module:head", "module:conv"])
    assert {path.split("/")[-2] for path, dtype in dtypes(kept).items() if dtype == "float32"} == {
        "norm",
        "conv",
        "out",
    }


def test_a_converted_model_is_saved_and_loaded_whole_and_as_a_saved_model(tmp_path):
    low = ampx.convert(network(), batches=[IMAGES])
    expected = numbers(low(IMAGES))
    low.save(tmp_path / "low.keras")
    loaded = keras.models.load_model(tmp_path / "low.keras")
    assert [variable.dtype for variable in loaded.weights] == [variable.dtype for variable in low.weights]
    np.testing.assert_array_equal(numbers(loaded(IMAGES))["scores"], expected["scores"])
    low.export(tmp_path / "saved", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "saved")
    np.testing.assert_allclose(numbers(loaded.serve(IMAGES))["scores"], expected["scores"], rtol=2e-3, atol=2e-3)


@keras.saving.register_keras_serializable("ampx_tests")
class Own(keras.Model):
    """A model of a class of its own, with attention and normalization."""

    def __init__(self, width, **options):
        super().__init__(**options)
        self.width = width
        self.attention = keras.layers.MultiHeadAttention(2, width, name="attention")
        self.norm = keras.layers.LayerNormalization(name="norm")
        self.out = keras.layers.Dense(3, name="out")

    def call(self, rows):
        return self.out(self.norm(rows + self.attention(rows, rows)))

    def get_config(self):
        return {**super().get_config(), "width": self.width}


def test_a_model_of_a_class_of_its_own_is_converted(tmp_path):
    keras.utils.set_random_seed(0)
    model, batch = Own(4), np.random.default_rng(1).normal(size=(2, 5, 8)).astype("float32")
    expected = model(batch).numpy()
    low = ampx.convert(model, batches=[batch])
    assert {dtype for path, dtype in dtypes(low).items() if "norm" in path} == {"float32"}
    assert {dtype for path, dtype in dtypes(low).items() if "norm" not in path} == {"float16"}
    np.testing.assert_allclose(low(batch).numpy(), expected, rtol=0.02, atol=0.02)
    low.export(tmp_path / "own", verbose=False)  # its configuration knows nothing of the policies of its layers
    loaded = tf.saved_model.load(tmp_path / "own")
    np.testing.assert_allclose(loaded.serve(batch), low(batch), rtol=2e-3, atol=2e-3)


def test_what_was_made_for_float32_in_mixed_precision_stays_so():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(4, dtype="mixed_float16", name="dense"),
            keras.layers.Activation("softmax", dtype="float32", name="softmax"),
        ]
    )
    low = ampx.convert(model, batches=[np.ones((2, 4), "float32")])
    assert (low.get_layer("dense").dtype_policy.name, low.get_layer("softmax").dtype_policy.name) == (
        "float16",
        "float32",
    )


def test_an_overflow_is_refused_with_its_layer():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="a"), keras.layers.Dense(4, name="b")])
    model.get_layer("b").kernel.assign(tf.eye(4) * 60000)
    model.get_layer("a").kernel.assign(tf.eye(4))
    batch = np.full((2, 4), 3.0, "float32")
    with pytest.raises(ampx.ConversionError, match=r"not finite .*deny=\['module:b'\]"):
        ampx.convert(model, batches=[batch])
    low = ampx.convert(model, batches=[batch], deny=["module:b"])
    np.testing.assert_array_equal(low(batch), model(batch))


class Tied(keras.layers.Layer):
    """Multiplies by a weight of another layer."""

    def __init__(self, other, **options):
        super().__init__(**options)
        self.other = [other.kernel]

    def build(self, shape):
        self.kernel = self.other[0]
        super().build(shape)

    def call(self, x):
        return x @ keras.ops.transpose(self.kernel)


def test_models_that_cannot_be_made_anew_are_refused():
    with pytest.raises(ampx.InvalidOptionError, match="before it has weights"):
        ampx.convert(keras.Sequential([keras.layers.Dense(2)]), batches=[np.ones((1, 2), "float32")])
    with pytest.raises(ampx.InvalidOptionError, match="a model of Keras 3"):
        ampx.convert(keras.layers.Dense(2), batches=[np.ones((1, 2), "float32")])
    half = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, dtype="float16")])
    with pytest.raises(ampx.InvalidOptionError, match="weights in low precision"):
        ampx.convert(half, batches=[np.ones((1, 2), "float32")])
    first = keras.layers.Dense(4)
    first.build((None, 2))
    tied = keras.Sequential([keras.Input((2,)), first, Tied(first)])
    with pytest.raises(ampx.ConversionError, match="share the variable"):
        ampx.convert(tied, batches=[np.ones((1, 2), "float32")])
