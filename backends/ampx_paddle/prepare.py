"""What `prepare` does: Paddle's `decorate` at O2 and O3, with norms and checkpoints as at these levels everywhere.

Native defects that are closed here: in bfloat16 `decorate` leaves no norm but batch normalization in float32, and in
no dtype group normalization; `state_dict` holds rounded weights, and a decorated model loads no float32 ones.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any, Final, cast

import paddle

from ampx.backend import CastPlan
from ampx.errors import UnsupportedDeviceError
from ampx.modules import check_patterns, float32_modules, is_meant, listed, module_dtypes, name_models

from .calls import named
from .casting import DTYPES, LOW
from .gradients import parameters
from .step import AmpOptimizer

_nn = paddle.nn
_INSTANCE_NORMS: Final = (_nn.InstanceNorm1D, _nn.InstanceNorm2D, _nn.InstanceNorm3D)
_NORMS: Final = (_nn.LayerNorm, _nn.GroupNorm, *_INSTANCE_NORMS)


def prepare(model: Any, optimizer: Any | None, plan: CastPlan) -> Any:
    """Cast a model to low precision at O2 and O3; at O1 do nothing.

    At O2 norms stay in float32, and the optimizer gets float32 masters. At O3 only those stay whose kernels take
    nothing else: batch and instance normalization.

    Raises:
        InvalidOptionError: Something is no layer, or no optimizer.
        ProtocolError: Scaled gradients are pending, which belong to the parameters as they are.
    """
    models = listed(model, _nn.Layer, "model", "paddle.nn.Layer")
    kinds = (paddle.optimizer.Optimizer, AmpOptimizer)
    optimizers = listed(optimizer, kinds, "optimizer", "paddle.optimizer.Optimizer, wrapped or not")
    names = [name for name, _ in name_models(models, named)]
    check_patterns("prepare", module_dtypes(plan), names, matches=is_meant)
    if plan.level != "O1":
        present = paddle.device.get_device()
        if present.partition(":")[0] != plan.device.partition(":")[0]:
            raise UnsupportedDeviceError(
                f"prepare was called at level={plan.level!r} for {plan.device!r} while paddle computes on {present!r}, "
                f"where decorate silently does nothing; accepted: the session's device. Call "
                f"paddle.set_device({plan.device!r}) before making the model."
            )
        raws = _raw_optimizers(optimizers)
        if not all(isinstance(layer, PreparedLayer) for layer in models):  # Paddle would round the masters, too
            _lower(models, raws, plan)
    return model if optimizer is None else (model, optimizer)


def _raw_optimizers(optimizers: list[Any]) -> list[Any]:
    """List the raw optimizers; raise where gradients of one are pending."""
    for entry in optimizers:
        if isinstance(entry, AmpOptimizer):
            entry.ampx_member.check_prepare()
    return [entry.optimizer if isinstance(entry, AmpOptimizer) else entry for entry in optimizers]


def _lower(models: list[Any], raws: list[Any], plan: CastPlan) -> None:
    """Cast models and optimizers, and have them save and load float32."""
    kept = _kept(models, plan)
    # `decorate` marks what is excluded for good, and takes no empty list.
    options: dict[str, Any] = {"level": "O2", "dtype": plan.dtype, "excluded_layers": kept or None}
    if raws:
        paddle.amp.decorate(models=models, optimizers=raws, master_weight=plan.level == "O2", **options)
    else:
        paddle.amp.decorate(models=models, **options)
    if plan.level == "O3":
        _lower_rest(models, raws, kept, plan.dtype)
    references = tuple(weakref.ref(raw) for raw in raws)
    for layer in _layers(models):
        layer.register_state_dict_hook(_SaveFloat32(references))
    for layer in models:
        layer.__class__ = _prepared_class(layer.__class__)
        layer.ampx_optimizers = references


def _lower_rest(models: list[Any], raws: list[Any], kept: list[Any], dtype: str) -> None:
    """Cast what `decorate` leaves wide at O3, and leave wide what it must not make low."""
    for layer in _layers(models):
        if isinstance(layer, _nn.LayerNorm) and not any(layer is other for other in kept):
            layer.to(dtype=dtype)  # which `decorate` does in bfloat16 only
    for raw in raws:
        if isinstance(raw, paddle.optimizer.Momentum):
            raw.__class__ = _wide_velocity_class(raw.__class__)


def _layers(models: Iterable[Any]) -> list[Any]:
    return list({id(layer): layer for model in models for _, layer in named(model)}.values())


def _kept(models: list[Any], plan: CastPlan) -> list[Any]:
    """List the layers that stay in float32, but for those that `decorate` leaves alone by itself."""
    norms = _NORMS if plan.level == "O2" else _INSTANCE_NORMS
    return float32_modules(name_models(models, named), plan, norms)


def _exact(parameter: Any, references: Iterable[Any]) -> Any:
    """Return a low-precision parameter in float32: its master's values where they are what it was rounded from."""
    own = parameter.astype("float32")
    for reference in references:
        raw = reference()
        master = None if raw is None else raw._master_weights.get(parameter.name)
        if master is not None:
            return paddle.where(own == master.astype(parameter.dtype).astype("float32"), master, own)
    return own


