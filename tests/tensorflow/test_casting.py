"""Dtype policies: layers made before and after `init`, regions, threads, what stays and what is restored."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import ampx
from ampx_tensorflow import devices
from processes import run_python


def every_kind():
    inputs = keras.Input((6, 6, 2))
    x = keras.layers.Conv2D(3, 3)(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Reshape((16, 3))(x)
    x = keras.layers.MultiHeadAttention(1, 2)(x, x)
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.LSTM(4)(x)
    return keras.Model(inputs, keras.layers.Dense(2, activation="softmax")(x))


X = np.linspace(-1, 1, 72, dtype="float32").reshape(1, 6, 6, 2)


@pytest.mark.parametrize("when", ["before init", "after init"])
def test_layers_of_every_kind_follow_the_regions(when):
    model = every_kind() if when == "before init" else None
    amp = ampx.init("tensorflow", dtype="bfloat16")
    if model is None:
        model = every_kind()
    else:
        assert amp.prepare(model) is model
    assert model(X).dtype == tf.bfloat16
    with ampx.autocast(enabled=False):
        assert model(X).dtype == tf.float32
        with ampx.autocast(dtype="float16"):
            assert model(X).dtype == tf.float16
    assert model(X).dtype == tf.bfloat16
    assert {variable.dtype for variable in model.trainable_variables} == {"float32"}
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.cast(model(X), tf.float32) ** 2)
    assert {grad.dtype for grad in tape.gradient(loss, model.trainable_variables)} == {tf.float32}
    ampx.shutdown()
    assert model(X).dtype == tf.float32


def test_prepare_is_undone_by_shutdown_exactly():
    model = every_kind()
    policies = [layer.dtype_policy for layer in model._flatten_layers()]
    amp = ampx.init("tensorflow", dtype="bfloat16")
    amp.prepare(model)
    assert model(X).dtype == tf.bfloat16
    amp.shutdown()
    after = [layer.dtype_policy for layer in model._flatten_layers()]
    assert all(a is b for a, b in zip(after, policies, strict=True))


def test_prepare_makes_fit_compute_anew():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    ones = np.ones((2, 2), "float32")
    assert model.predict(ones, verbose=0).dtype == "float32"
    ampx.init("tensorflow", dtype="float16").prepare(model)
    assert model.predict(ones, verbose=0).dtype == "float16"


def test_layers_with_a_dtype_of_their_own_keep_it():
    ampx.init("tensorflow", dtype="bfloat16")
    ones = tf.ones((1, 2))
    assert keras.layers.Dense(1, dtype="float32")(ones).dtype == tf.float32
    assert keras.layers.Dense(1, dtype="mixed_float16")(ones).dtype == tf.float16
    low = keras.layers.Dense(1, dtype="float16")
    assert ampx.prepare(low).dtype_policy.name == "float16"


def test_the_policy_of_keras_is_restored_exactly():
    keras.config.set_dtype_policy("mixed_bfloat16")
    mine = keras.config.dtype_policy()
    try:
        amp = ampx.init("tensorflow", dtype="float16")
        assert keras.config.dtype_policy() is not mine
        ampx.init("tensorflow", dtype="bfloat16")
        with ampx.autocast():
            pass
        ampx.shutdown()
        assert keras.config.dtype_policy() is mine
        with pytest.raises(KeyError), amp:
            raise KeyError("body")
        assert keras.config.dtype_policy() is mine
    finally:
        keras.config.set_dtype_policy("float32")


def test_models_are_used_in_threads_and_made_in_those_that_enter():
    """Keras keeps its policy by thread; a model that exists computes the same in all of them."""
    amp = ampx.init("tensorflow", dtype="bfloat16")
    layer, ones, dtypes = keras.layers.Dense(1), tf.ones((1, 2)), {}

    def work():
        dtypes["used"] = layer(ones).dtype
        dtypes["made"] = keras.layers.Dense(1)(ones).dtype
        amp.enter_thread()
        dtypes["made after entering"] = keras.layers.Dense(1)(ones).dtype

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert dtypes == {"used": tf.bfloat16, "made": tf.float32, "made after entering": tf.bfloat16}


def test_annotated_functions_decide_for_layers_inside():
    amp = ampx.init("tensorflow", dtype="bfloat16")
    layer = keras.layers.Dense(1)
    assert amp.float_function(layer)(tf.ones((1, 2), tf.bfloat16)).dtype == tf.float32
    traced = tf.function(amp.float_function(lambda x: layer(x)), autograph=False)
    assert traced(tf.ones((1, 2), tf.bfloat16)).dtype == tf.float32


@pytest.mark.parametrize("engine", ["torch", "jax"])
@pytest.mark.parametrize("how", ["environment", "file"])
def test_keras_on_another_engine_is_refused(engine, how, tmp_path):
    """Before keras is imported, which would import its engine; the message says what to do instead."""
    (tmp_path / "keras.json").write_text(f'{{"backend": "{engine if how == "file" else "tensorflow"}"}}')
    script = """
