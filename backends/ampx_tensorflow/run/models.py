"""`ampx run` of models that Keras compiles and trains by itself: their layers cast, but for those of the outputs."""

from __future__ import annotations

from typing import Any

import keras
from keras.src.models import Functional

from ampx.backend import CastPlan
from ampx.run import Run
from ampx_tensorflow import casting


def outputs(model: Any) -> list[Any] | None:
    """Return the layers that make a model's outputs; None where that is not known, or the model trains by itself."""
    methods = ("train_step", "test_step", "predict_step", "compute_loss", "call")
    stock = keras.Sequential if isinstance(model, keras.Sequential) else Functional
    if not isinstance(model, stock) or any(getattr(type(model), one) is not getattr(stock, one) for one in methods):
        return None
    if not model.built:
        return [model.layers[-1]] if model.layers else None
    made = [tensor._keras_history.operation for tensor in keras.tree.flatten(model.outputs)]
    return made if all(isinstance(one, keras.layers.Layer) for one in made) else None


def prepare(model: Any, plan: CastPlan, kept: list[Any]) -> None:
    """Let the layers of a model cast, but for some, which the script reads."""
    exact = {id(layer) for one in kept for layer in one._flatten_layers()}
    before = {id(layer): layer.dtype_policy for layer in model._flatten_layers()}
    casting.prepare(model, plan)
    for layer in model._flatten_layers():
        if id(layer) in exact and layer is not model:
            layer.dtype_policy = before[id(layer)]


def count_layers(run: Run, model: Any) -> None:
    """Count in the recorder what layers compute in."""
    for layer in model._flatten_layers(include_self=False, recursive=True):
        if not isinstance(layer, (keras.Model, keras.layers.InputLayer)):
            run.recorder.count_op(type(layer).__name__, layer.compute_dtype)


def lines(run: Run) -> tuple[str, ...]:
    """Return the lines of code that do the same by hand."""
    dtype = None if run.amp is None else run.amp.effective.dtype
    return (
        f"ampx.init('tensorflow', dtype={dtype or 'float32'!r})  # before the model is made",
        "optimizer = ampx.wrap_optimizer(optimizer)",
        "model.compile(optimizer=optimizer, loss=loss)  # the last layer with dtype='float32'",
    )