class _SaveFloat32:
    """Hook after `state_dict`: puts float32 values in the place of low-precision ones."""

    def __init__(self, references: Iterable[Any]) -> None:
        self._references = references

    def __call__(self, state: dict[str, Any]) -> None:
        """Replace."""
        with paddle.no_grad():
            for key, value in state.items():
                if isinstance(value, paddle.Tensor) and value.dtype in LOW:
                    exact = _exact(value, self._references)
                    exact.name = value.name  # as Paddle's own hook: files may go by names
                    state[key] = exact


class PreparedLayer:
    """A model in low precision, which loads float32.

    Attributes:
        ampx_optimizers: Weak references to the optimizers that it was prepared with.
    """

    ampx_optimizers: tuple[Any, ...]

    def set_state_dict(self, state_dict: Any, use_structured_name: bool = True) -> Any:
        """Load values of any floating dtype; masters get float32 ones exactly."""
        layer: Any = self
        own = {
            key if use_structured_name else value.name: value for key, value in layer.state_dict(use_hook=False).items()
        }
        lowered, exact = dict(state_dict), {}
        for key in state_dict.keys() & own.keys():
            parameter, values = own[key], state_dict[key]
            values = values if isinstance(values, paddle.Tensor) else paddle.to_tensor(values)
            if parameter.dtype in LOW and values.dtype in DTYPES.values():
                exact[parameter.name] = values.astype("float32")
                lowered[key] = values.astype(parameter.dtype)
        result = super().set_state_dict(lowered, use_structured_name)  # type: ignore[misc]
        for reference in self.ampx_optimizers:
            raw = reference()
            if raw is not None and raw._multi_precision:
                for parameter in parameters(raw):
                    if parameter.name in exact:
                        raw._create_master_weight(parameter).set_value(exact[parameter.name])
        return result

    set_dict = load_dict = set_state_dict


@functools.cache
def _prepared_class(kind: Any) -> type:
    return type(kind)(kind.__name__, (PreparedLayer, kind), {"__module__": kind.__module__})


class _WideVelocity:
    """A Momentum without master copies whose velocities are float32.

    Native defect: Paddle makes them as low-precision as the parameters, and its step takes them for float32 ones then,
    twice as large as their memory.
    """

    def _add_accumulator(self, name: str, param: Any, dtype: Any = None, *others: Any, **options: Any) -> Any:
        wide = dtype is None and param.dtype in LOW
        native: Any = super()
        return native._add_accumulator(name, param, paddle.float32 if wide else dtype, *others, **options)


@functools.cache
def _wide_velocity_class(kind: Any) -> type:
    if issubclass(kind, _WideVelocity):
        return cast(type, kind)
    return type(kind)(kind.__name__, (_WideVelocity, kind), {"__module__": kind.__module__})
