"""Names that TensorFlow and Keras have no more, after `ampx_tensorflow.install()` and after `uninstall()`."""

import importlib
import math
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ampx
import ampx_tensorflow


@pytest.fixture
def installed():
    ampx_tensorflow.install(dtype="bfloat16", device="cpu")
    yield
    ampx_tensorflow.uninstall()


def names():
    modules = [
        tf,
        tf.train.experimental,
        tf.compat.v1.train.experimental,
        tf.compat.v1.mixed_precision,
        tf.keras.mixed_precision,
        keras.mixed_precision,
        importlib.import_module("tensorflow.keras.mixed_precision"),
    ]
    wanted = "enable_mixed_precision_graph_rewrite", "experimental", "LossScaleOptimizer", "mixed_precision"
    values = [getattr(module, name, None) for module in modules for name in wanted]
    return values, sorted(name for name in sys.modules if name.endswith("mixed_precision.experimental"))


def test_uninstall_leaves_everything_as_it_was():
    before = names()
    ampx_tensorflow.uninstall()
    for _ in range(2):
        ampx_tensorflow.install()
        assert names() != before
    ampx_tensorflow.uninstall()
    assert names() == before


# Keras' own, when it saves with numpy 2.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_saved_optimizer_of_keras_2_style_comes_back(installed, tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    opt = tf.keras.mixed_precision.LossScaleOptimizer(keras.optimizers.Adam(0.25), initial_scale=64.0)
    assert (opt.dynamic, opt.initial_scale, opt.dynamic_growth_steps) == (True, 64.0, 2000)
    model.compile(optimizer=opt, loss="mse")
    x = np.ones((2, 3), "float32")
    x[1] = math.inf
    model.fit(x, np.zeros((2, 1), "float32"), batch_size=1, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras").optimizer
    assert type(loaded) is tf.keras.mixed_precision.LossScaleOptimizer
    assert (loaded.loss_scale, loaded.initial_scale, int(loaded.iterations)) == (32.0, 64.0, 1)


def test_the_experimental_module_of_keras_2(installed):
    experimental = importlib.import_module("tensorflow.keras.mixed_precision.experimental")
    assert tf.keras.mixed_precision.experimental is experimental
    before = keras.config.dtype_policy()
    try:
        experimental.set_policy(experimental.Policy("mixed_bfloat16"))
        assert experimental.global_policy().name == "mixed_bfloat16"
        assert experimental.get_layer_policy(keras.layers.Dense(1)).compute_dtype == "bfloat16"
    finally:
        keras.config.set_dtype_policy(before)
    fixed = experimental.LossScaleOptimizer(keras.optimizers.SGD(), 16)
    assert (fixed.loss_scale, fixed.dynamic, fixed.dynamic_growth_steps) == (16.0, False, None)
    grown = experimental.LossScaleOptimizer(
        keras.optimizers.SGD(), tf.mixed_precision.experimental.DynamicLossScale(8.0, 5, 4.0)
    )
    assert (grown.loss_scale, grown.dynamic_growth_steps) == (8.0, 5)
    with pytest.raises(ampx.InvalidOptionError, match="no loss scale any more"):
        experimental.Policy("mixed_float16", loss_scale=8)


def test_contradictory_arguments_are_refused(installed):
    scaling = tf.keras.mixed_precision.LossScaleOptimizer
    for options in ({"dynamic": False}, {"dynamic": False, "initial_scale": 2.0, "dynamic_growth_steps": 3}):
        with pytest.raises(ampx.InvalidOptionError, match="static scale"):
            scaling(keras.optimizers.SGD(), **options)
    with pytest.raises(ampx.InvalidOptionError, match="scales the loss itself"):
        scaling(scaling(keras.optimizers.SGD()))


def test_the_loss_scale_of_keras_2_is_a_tensor(installed):
    """Scripts log `opt.loss_scale.numpy()`."""
    opt = tf.keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=64.0)
    assert (opt.loss_scale.numpy(), int(opt.dynamic_counter)) == (64.0, 0)


def test_configurations_of_keras_2_and_3_are_read(installed):
    scaling = tf.keras.mixed_precision.LossScaleOptimizer
    theirs = keras.src.optimizers.loss_scale_optimizer.LossScaleOptimizer(
        keras.optimizers.SGD(0.25), initial_scale=8.0, dynamic_growth_steps=7
    )
    of_keras_2 = tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD(0.25), False, 8.0)
    for config, dynamic in ((theirs.get_config(), True), (of_keras_2.get_config(), False)):
        ours = scaling.from_config(config)
        assert (ours.dynamic, ours.loss_scale, float(ours.learning_rate)) == (dynamic, 8.0, 0.25)
        assert ours.dynamic_growth_steps == (7 if dynamic else None)
    with pytest.raises(ampx.InvalidOptionError, match="inner_optimizer"):
        scaling.from_config({"initial_scale": 8.0})


def test_what_is_the_inner_optimizers_is_refused_by_name(installed):
    scaling = tf.keras.mixed_precision.LossScaleOptimizer
    with pytest.raises(ampx.InvalidOptionError, match=r"got clipnorm.*inner optimizer"):
        scaling(keras.optimizers.SGD(), clipnorm=1.0)
    assert scaling(keras.optimizers.SGD(clipnorm=1.0), clipnorm=None).inner_optimizer.clipnorm == 1.0
