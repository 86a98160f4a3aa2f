"""What `prepare` does at O2 and O3: low-precision variables in Keras models, and float32 masters.

Layers get Keras's own policies: `"bfloat16"` or `"float16"` altogether, but for normalization at O2 and for what `deny`
names. What a model returns has the dtype of its last layer, as with every policy of Keras; its losses compute in
float32. Layers that are not built yet become low precision once they are, from weights that were drawn in float32.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, Final

import keras
import tensorflow as tf

from ampx.backend import CastPlan
from ampx.errors import ProtocolError, UnsupportedByBackendError
from ampx.modules import listed

from . import casting, masters, oplists
from .keras3 import AmpOptimizer

# Normalization that computes in float32 on low-precision inputs by a mixed policy. Keras computes the others in the
# compute dtype, some in older versions only, so that they get a policy in float32.
_MIXED_NORMS: Final = (keras.layers.BatchNormalization, keras.layers.LayerNormalization)
_FLOAT32_NORMS: Final = (
    keras.layers.GroupNormalization,  # before Keras 3.15
    keras.layers.RMSNormalization,
    keras.layers.UnitNormalization,
    keras.layers.SpectralNormalization,
    keras.layers.Normalization,
)


def prepare(model: Any, optimizers: list[Any], plan: CastPlan) -> Any:
    """Do to models and their optimizers what O2 and O3 need. Doing it again to the same changes nothing.

    Raises:
        InvalidOptionError: It is no model or layer of Keras.
        UnsupportedByBackendError: It is one of tf_keras, or a function; or layers have a map of policies.
        UnsupportedOpError: A pattern matches no layer.
        ProtocolError: An optimizer has gradients pending.
        LowPrecisionParametersError: An optimizer was built on low-precision variables.
    """
    models = listed(model, _layers(), "model", f"a model or layer of Keras 3, whose variables become {plan.dtype}")
    for each in models:
        _check_model(each, plan)
    raws = [_raw(each, plan) for each in optimizers]
    built = [(raw, list(raw._trainable_variables)) for raw in raws if raw.built]
    for each in models:
        _lower_layers(each, each, plan)
    for each in optimizers:
        if isinstance(each, AmpOptimizer):
            each.keeps_masters = plan.level == "O2"
    for raw, variables in built:
        _follow(raw, variables, plan)
    return model


def _layers() -> tuple[type, ...]:
    """Return the classes of layers, those of tf_keras where it was imported: they are refused with another reason."""
    former = sys.modules.get("tf_keras")
    return (keras.layers.Layer,) if former is None else (keras.layers.Layer, former.layers.Layer)


def _check_model(model: Any, plan: CastPlan) -> None:
    if not isinstance(model, keras.layers.Layer):
        raise UnsupportedByBackendError(
            f"prepare got a model of tf_keras at level {plan.level}; accepted: a model of Keras 3. Layers of tf_keras "
            f"keep the variables that they made, with their dtype: use Keras 3, or level='O1'."
        )
    several = tf.distribute.has_strategy() and tf.distribute.get_strategy().extended._in_multi_worker_mode()
    if several and plan.dtype == "bfloat16":
        raise UnsupportedByBackendError(
            f"prepare was called at level {plan.level} in bfloat16 under MultiWorkerMirroredStrategy, by which "
            f"TensorFlow cannot send variables of that dtype to other workers; accepted: float16 there. Use "
            f"dtype='float16', or level='O1'."
        )
    _check_prepared(model, plan)
    for layer in model._flatten_layers():
        if isinstance(layer._dtype_policy, keras.dtype_policies.DTypePolicyMap):
            raise UnsupportedByBackendError(
                f"prepare got the layer {layer.name!r} with a DTypePolicyMap at level {plan.level}; accepted: layers "
                f"with a policy each. Name the layers in allow and deny instead."
            )


def _check_prepared(model: Any, plan: CastPlan) -> None:
    """Raise for a model that was prepared before, in another way."""
    for variable in model.variables:
        low = isinstance(variable, masters.LowPrecisionVariable)
        has_master = isinstance(variable, masters.TrainedVariable)
        if (low and variable._dtype != plan.dtype) or (has_master and plan.level == "O3"):
            raise ProtocolError(
                f"prepare got a model that was prepared before, in {variable._dtype} at "
                f"{'O2' if has_master else 'O3'}, for {plan.dtype} at {plan.level}; its weights are rounded already. "
                f"Make it anew, and copy the weights: new.set_weights(old.get_weights())."
            )


def check_kind(optimizer: Any, call: str, level: str) -> None:
    """Raise for an optimizer that is none of Keras 3.

    Raises:
        UnsupportedByBackendError: It is one of tf_keras or of TensorFlow 1.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UnsupportedByBackendError(
            f"{call} got {type(optimizer).__module__}.{type(optimizer).__name__} at level {level}, where optimizers "
            f"update float32 masters of a Keras 3 model's variables, or those themselves in low precision; accepted: "
            f"an optimizer of Keras 3. Those of tf_keras and of TensorFlow 1 update what they are given: use "
            f"level='O1' with them."
        )


