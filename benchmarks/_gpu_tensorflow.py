"""TensorFlow's checks, and what TensorFlow knows about the machine."""

from __future__ import annotations

import math
import time
from typing import Any, Final

import keras
import tensorflow as tf
from _gpu_checks import Check, Figure, NotHere, Setup, require

import ampx

# native-facts: 1 is an overflow; scales after each step, from 2**16 with a growth interval of 3.
PATTERN: Final = (0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0)
REFERENCE: Final = [2.0**power for power in (16, 16, 17, 16, 16, 16, 15, 14, 14, 14, 15, 15, 15, 16)]
OPTIMIZERS: Final = ("SGD", "Adam", "AdamW", "Lamb", "RMSprop")


def has(device: str) -> bool:
    """Return whether TensorFlow offers the device here."""
    return device == "cpu" or bool(tf.config.list_physical_devices("GPU"))


def describe(device: str) -> dict[str, Any]:
    """Return versions, and for a GPU its name and compute capability."""
    kind = _kind(device)
    device = ampx.init("tensorflow", level="O0", device=kind).backend.device(kind)
    return {**device.details, "keras": keras.__version__}


def scale_trace_is_the_reference_and_skips_change_nothing(setup: Setup) -> Figure:
    """Every optimizer, in tf.function with and without XLA: the specified trace, same bits after a skip."""
    for name in OPTIMIZERS:
        for compiled in (False, True):
            with _session(setup, level="O0", loss_scale=ampx.LossScale(growth_interval=3)) as amp:
                model = _model()
                opt = amp.wrap_optimizer(getattr(keras.optimizers, name)(0.01))
                opt.build(model.trainable_variables)
                step, trace = _step(model, opt, jit_compile=compiled), []
                for overflow in PATTERN:
                    before = _bits(model, opt)
                    step(tf.constant(math.inf if overflow else 1.0))
                    trace.append(opt.loss_scale)
                    same = before == _bits(model, opt)
                    require(same == bool(overflow), f"{name}: overflow {overflow}, unchanged {same}")
                require(trace == REFERENCE, f"{name}, jit_compile={compiled}: {trace}, not {REFERENCE}")
    return Figure(f"{len(OPTIMIZERS)} optimizers, with and without XLA", {"tried": list(OPTIMIZERS)})


def layers_cast_and_train(setup: Setup) -> Figure:
    """Layers compute in the dtype, their variables stay float32, and the loss falls in a loop and in fit."""
    losses = {}
    for dtype in ("float16", "bfloat16") if setup.on_gpu else ("bfloat16",):
        with _session(setup, dtype=dtype, loss_scale="dynamic") as amp:
            model = _model()
            require(model.layers[0](tf.ones([2, 16])).dtype.name == dtype, f"a Dense layer was not cast to {dtype}")
            require(model.layers[0].kernel.dtype == "float32", f"{dtype}: the variables were cast")
            opt = amp.wrap_optimizer(keras.optimizers.Adam(0.01))
            step = _step(model, opt)
            seen = [float(step(tf.constant(1.0))) for _ in range(30)]
            require(seen[-1] < 0.5 * seen[0], f"{dtype}: the loss went from {seen[0]} to {seen[-1]}")
            model.compile(optimizer=amp.wrap_optimizer(keras.optimizers.Adam(0.01)), loss="mse")
            history = model.fit(tf.ones([64, 16]), tf.zeros([64, 4]), epochs=5, batch_size=16, verbose=0)
            require(history.history["loss"][-1] < history.history["loss"][0], f"{dtype}: fit did not train")
            losses[dtype] = seen[-1]
    return Figure(", ".join(f"{dtype} {loss:.4f}" for dtype, loss in losses.items()), losses)


def a_float16_overflow_is_skipped_and_cured(setup: Setup) -> Figure:
    """A scale that overflows float16 gradients comes down until the steps apply; the weights stay finite."""
    _needs_gpu(setup)
    with _session(setup, dtype="float16", loss_scale=ampx.LossScale(init_scale=2.0**24)) as amp:
        model = _model()
        opt = amp.wrap_optimizer(keras.optimizers.SGD(0.01))
        step, applied = _step(model, opt), []
        for _ in range(24):
            step(tf.constant(1.0))
            applied.append(opt.last_step.applied)
        require(not applied[0] and applied[-1], f"applied: {applied}")
        require(
            all(bool(tf.reduce_all(tf.math.is_finite(weight))) for weight in model.weights), "weights are not finite"
        )
    return Figure(f"{applied.count(False)} skipped", {"final_scale": opt.loss_scale})


