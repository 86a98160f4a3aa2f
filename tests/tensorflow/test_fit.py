"""`compile` and `fit` with a wrapped optimizer; saving, loading, checkpoints."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.trainer import Trainer

import ampx
from processes import run_python

# Keras' own, when it saves with numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
OPTIONS = {
    "function": {},
    "compiled": {"jit_compile": True},
    "eager": {"run_eagerly": True},
    "several steps": {"steps_per_execution": 2},
}
X, Y = np.linspace(-1, 1, 24, dtype="float32").reshape(8, 3), np.ones((8, 1), "float32")


def make(opt=None, **options):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1, dtype="float32")]
    model = keras.Sequential([keras.Input((3,)), *layers])
    if opt is not None:
        model.compile(opt, "mse", **options)
    return model


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_fit_equals_plain_fit_where_only_the_scale_is_active(amp, options):
    opt = amp.wrap_optimizer(keras.optimizers.Adam(0.1), loss_scale=ampx.LossScale(growth_interval=3))
    model, plain = make(opt, **options), make(keras.optimizers.Adam(0.1), **options)
    assert model.optimizer is opt
    for network in (model, plain):
        network.fit(X, Y, batch_size=2, epochs=2, verbose=0, shuffle=False)
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        if options.get("jit_compile"):
            # XLA orders the sums of the two programs differently: a few roundings of float32 a step, eight steps.
            np.testing.assert_allclose(a, b, rtol=0, atol=64 * 2.0**-23)
        else:
            np.testing.assert_array_equal(a, b)
    assert (int(opt.iterations), opt.loss_scale) == (8, 2.0**18)


class OwnStep(keras.Sequential):
    """A user's `train_step` with the method of Keras's optimizers; `way` says what it differentiates."""

    way = "scaled"

    def train_step(self, data):
        x, y = data
        scale = self.optimizer.scale_loss
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            if self.way == "scaled twice":
                with ampx.scale_loss(loss, self.optimizer) as loss:
                    pass
            scaled = loss if self.way == "scaled outside" else scale(loss)
        if self.way == "scaled outside":
            scale(loss)
        gradients = tape.gradient(scaled if self.way == "scaled" else loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def own_step(opt, way, options):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1, dtype="float32")]
    model = OwnStep([keras.Input((3,)), *layers])
    model.way = way
    model.compile(opt, "mse", **options)
    return model


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}], ids=["function", "eager"])
def test_a_train_step_that_calls_scale_loss_of_keras_equals_plain_fit(amp, options):
    model, plain = (
        own_step(amp.wrap_optimizer(keras.optimizers.SGD(0.1)), "scaled", options),
        make(keras.optimizers.SGD(0.1), **options),
    )
    for network in (model, plain):
        network.fit(X, Y, batch_size=4, verbose=0, shuffle=False)
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("the loss itself", {}),
        ("the loss itself", {"run_eagerly": True}),
        ("scaled outside", {}),
        ("scaled twice", {}),
        ("scaled twice", {"run_eagerly": True}),
    ],
)
def test_a_train_step_that_scales_the_loss_wrongly_is_refused(amp, way, options):
    """Without that its updates are 65,536 times too small or too large, and nothing says so."""
    model = own_step(amp.wrap_optimizer(keras.optimizers.SGD(0.1)), way, options)
    before = model.get_weights()
    with pytest.raises(ampx.AlreadyScaledError if way == "scaled twice" else ampx.NotScaledError):
        model.fit(X, Y, batch_size=4, verbose=0)
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_fit_skips_overflows_and_goes_on(amp, options):
    """Two of four batches hold inf: two steps are skipped, the weights stay finite, the scale is halved twice."""
    seen = []
    amp.on_event(seen.append)
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.1))
    model = make(opt, **options)
    x = X.copy()
    x[2] = x[7] = np.inf
    model.fit(x, Y, batch_size=2, verbose=0, shuffle=False)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert (int(opt.iterations), opt.loss_scale) == (2, 2.0**14)
    assert opt.last_step == ampx.StepResult(False, False, 2.0**15, 2.0**14, 1)
    assert [event.step for event in seen if isinstance(event, ampx.StepSkipped)] == [2, 4]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fit_trains_in_low_precision(dtype):
    amp = ampx.init("tensorflow", dtype=dtype)
    opt = amp.wrap_optimizer(keras.optimizers.SGD(0.1))
    model = make(opt)
    assert [layer.compute_dtype for layer in model.layers] == [dtype, "float32"]
    assert {variable.dtype for variable in model.trainable_variables} == {"float32"}
    history = model.fit(X, Y, epochs=20, verbose=0)
    assert history.history["loss"][-1] < 0.2 * history.history["loss"][0]
    assert opt.loss_scale == (2.0**16 if dtype == "float16" else 1.0)


class Added(keras.layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.sum(x))
        return x


@pytest.mark.parametrize("options", [{}, {"jit_compile": True}, {"run_eagerly": True}], ids=str)
def test_what_layers_in_low_precision_add_to_the_loss_is_added(options):
    """Keras itself cannot add it: it is in the layer's dtype, and the loss in float32."""
    added = Trainer._aggregate_additional_loss
    amp = ampx.init("tensorflow", dtype="float16", device="cpu")
    penalty = keras.regularizers.L1(0.5)
    layers = [
        keras.layers.Dense(2, kernel_initializer="ones", activity_regularizer=penalty),
        Added(),
        keras.layers.Dense(1, kernel_initializer="zeros", dtype="float32"),
    ]
    model = keras.Sequential([keras.Input((64,)), *layers])
    model.compile(amp.wrap_optimizer(keras.optimizers.SGD(0.0)), "mse", **options)
    history = model.fit(np.ones((2, 64), "float32"), np.zeros((2, 1), "float32"), verbose=0)
    # Of two rows: half the mean of the sums of two outputs, each 64; and the sum of all four.
    assert history.history["loss"] == [0.5 * 2 * 64 + 4 * 64]
    amp.shutdown()
    assert Trainer._aggregate_additional_loss is added