def _raw(optimizer: Any, plan: CastPlan) -> Any:
    """Return the optimizer of Keras 3; raise for others, and while gradients are pending."""
    check_kind(optimizer, "prepare", plan.level)
    if not isinstance(optimizer, AmpOptimizer):
        return optimizer
    if optimizer.ampx_pending:  # in a function, too, of which the member that `check_prepare` asks knows nothing
        raise ProtocolError(
            "prepare was called while gradients of scale_loss are pending, which belong to the variables as they "
            "were; accepted: between steps. Step first, or call the optimizer's zero_grad to forget them."
        )
    return optimizer.inner_optimizer


def _lower_layers(layer: Any, root: Any, plan: CastPlan) -> None:
    """Make the variables of a layer and of all in it low precision, now or once they are there."""
    forced = oplists.forced_layers(root, plan)
    if plan.level == "O2":
        forced = dict.fromkeys(_inside_spectral_normalization(root), "float32") | forced
    for each in layer._flatten_layers():
        if not _may_change(each):
            continue
        policy = policy_of(each, forced.get(id(each)), plan.dtype, plan.level == "O2")
        lowers = policy == plan.dtype
        if lowers and not each.built:
            each.dtype_policy = f"mixed_{plan.dtype}"
            vars(each)["_post_build"] = partial(_when_built, each, root, plan)
        else:
            each.dtype_policy = policy
        if lowers and each.built:
            for variable in (*each._trainable_variables, *each._non_trainable_variables):
                _lower(variable, plan)
        casting.forget_functions(each)


def _inside_spectral_normalization(root: Any) -> list[int]:
    """Return the ids of layers whose weights a `SpectralNormalization` around them writes."""
    around = [each for each in root._flatten_layers() if isinstance(each, keras.layers.SpectralNormalization)]
    return [id(inner) for each in around for inner in each._flatten_layers()]


def _when_built(layer: Any, root: Any, plan: CastPlan) -> None:
    """Stand in for a layer's `_post_build`, which Keras calls once the layer has its variables."""
    vars(layer).pop("_post_build", None)
    layer._post_build()
    _lower_layers(layer, root, plan)


def _may_change(layer: Any) -> bool:
    """Return whether a layer computes in floating dtypes of its policy, and is not quantized."""
    floating = layer.compute_dtype is not None and tf.as_dtype(layer.compute_dtype).is_floating
    return floating and layer.quantization_mode is None


def policy_of(layer: Any, forced: str | None, dtype: str, keeps_norms: bool) -> str:
    """Return the name of a layer's policy: `dtype` where its variables become low precision, too.

    `forced` is the dtype that it, or a layer around it, was named for; `keeps_norms` keeps normalization in float32.
    """
    if forced == "float32":
        return "float32"
    if forced is None and keeps_norms:
        if isinstance(layer, _MIXED_NORMS):
            return f"mixed_{dtype}"
        if isinstance(layer, _FLOAT32_NORMS):
            return "float32"
    return dtype


def _lower(variable: Any, plan: CastPlan) -> None:
    if variable._dtype not in ("float32", plan.dtype):
        return
    if plan.level == "O2" and variable.trainable:
        masters.attach(variable, plan.dtype)
    elif not isinstance(variable, masters.LowPrecisionVariable):
        masters.lower(variable, plan.dtype)


def _follow(raw: Any, variables: list[Any], plan: CastPlan) -> None:
    """Have an optimizer that was built update the variables that there are now."""
    if plan.level == "O2":
        masters.adopt(raw)
        return
    indices = {raw._var_key(variable): index for index, variable in enumerate(variables)}
    raw._trainable_variables_indices.clear()
    raw._trainable_variables_indices.update(indices)
    for variable in raw.variables:  # what it would have made of low-precision variables
        if variable._dtype == "float32" and variable is not raw._learning_rate:
            masters.lower(variable, plan.dtype)
