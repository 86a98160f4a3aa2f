"""What one training step costs through ampx in Keras 3 on TensorFlow, against Keras' own LossScaleOptimizer.

A custom loop in a `tf.function`, with and without `jit_compile`, and `fit`. Both sides scale the loss dynamically: in
float32, where only the scaling differs, and in bfloat16, where the layers cast as well. The losses of both sides are
compared first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from _paired import limited, paired

import ampx

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)

Layers = list[keras.Layer]


def _mlp(*units: int) -> Callable[[], Layers]:
    return lambda: [*(keras.layers.Dense(each, "relu") for each in units), keras.layers.Dense(10)]


def _cnn() -> Layers:
    layers: Layers = []
    for filters in (32, 64, 128):
        layers += [
            keras.layers.Conv2D(filters, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
        ]
    return [*layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]


def _embeddings() -> Layers:
    tables = keras.layers.Embedding(100_000, 32)
    return [tables, keras.layers.Flatten(), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]


WORKLOADS: dict[str, tuple[Callable[[], Layers], tuple[int, ...], str, int]] = {
    # name: layers, input shape (integers where the first layer is a table), optimizer, pairs
    "MLP 32-64-64-10, batch 32, SGD": (_mlp(64, 64), (32, 32), "SGD", 200),
    "MLP 40 layers of 64, batch 64, Adam": (_mlp(*[64] * 40), (64, 64), "Adam", 80),
    "MLP 1024-4096-1024-10, batch 256, Adam": (_mlp(4096, 1024), (256, 1024), "Adam", 16),
    "CNN 32x32, batch 16, SGD": (_cnn, (16, 32, 32, 3), "SGD", 40),
    "embeddings 100,000 x 32, sparse, batch 256, SGD": (_embeddings, (256, 2), "SGD", 60),
}
WAYS = ("tf.function", "jit_compile", "fit")


def measure(workload: str, way: str, dtype: str, quick: bool) -> dict[str, object]:
    """Time one workload through ampx and natively.

    Raises:
        AssertionError: They do not train alike, so that a ratio would mean nothing.
    """
    make, _, optimizer, pairs = WORKLOADS[workload]
    data = batch_of(workload)
    native_policy = "float32" if dtype == "float32" else f"mixed_{dtype}"
    level = "O0" if dtype == "float32" else "O1"

    keras.config.set_dtype_policy(native_policy)
    theirs = _built(make, data[0])
    native = keras.optimizers.LossScaleOptimizer(_raw(optimizer), initial_scale=2.0**16)
    native_step = _step(way, theirs, native, native.scale_loss, data)
    keras.config.set_dtype_policy("float32")

    with ampx.init("tensorflow", device="cpu", dtype=dtype, level=level, loss_scale="dynamic") as amp:
        ours = _built(make, data[0])
        ours.set_weights(theirs.get_weights())
        opt = amp.wrap_optimizer(_raw(optimizer))
        our_step = _step(way, ours, opt, opt.scale_loss, data)
        mine = [float(our_step()) for _ in range(3)]
        other = [float(native_step()) for _ in range(3)]
        # The same operations on the same numbers; a scale that is a power of two changes no bit that is not lost.
        epsilon = 2.0**-7 if dtype == "bfloat16" else 2.0**-20
        assert all(abs(a - b) <= epsilon * abs(b) for a, b in zip(mine, other, strict=True)), (mine, other)
        ratio = paired(our_step, native_step, pairs=max(pairs // (8 if quick else 1), 8), warmup=3)
    facts = {"against": f"Keras' LossScaleOptimizer, {way}", "workload": workload, "dtype": dtype}
    return {**facts, **ratio.to_json()}


def batch_of(workload: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Return inputs of a workload, and labels."""
    _, shape, *_ = WORKLOADS[workload]
    generator = np.random.default_rng(0)
    integers = "embeddings" in workload
    x = generator.integers(0, 100_000, shape) if integers else generator.standard_normal(shape, np.float32)
    return tf.constant(x), tf.constant(generator.integers(0, 10, shape[0]))


def _built(make: Callable[[], Layers], x: tf.Tensor) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input(x.shape[1:], dtype=x.dtype.name), *make()])
    model(x)
    return model


def _raw(name: str) -> keras.optimizers.Optimizer:
    return keras.optimizers.get({"class_name": name, "config": {"learning_rate": 1e-3}})


def _loss(y: Any, logits: Any) -> Any:
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(y, "int64"), tf.cast(logits, "float32"))
    return tf.reduce_mean(losses)


def _step(
    way: str, model: keras.Model, opt: Any, scale: Callable[[Any], Any], data: tuple[Any, Any]
) -> Callable[[], Any]:
    if way == "fit":
        model.compile(optimizer=opt, loss=_loss, auto_scale_loss=False)
        return lambda: model.train_on_batch(*data)
    variables = model.trainable_variables
    opt.build(variables)

    @tf.function(jit_compile=way == "jit_compile")
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = _loss(y, model(x, training=True))
            scaled = scale(loss)
        opt.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))
        return loss

    return lambda: step(*data)


STEPS = 2 * len(WAYS) * len(WORKLOADS)
"""How often `run` advances."""


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Measure every workload in every way; quickly, the two smallest in float32."""
    rows = []
    for dtype in ("float32",) if quick else ("float32", "bfloat16"):
        for way in WAYS:
            for workload in limited(list(WORKLOADS)[: 2 if quick else None]):
                rows.append(measure(workload, way, dtype, quick))
                advance()
    return rows


if __name__ == "__main__":
    import sys

    for row in run("--quick" in sys.argv):
        times = f"ampx {row['median_a'] * 1e6:8.0f} us  Keras {row['median_b'] * 1e6:8.0f} us"
        spread = f"[{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"
        print(
            f"{row['against']:40} {row['workload']:48} {row['dtype']} {times} {row['ratio']:.3f} {spread}", flush=True
        )
