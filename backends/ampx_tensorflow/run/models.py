"""Models that Keras compiles and trains by itself: their layers cast, but for those of the outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import keras
from keras.src.legacy.saving import legacy_h5_format, saving_utils
from keras.src.models import Functional
from keras.src.trainers.trainer import Trainer

from ampx.backend import CastPlan
from ampx.modules import forced_dtype
from ampx.optimizer import WrappedOptimizer
from ampx.run import Run
from ampx_tensorflow import casting
from ampx_tensorflow.keras3 import AmpOptimizer
from ampx_tensorflow.names import walk

from .manager import KerasManager, environment_wants_graphs


@contextmanager
def models_cast(manager: KerasManager) -> Iterator[None]:
    """Patch how Keras compiles and trains models."""
    with (
        mock.patch.object(Trainer, "compile", _compiling(manager, Trainer.compile)),
        mock.patch.object(keras.Model, "fit", _training(manager, keras.Model.fit, counts=True)),
        mock.patch.object(keras.Model, "train_on_batch", _training(manager, keras.Model.train_on_batch, counts=False)),
        _files_of_the_script(manager),
    ):
        yield


@contextmanager
def _files_of_the_script(manager: KerasManager) -> Iterator[None]:
    """Patch what Keras writes into files of models, and reads: the optimizer that the script made, as without ampx."""
    base = keras.optimizers.Optimizer
    describe, save, load, load_raw = (
        Trainer.get_compile_config,
        AmpOptimizer.save_own_variables,
        AmpOptimizer.load_own_variables,
        base.load_own_variables,
    )
    describe_hdf5, save_hdf5 = saving_utils.model_metadata, legacy_h5_format.save_optimizer_weights_to_hdf5_group

    def stands_beside(optimizer: Any) -> bool:
        return isinstance(optimizer, AmpOptimizer) and manager.find(optimizer.inner_optimizer) is not None

    def get_compile_config(self: Any) -> dict[str, Any]:
        config: dict[str, Any] = describe(self)
        if config and stands_beside(self.optimizer):
            config["optimizer"] = keras.saving.serialize_keras_object(self.optimizer.inner_optimizer)
        return config

    def save_own_variables(self: Any, store: Any) -> None:
        if stands_beside(self):
            self.inner_optimizer.save_own_variables(store)
        else:
            save(self, store)

    def load_own_variables(self: Any, store: Any) -> None:
        if stands_beside(self) and len(store.keys()) == len(self.inner_optimizer.variables):
            load_raw(self.inner_optimizer, store)
        else:
            load(self, store)

    def load_inner(self: Any, store: Any) -> None:
        if store.keys() or manager.find(self) is None:  # what a wrapper holds has nothing of its own in such a file
            load_raw(self, store)

    # Files of the format HDF5 are written otherwise.

    def model_metadata(model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        metadata: dict[str, Any] = describe_hdf5(model, *args, **kwargs)
        if "training_config" in metadata and stands_beside(model.optimizer):
            raw = model.optimizer.inner_optimizer
            described = {"class_name": keras.saving.get_registered_name(type(raw)), "config": raw.get_config()}
            metadata["training_config"]["optimizer_config"] = described
        return metadata

    def save_optimizer_weights(group: Any, optimizer: Any) -> None:
        save_hdf5(group, optimizer.inner_optimizer if stands_beside(optimizer) else optimizer)

    def set_weights(self: Any, weights: Any) -> None:
        base.set_weights(self.inner_optimizer if stands_beside(self) else self, weights)

    with (
        mock.patch.object(saving_utils, "model_metadata", model_metadata),
        mock.patch.object(legacy_h5_format, "save_optimizer_weights_to_hdf5_group", save_optimizer_weights),
        mock.patch.object(AmpOptimizer, "set_weights", set_weights),
        mock.patch.object(Trainer, "get_compile_config", get_compile_config),
        mock.patch.object(AmpOptimizer, "save_own_variables", save_own_variables),
        mock.patch.object(AmpOptimizer, "load_own_variables", load_own_variables),
        mock.patch.object(base, "load_own_variables", load_inner),
    ):
        yield


def _compiling(manager: KerasManager, native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def compile_model(self: Any, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> Any:
        optimizer = None if optimizer is None else keras.optimizers.get(optimizer)
        manager.run.look()
        if manager.stood_down or optimizer is None or isinstance(optimizer, WrappedOptimizer):
            if not manager.stood_down and isinstance(optimizer, AmpOptimizer) and optimizer not in manager.wrapped:
                _go_on(manager, self, optimizer)
            return native(self, optimizer, *args, **kwargs)
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            manager.refuse_own("keras.optimizers.LossScaleOptimizer")
        kept = outputs(self)
        if kept is None or environment_wants_graphs():
            manager.session(True)
        else:
            optimizer = manager.manage(optimizer, False)
            plan = manager.session(False).casting
            if plan is not None:
                prepare(self, plan, kept)
                count_layers(manager, self)
            manager.run.lines = lines(manager.run)
        return native(self, optimizer, *args, **kwargs)

    return compile_model


def _go_on(manager: KerasManager, model: Any, optimizer: AmpOptimizer) -> None:
    """Record a model that Keras loads from a file, with the layers and the optimizer that ampx saved there."""
    manager.session(False)
    manager.adopt(optimizer)
    count_layers(manager, model)
    manager.run.lines = lines(manager.run)


def _training(manager: KerasManager, native: Callable[..., Any], counts: bool) -> Callable[..., Any]:
    @functools.wraps(native)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        with manager.run.recorder.phase("train"):
            result = native(self, *args, **kwargs)
        if manager.stood_down:
            manager.look(self.optimizer)
        elif counts and self.optimizer in manager.wrapped:
            manager.count(self.optimizer)
        return result

    return train


def outputs(model: Any) -> list[Any] | None:
    """Return the layers that make a model's outputs; None where that is not known, or the model trains by itself."""
    methods = ("train_step", "test_step", "predict_step", "compute_loss", "call")
    stock = keras.Sequential if isinstance(model, keras.Sequential) else Functional
    if not isinstance(model, stock) or any(getattr(type(model), name) is not getattr(stock, name) for name in methods):
        return None
    if not model.built:
        return [model.layers[-1]] if model.layers else None
    layers = [tensor._keras_history.operation for tensor in keras.tree.flatten(model.outputs)]
    return layers if all(isinstance(layer, keras.layers.Layer) for layer in layers) else None


