"""Models that Keras compiles and trains by itself: their layers cast, but for those of the outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import keras
from keras.src.legacy.saving import legacy_h5_format, saving_utils
from keras.src.models import Functional
from keras.src.trainers.trainer import Trainer

from ampx.backend import CastPlan
from ampx.modules import forced_dtype
from ampx.optimizer import WrappedOptimizer
from ampx.run import Run, patched
from ampx_tensorflow import casting
from ampx_tensorflow.keras3 import AmpOptimizer
from ampx_tensorflow.names import walk

from .manager import KerasManager, environment_wants_graphs


@contextmanager
def models_cast(manager: KerasManager) -> Iterator[None]:
    """Patch how Keras compiles and trains models, and what it writes into their files."""
    files = _Files(manager)
    with patched(
        (Trainer, "compile", partial(_compiling, manager)),
        (keras.Model, "fit", partial(_training, manager, counts=True)),
        (keras.Model, "train_on_batch", partial(_training, manager, counts=False)),
        (Trainer, "get_compile_config", files.describing),
        (AmpOptimizer, "save_own_variables", files.saving),
        (AmpOptimizer, "load_own_variables", files.loading),
        (keras.optimizers.Optimizer, "load_own_variables", files.loading_inner),
        # Files of the format HDF5 are written otherwise.
        (saving_utils, "model_metadata", files.describing_hdf5),
        (legacy_h5_format, "save_optimizer_weights_to_hdf5_group", files.saving_hdf5),
        (AmpOptimizer, "set_weights", files.setting_weights),
    ):
        yield


class _Files:
    """What Keras writes into files of models, and reads: the optimizer that the script made, as without ampx."""

    def __init__(self, manager: KerasManager) -> None:
        self._manager = manager
        self._load_raw = keras.optimizers.Optimizer.load_own_variables

    def _raw(self, optimizer: Any) -> Any:
        """Return the script's optimizer that a wrapper stands for; None for all that is no such wrapper."""
        raw = optimizer.inner_optimizer if isinstance(optimizer, AmpOptimizer) else None
        return raw if raw is not None and self._manager.wrapper(raw) is not None else None

    def describing(self, native: Callable[..., Any]) -> Callable[..., Any]:
        def get_compile_config(model: Any) -> dict[str, Any]:
            config: dict[str, Any] = native(model)
            if config and (raw := self._raw(model.optimizer)) is not None:
                config["optimizer"] = keras.saving.serialize_keras_object(raw)
            return config

        return get_compile_config

    def saving(self, native: Callable[..., None]) -> Callable[..., None]:
        def save_own_variables(optimizer: Any, store: Any) -> None:
            raw = self._raw(optimizer)
            if raw is None:
                native(optimizer, store)
            else:
                raw.save_own_variables(store)

        return save_own_variables

    def loading(self, native: Callable[..., None]) -> Callable[..., None]:
        def load_own_variables(optimizer: Any, store: Any) -> None:
            raw = self._raw(optimizer)
            if raw is not None and len(store.keys()) == len(raw.variables):
                self._load_raw(raw, store)
            else:
                native(optimizer, store)

        return load_own_variables

    def loading_inner(self, native: Callable[..., None]) -> Callable[..., None]:
        def load_own_variables(optimizer: Any, store: Any) -> None:
            # What a wrapper holds has nothing of its own in such a file.
            if store.keys() or self._manager.wrapper(optimizer) is None:
                native(optimizer, store)

        return load_own_variables

    def describing_hdf5(self, native: Callable[..., Any]) -> Callable[..., Any]:
        def model_metadata(model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            metadata: dict[str, Any] = native(model, *args, **kwargs)
            if "training_config" in metadata and (raw := self._raw(model.optimizer)) is not None:
                described = {"class_name": keras.saving.get_registered_name(type(raw)), "config": raw.get_config()}
                metadata["training_config"]["optimizer_config"] = described
            return metadata

        return model_metadata

    def saving_hdf5(self, native: Callable[..., None]) -> Callable[..., None]:
        return lambda group, optimizer: native(group, self._raw(optimizer) or optimizer)

    def setting_weights(self, native: Callable[..., None]) -> Callable[..., None]:
        return lambda optimizer, weights: native(self._raw(optimizer) or optimizer, weights)


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
        *run.prepare_lines(),
        "optimizer = ampx.wrap_optimizer(optimizer)",
        "model.compile(optimizer=optimizer, loss=loss)  # the last layer with dtype='float32'",
    )
