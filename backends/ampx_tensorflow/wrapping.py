"""Which optimizers there are, and what wraps them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import keras

from ampx.backend import reject_unknown
from ampx.errors import AlreadyWrappedError, InvalidOptionError, LowPrecisionParametersError
from ampx.optimizer import WrappedOptimizer
from ampx.protocol import Member

from . import graph
from .optimizer import AmpOptimizer

if TYPE_CHECKING:
    from .backend import TensorFlowBackend


def is_optimizer(candidate: object) -> bool:
    """Return whether this is an optimizer that can be wrapped, and is not."""
    if isinstance(candidate, WrappedOptimizer):
        return False
    if isinstance(candidate, keras.optimizers.Optimizer) or graph.is_optimizer(candidate):
        return True
    return "tf_keras" in sys.modules and _legacy().is_optimizer(candidate)


def _legacy() -> Any:
    from . import legacy  # imports tf_keras, which few programs use

    return legacy


def make_wrapper(
    backend: TensorFlowBackend, optimizer: Any, member: Member, options: Mapping[str, Any]
) -> WrappedOptimizer:
    """Wrap a raw optimizer.

    Raises:
        AlreadyWrappedError: It scales the loss itself.
        InvalidOptionError: An option is unknown, or does not go with the optimizer.
        LowPrecisionParametersError: It was built with low-precision variables.
    """
    reject_unknown(backend.name, options, ())
    if graph.is_optimizer(optimizer):
        return graph.wrap(backend, optimizer, member, options)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        wrapper: WrappedOptimizer = _legacy().wrap(backend, optimizer, member, options)
        return wrapper
    return _wrap_keras(optimizer, member, options)


def _wrap_keras(optimizer: Any, member: Member, options: Mapping[str, Any]) -> AmpOptimizer:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor is not None:
        raise AlreadyWrappedError(
            f"wrap_optimizer got {type(optimizer).__name__}, which scales the loss itself; its gradients would be "
            f"unscaled twice. Pass the optimizer inside (inner_optimizer), without loss_scale_factor, and give "
            f"loss_scale=… to wrap_optimizer."
        )
    bounds = [name for name in ("max_grad_norm", "max_grad_value") if options.get(name) is not None]
    if bounds and optimizer.gradient_accumulation_steps:
        raise InvalidOptionError(
            f"wrap_optimizer got {', '.join(bounds)} for an optimizer with gradient_accumulation_steps, of which ampx "
            f"sees only micro-batches; accepted: one of them. Pass global_clipnorm or clipvalue to the optimizer, "
            f"which clips what was accumulated."
        )
    low = [one.path for one in optimizer._trainable_variables if one.dtype in ("float16", "bfloat16")]
    if low and member.group.enabled:
        raise LowPrecisionParametersError(
            f"the optimizer was built with {len(low)} low-precision variables ({', '.join(low[:5])}); updates smaller "
            f"than their precision would be lost. Keep them in float32: policy 'mixed_float16', not 'float16'."
        )
    return AmpOptimizer(
        optimizer,
        max_grad_norm=options.get("max_grad_norm"),
        max_grad_value=options.get("max_grad_value"),
        member=member,
    )