import ampx
from ampx_tensorflow import devices
try:
    ampx.init("tensorflow")
except ampx.AmpxError as error:
    print(type(error).__name__, error)
"""
    environment = {
        "KERAS_HOME": str(tmp_path),
        "PATH": "",
        **({"KERAS_BACKEND": engine} if how == "environment" else {}),
    }
    # Read before keras is imported, which the script does not do.
    done = run_python("-c", script, read_later=environment, **environment)
    assert done.stdout.startswith("UnsupportedByBackendError"), done.stderr
    assert f"Keras runs on '{engine}'" in done.stdout
    assert "KERAS_BACKEND=tensorflow" in done.stdout
    assert f"framework='{engine}'" in done.stdout


@pytest.mark.parametrize(
    ("onednn", "flags", "limit", "bfloat16"),
    [
        (True, {"avx512f", "avx512_bf16"}, None, "native"),
        (True, {"avx512f", "avx512_bf16"}, "AVX512_CORE", "emulated"),
        (True, {"avx512f", "avx512_bf16"}, "AVX2", "refused"),
        (True, {"avx2"}, "AVX2", "emulated"),
        (False, {"avx512f", "avx512_bf16"}, "AVX2", "emulated"),
        (False, {"avx512f", "avx512_bf16"}, None, "emulated"),
    ],
)
def test_bfloat16_is_native_only_where_onednn_computes_it(monkeypatch, onednn, flags, limit, bfloat16):
    """Native defect: where oneDNN is told to use no AVX-512 on a CPU that has it, TensorFlow ends the process."""
    monkeypatch.setattr(devices._pywrap_util_port, "IsMklEnabled", lambda: onednn)
    monkeypatch.setattr(devices, "cpu_flags", lambda: frozenset(flags))
    for variable in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(variable, raising=False)
    if limit is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    device = devices.describe("cpu")
    assert ("bfloat16" in device.native, "bfloat16" in device.emulated) == (
        bfloat16 == "native",
        bfloat16 == "emulated",
    )
    assert device.preferred == ("bfloat16" if bfloat16 == "native" else None)
    if bfloat16 == "refused":
        with pytest.raises(ampx.UnsupportedDtypeError, match="float16"):
            ampx.init("tensorflow", dtype="bfloat16", device="cpu")


def test_weights_written_between_prepare_and_the_first_step_count():
    """There are no masters that could be older: what `prepare` casts is the computation, and weights are float32."""
    described = devices.describe("cpu")
    computed = sorted(described.native | described.emulated)
    if not computed:
        pytest.skip(f"no low precision here: {described.reason}")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    with ampx.init("tensorflow", dtype=computed[-1], device="cpu", loss_scale=1024.0) as amp:
        amp.prepare(model)
        optimizer = amp.wrap_optimizer(keras.optimizers.SGD(0.5))
        model.set_weights([np.array([[3.0], [5.0]], "float32")])
        with (
            tf.GradientTape() as tape,
            ampx.scale_loss(tf.reduce_sum(model(tf.constant([[1.0, 2.0]]))), optimizer) as scaled,
        ):
            pass
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    assert model.get_weights()[0].ravel().tolist() == [3.0 - 0.5, 5.0 - 1.0]


def test_several_models_are_prepared_at_once_and_what_is_no_model_is_refused():
    models = [keras.Sequential([keras.layers.Dense(2)]), keras.layers.Dense(2)]
    amp = ampx.init("tensorflow", dtype="bfloat16", process_wide=False)
    assert amp.prepare(models) is models
    for wrong in (3, [models[0], "model"]):
        with pytest.raises(ampx.InvalidOptionError, match="as the model; accepted: a model or layer of Keras"):
            amp.prepare(wrong)
    with ampx.autocast():
        assert [model(X[0, :, :, 0]).dtype for model in models] == [tf.bfloat16] * 2