def test_callbacks_see_the_steps_and_set_the_learning_rate(amp):
    opt, results = amp.wrap_optimizer(keras.optimizers.SGD(0.1)), []
    look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: results.append(amp.observe(opt)))
    x = X.copy()
    x[2] = np.inf
    reduce = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    make(opt).fit(x, Y, batch_size=2, epochs=1, verbose=0, shuffle=False, callbacks=[look, reduce])
    assert [result.applied for result in results] == [True, False, True, True]
    assert float(opt.learning_rate) == pytest.approx(0.05)


def trained(amp, **options):
    opt = amp.wrap_optimizer(
        keras.optimizers.Adam(0.1), loss_scale=ampx.LossScale(init_scale=64.0, growth_interval=3, hysteresis=2)
    )
    model = make(opt)
    model.fit(X, Y, batch_size=2, verbose=0, **options)
    return model, opt


def test_a_saved_model_goes_on_where_it_stopped(amp, tmp_path):
    model, opt = trained(amp)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is type(opt)
    assert amp.state_dict(loaded.optimizer)["groups"] == amp.state_dict(opt)["groups"]
    assert loaded.optimizer.loss_scale == 128.0
    for network in (model, loaded):
        network.fit(X, Y, batch_size=2, verbose=0, shuffle=False)
    for a, b in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert amp.state_dict(loaded.optimizer)["groups"] == amp.state_dict(opt)["groups"]


def test_loading_sends_no_events_of_the_saved_run(amp, tmp_path):
    model, _ = trained(amp)
    model.save(tmp_path / "model.keras")
    seen = []
    amp.on_event(seen.append)
    assert keras.models.load_model(tmp_path / "model.keras").optimizer.loss_scale == 128.0
    assert seen == []


