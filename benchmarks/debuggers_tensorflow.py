"""Planted faults in TensorFlow: ampx and `tf.debugging.enable_check_numerics`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from _paired import limited
from debuggers import Fault, Said, Tool, compared, heard, planted, written

from ampx.numerics.batch import Batch

PLANTED = planted("tensorflow")
# The tests leave open where these are named; they enter here.
ENTERS = {"data": ("first",), "weights": ("last",), "learning rate": ("last",)}


def _code(model: Any, names: tuple[str, ...]) -> list[Any]:
    layers = [layer for layer in model._flatten_layers() if layer.name in names and isinstance(layer, PLANTED.Doing)]
    return [function for layer in layers for function in written(layer.function)]


def _fault(name: str) -> Fault:
    make, inputs, module, kind, direction = PLANTED.FAULTS[name]
    modules = ENTERS[kind] if module is None else (module,)
    return Fault(
        name,
        lambda: (make(), PLANTED.loss_of(inputs)),
        kind,
        modules,
        direction,
        lambda model: _code(model, modules),
    )


@contextlib.contextmanager
def _checked(_: Any = None) -> Iterator[None]:
    tf.debugging.enable_check_numerics()
    try:
        yield
    finally:
        tf.debugging.disable_check_numerics()


def _by_check_numerics(model: Any, step: Callable[[Any], Any], dtype: str, scale: float) -> Said:
    batch = Batch(step, model, "tensorflow", "cpu")
    casting = batch.casting(dtype)
    with _checked():
        said = heard(lambda: batch.run(casting, scale))
    return said if said.trace else Said("")


TOOLS = (Tool("tf.debugging.enable_check_numerics", _by_check_numerics, _checked),)


def _timed() -> tuple[Any, Callable[[Any], Any], Callable[[], object]]:
    keras.utils.set_random_seed(0)
    generator = np.random.default_rng(0)
    inputs = tf.constant(generator.standard_normal((256, 1024), np.float32))
    labels = tf.constant(generator.integers(0, 10, 256))
    model = keras.Sequential([keras.Input((1024,)), *(keras.layers.Dense(1024, "relu") for _ in range(4))])
    optimizer = keras.optimizers.SGD(1e-3)
    optimizer.build(model.trainable_variables)

    def step(model: Any) -> Any:
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(inputs)[:, :10]))

    def train() -> None:
        with tf.GradientTape() as tape:
            loss = step(model)
        optimizer.apply(tape.gradient(loss, model.trainable_variables))

    return model, step, train


STEPS = len(PLANTED.FAULTS) + 3 + len(TOOLS)
"""How often `run` advances."""


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Try the tools on all faults, and time them."""
    faults = [_fault(name) for name in limited(PLANTED.FAULTS)]
    clean = [lambda make=make: (make(), PLANTED.loss_of(PLANTED.X)) for make in limited(PLANTED.CLEAN.values())]
    return compared("tensorflow", faults, clean, TOOLS, _timed, 8 if quick else 24, advance)