def prepare(model: Any, plan: CastPlan, kept: list[Any]) -> None:
    """Let the layers of a model cast, but for some, which the script reads."""
    exact = {id(layer) for output in kept for layer in output._flatten_layers()}
    before = {id(layer): layer.dtype_policy for layer in model._flatten_layers()}
    casting.prepare(model, replace(plan, allow=(), deny=()))  # a region around the run sees to these
    for layer in model._flatten_layers():
        if id(layer) in exact and layer is not model:
            layer.dtype_policy = before[id(layer)]


def count_layers(manager: KerasManager, model: Any) -> None:
    """Count in the recorder what layers compute in; those that the settings name are forced when they are called."""
    names = {id(module): name for name, module in walk(model)}
    for layer in model._flatten_layers(include_self=False, recursive=True):
        if not isinstance(layer, (keras.Model, keras.layers.InputLayer)):
            forced = forced_dtype(names.get(id(layer), ""), manager.forced)
            manager.run.recorder.count_op(type(layer).__name__, forced or layer.compute_dtype)


def lines(run: Run) -> tuple[str, ...]:
    """Return the lines of code that do the same by hand."""
    return (
        f"{run.init_call()}  # before the model is made",
        "optimizer = ampx.wrap_optimizer(optimizer)",
        "model.compile(optimizer=optimizer, loss=loss)  # the last layer with dtype='float32'",
    )