def test_weights_and_checkpoints_hold_the_loss_scale(amp, tmp_path):
    model, opt = trained(amp)
    path = tf.train.Checkpoint(model=model, opt=opt).save(str(tmp_path / "checkpoint"))
    other = amp.wrap_optimizer(keras.optimizers.Adam(0.1), loss_scale=ampx.LossScale(growth_interval=3, hysteresis=2))
    fresh = make(other)
    other.build(fresh.trainable_variables)
    tf.train.Checkpoint(model=fresh, opt=other).restore(path).assert_existing_objects_matched()
    assert amp.state_dict(other)["groups"][0]["losses"] == amp.state_dict(opt)["groups"][0]["losses"]
    assert int(other.iterations) == 4
    model.save_weights(tmp_path / "w.weights.h5")
    third = amp.wrap_optimizer(keras.optimizers.Adam(0.1))
    third_model = make(third)
    third.build(third_model.trainable_variables)  # as for any Keras optimizer
    third_model.load_weights(tmp_path / "w.weights.h5")
    np.testing.assert_array_equal(third_model.get_weights()[0], model.get_weights()[0])
    assert third.loss_scale == 128.0


def test_a_saved_model_needs_no_ampx_but_for_its_optimizer(tmp_path):
    amp = ampx.init("tensorflow", dtype="bfloat16")
    model, _ = trained(amp)
    model.save(tmp_path / "model.keras")
    script = f"""
import sys, keras, numpy as np
sys.modules["ampx"] = None
m = keras.models.load_model({str(tmp_path / "model.keras")!r}, compile=False)
print(m.layers[0].dtype_policy.name, m.layers[0].compute_dtype, m(np.ones((1, 3), "float32")).dtype.name)
"""
    done = run_python("-c", script)
    assert done.stdout.split() == ["mixed_bfloat16", "bfloat16", "float32"], done.stderr


def test_states_load_before_and_after_the_first_step(amp):
    state = {**amp.state_dict(trained(amp)[1])}
    early = amp.wrap_optimizer(keras.optimizers.Adam(0.1))
    model = make(early)
    amp.load_state_dict(state, early)
    assert early.loss_scale == 128.0
    model.fit(X, Y, batch_size=2, verbose=0)
    amp.load_state_dict(state, early)
    assert amp.state_dict(early)["groups"] == state["groups"]
    model.fit(X, Y, batch_size=2, verbose=0)
    assert early.loss_scale == 256.0


def test_wrapping_a_built_optimizer_keeps_its_slots(amp):
    raw = keras.optimizers.Adam(0.1)
    model = make(raw)
    model.fit(X, Y, verbose=0)
    slots = [variable.numpy().tolist() for variable in raw.variables]
    opt = amp.wrap_optimizer(raw)
    model.compile(opt, "mse")
    assert [variable.numpy().tolist() for variable in raw.variables] == slots
    model.fit(X, Y, verbose=0)
    assert int(opt.iterations) == 2


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda copied: pickle.loads(pickle.dumps(copied))], ids=["deepcopy", "pickle"]
)
def test_copies_have_a_loss_scale_of_their_own(amp, how):
    variable, other = tf.Variable([1.0]), tf.Variable([1.0])
    opt = amp.wrap_optimizer(keras.optimizers.SGD(1.0), loss_scale=ampx.LossScale(init_scale=8.0, growth_interval=1))
    opt.scale_loss(tf.constant(1.0))
    opt.apply([tf.constant([8.0])], [variable])
    copied = how(opt)
    assert copied.loss_scale == 16.0
    copied.scale_loss(tf.constant(1.0))
    copied.apply([tf.constant([np.inf])], [other] if not copied.built else None)
    assert (opt.loss_scale, copied.loss_scale) == (16.0, 8.0)
    assert variable.numpy().tolist() == [0.0]
