"""Trained Keras models in low precision: made anew from their configuration, with other dtype policies.

Keras casts the inputs of each layer to what its policy computes in. Layers get the policy `"float16"`, whose variables
are float16, too; those that normalize get `"mixed_float16"`, and what is denied gets `"float32"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ampx.backend import Array, Backend
from ampx.errors import ConversionError, InvalidOptionError
from ampx.modules import inherited
from ampx.shipping import layers as shipping
from ampx.shipping.converter import Conversion, Converted, Converter

from .casting import LOW
from .names import walk
from .prepare import policy_of


def convert(backend: Backend, model: Any, conversion: Conversion) -> Converted:
    """Convert a model: functional, sequential, or of a class whose objects are made from their configuration."""
    _check(model)
    shipping.check_computed(backend, backend.device("auto").name, conversion.dtype)
    layers = {name: layer for name, layer in walk(model) if name}
    denied = shipping.denied_names(conversion.deny, layers)
    policies = _policies(layers, denied, conversion.dtype)
    if conversion.dtype != "float32":
        shipping.check_fits(conversion.dtype, _magnitudes(layers, policies))
    try:
        outputs, inputs = _made(model, layers, policies, conversion)
    except Exception as error:
        raise ConversionError(
            f"convert cannot make {type(model).__name__} {model.name!r} anew from its configuration ({error}); "
            f"accepted: functional and sequential models, and classes with get_config and from_config. Write these two "
            f"methods, or build the model from layers by keras.Model(inputs, outputs)."
        ) from error
    target = "float32" if conversion.keep_io else conversion.dtype
    converted = keras.Model(inputs, _cast(outputs, target), name=model.name)
    _take_weights(model, converted)
    converted.trainable = False
    return Converted(converted, shipping.leaves_first([name for name in layers if name not in denied]))


def infer(model: Any, batch: Any) -> Mapping[str, Array]:
    """Call a converted model; a dict or list is its only argument, as Keras passes several inputs."""
    args = batch if isinstance(batch, tuple) and not hasattr(batch, "_fields") else (batch,)
    return shipping.named_outputs(model(*args, training=False), _array)


def _array(value: Any) -> Array | None:
    if not keras.ops.is_tensor(value):
        return None
    if keras.backend.is_float_dtype(keras.backend.standardize_dtype(value.dtype)):
        value = keras.ops.cast(value, "float32")
    return np.asarray(value.numpy())


def _check(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise InvalidOptionError(
            f"convert got {type(model).__module__}.{type(model).__qualname__}; accepted: a model of Keras 3. Pass "
            f"that, or keras.Sequential([layer])."
        )
    if not model.built:
        raise InvalidOptionError(
            f"convert got {type(model).__name__} {model.name!r} before it has weights; accepted: a model that is "
            f"built. Call it once, or load its weights."
        )
    shipping.check_float32([variable.path for variable in model.weights if variable.dtype in LOW])
    homes: dict[int, str] = {}
    for name, layer in walk(model):
        for variable in _own(layer):
            if homes.setdefault(id(variable), name) != name:
                raise ConversionError(
                    f"the layers {homes[id(variable)]!r} and {name!r} share the variable {variable.path!r}, of which a "
                    f"model made anew would have two; accepted: weights of one layer, which may be called several "
                    f"times. Share the layer."
                )


def _own(layer: Any) -> list[Any]:
    if not isinstance(layer, keras.layers.Layer):
        return []
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def _policies(layers: Mapping[str, Any], denied: frozenset[str], dtype: str) -> dict[str, str]:
    """Return the policy of each layer; one that was made for float32 in a model of mixed precision keeps it."""
    if dtype == "float32":
        return dict.fromkeys(("", *layers), dtype)
    mixed = any(layer.compute_dtype in LOW for layer in layers.values() if isinstance(layer, keras.layers.Layer))

    def stays_wide(name: str, layer: Any) -> bool:
        if name in denied or isinstance(layer, keras.layers.SpectralNormalization):  # and the layer inside of it
            return True
        computes_wide = getattr(layer, "compute_dtype", dtype) == "float32"
        return mixed and computes_wide and not _own(layer) and not isinstance(layer, keras.Model)

    wide = {name: "float32" for name, layer in layers.items() if stays_wide(name, layer)}
    return {"": dtype} | {
        name: policy_of(layer, inherited(name, wide.get), dtype, keeps_norms=True) for name, layer in layers.items()
    }


def _magnitudes(layers: Mapping[str, Any], policies: Mapping[str, str]) -> dict[str, float]:
    magnitudes: dict[str, float] = {}
    for name, layer in layers.items():
        for variable in _own(layer) if policies[name] in LOW else ():
            values = tf.convert_to_tensor(variable.value).numpy()
            if np.issubdtype(values.dtype, np.floating):
                magnitudes[f"{name}.{variable.name}"] = shipping.largest(values)
    return magnitudes


def _made(
    model: Any, layers: Mapping[str, Any], policies: Mapping[str, str], conversion: Conversion
) -> tuple[Any, Any]:
    """Return what a model like this returns for new symbolic inputs, and these."""
    names = {id(layer): name for name, layer in layers.items()}

    def made(layer: Any) -> Any:
        config = layer.get_config()
        name = names.get(id(layer))
        if "dtype" in config and name is not None:
            config["dtype"] = policies[name]
        copied = type(layer).from_config(config)
        if name is not None:
            _set_policies(copied, name, policies)
        return copied

    if isinstance(model, keras.Sequential) or hasattr(model, "operations"):
        copied = keras.models.clone_model(model, clone_function=made, recursive=True)
        graph = copied._functional if isinstance(copied, keras.Sequential) else copied
        return graph._outputs_struct, graph._inputs_struct  # which keep dicts, as `inputs` and `outputs` do not
    if conversion.batch is None:
        raise InvalidOptionError("it is of a class of its own, and there is no batch to build it with")
    copied = type(model).from_config(model.get_config())
    _set_policies(copied, "", policies)
    args = conversion.batch if isinstance(conversion.batch, tuple) else (conversion.batch,)
    inputs = keras.tree.map_structure(
        lambda array: keras.Input(np.shape(array)[1:], dtype=keras.backend.standardize_dtype(array.dtype)), args
    )
    return copied(*inputs), inputs if len(inputs) > 1 else inputs[0]


def _set_policies(copied: Any, name: str, policies: Mapping[str, str]) -> None:
    """Set the policies of a layer and of those inside, before they have weights."""
    for inner, layer in walk(copied, name):
        if inner in policies and isinstance(layer, keras.layers.Layer):
            layer.dtype_policy = policies[inner]


def _cast(outputs: Any, dtype: str) -> Any:
    """Return symbolic outputs with the floating ones in a dtype."""

    def cast(output: Any) -> Any:
        if not keras.backend.is_float_dtype(output.dtype):
            return output
        return keras.layers.Activation("linear", dtype=dtype)(output)

    return keras.tree.map_structure(cast, outputs)


def _take_weights(model: Any, converted: Any) -> None:
    pairs = list(zip(model.weights, converted.weights, strict=False))
    if len(model.weights) != len(converted.weights) or any(old.shape != new.shape for old, new in pairs):
        raise ConversionError(
            f"{type(model).__name__} {model.name!r} has other weights when it is made anew: {len(model.weights)} and "
            f"{len(converted.weights)}; accepted: models that their configuration describes. Correct get_config."
        )
    for old, new in pairs:
        new.assign(keras.ops.cast(old.value, new.dtype))


class TensorFlowConverter(Converter):
    """Converts models of Keras 3."""

    def convert(self, model: Any, conversion: Conversion) -> Converted:
        """Convert a model of Keras 3."""
        return convert(self.backend, model, conversion)

    def infer(self, model: Any, batch: Any) -> Mapping[str, Array]:
        """Call a converted model; a dict or list is its only argument."""
        return infer(model, batch)