def plain_functions_are_rewritten(setup: Setup) -> Figure:
    """TensorFlow's graph rewriter casts a prepared tf.function, on the GPU in float16."""
    dtype = "float16" if setup.on_gpu else "bfloat16"
    values = tf.fill([64, 64], 1.0 + 2.0**-13)  # both dtypes round it to 1
    with _session(setup, dtype=dtype) as amp:
        plain = tf.function(lambda a: tf.matmul(tf.nn.relu(a), tf.eye(64)) + 0.0)
        try:
            prepared = amp.prepare(plain)
        except ampx.UnsupportedByBackendError as error:
            if setup.on_gpu:
                raise
            raise NotHere(str(error)) from None
        outputs = float(prepared(values)[0, 0]), float(plain(values)[0, 0])
        require(outputs[0] == 1.0, f"{dtype}: the prepared function gave {outputs[0]}")
    return Figure(f"{outputs[0]} in {dtype}, {outputs[1]} without", {"rewritten": outputs[0], "plain": outputs[1]})


def float16_is_faster_than_float32(setup: Setup) -> Figure:
    """A step of large Dense layers, float32 without TF32 against float16."""
    _needs_gpu(setup)
    size, times = (256 if setup.quick else 4096), {}
    allowed = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        for dtype in ("float32", "float16"):
            with _session(setup, dtype=dtype, loss_scale="dynamic") as amp:
                model = keras.Sequential([keras.Input((size,)), *(keras.layers.Dense(size) for _ in range(4))])
                opt = amp.wrap_optimizer(keras.optimizers.SGD(1e-6))
                step = _step(model, opt, rows=size)
                for _ in range(3):
                    step(tf.constant(1.0)).numpy()
                start = time.perf_counter()
                for _ in range(10):
                    loss = step(tf.constant(1.0))
                loss.numpy()
                times[dtype] = (time.perf_counter() - start) / 10
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(allowed)
    ratio = times["float32"] / times["float16"]
    require(setup.quick or ratio > 1, f"float16 took {times['float16']}s a step, float32 {times['float32']}s")
    return Figure(f"{ratio:.2f} times as fast", times)


CHECKS: Final[tuple[Check, ...]] = (
    scale_trace_is_the_reference_and_skips_change_nothing,
    layers_cast_and_train,
    a_float16_overflow_is_skipped_and_cured,
    plain_functions_are_rewritten,
    float16_is_faster_than_float32,
)
# Those that are larger in full runs, in the order in which time is spent on them.
MEASURED: Final[tuple[Check, ...]] = (float16_is_faster_than_float32,)
# What a pass on a GPU shows in the table of what is covered.
COVERS: Final = {
    "scale_trace_is_the_reference_and_skips_change_nothing": ("gpu/float32/O0/scaling",),
    "layers_cast_and_train": ("gpu/float16/O1/casting", "gpu/bfloat16/O1/casting"),
    "a_float16_overflow_is_skipped_and_cured": ("gpu/float16/O1/scaling",),
}


def _kind(device: str) -> str:
    return "cpu" if device == "cpu" else "gpu"


def _session(setup: Setup, **options: Any) -> ampx.Amp:
    keras.utils.set_random_seed(0)
    return ampx.init("tensorflow", device=_kind(setup.device), nan_loss="skip", **options)


def _needs_gpu(setup: Setup) -> None:
    if not setup.on_gpu:
        raise NotHere("float16 is emulated on a CPU")


def _model() -> keras.Model:
    return keras.Sequential([keras.Input((16,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(4)])


def _step(model: keras.Model, opt: Any, *, rows: int = 8, jit_compile: bool = False) -> Any:
    @tf.function(jit_compile=jit_compile)
    def step(factor: Any) -> Any:
        with tf.GradientTape() as tape:
            output = tf.cast(model(tf.ones([rows, model.input_shape[1]]), training=True), tf.float32)
            loss = tf.reduce_mean(tf.square(output - 1.0))
            with ampx.scale_loss(loss * factor, opt) as scaled:
                pass
        gradients = tape.gradient(scaled, model.trainable_variables)
        opt.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def _bits(model: keras.Model, opt: Any) -> list[bytes]:
    return [variable.numpy().tobytes() for variable in (*model.variables, *opt.inner_optimizer.variables)]
