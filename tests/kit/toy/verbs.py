"""What the two toy backends have in common: the verbs that do not depend on where gradients live."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import ampx
from ampx.backend import CastPlan, Device, LossInfo, Unscaled
from ampx.policy import Dtype
from toy import framework
from toy.framework import FLOATING, CastingState, Tensor


def casting_of(plan: CastPlan, enabled: bool) -> CastingState:
    """Return the framework's switch for a plan."""
    own = CastingState()
    if not enabled:
        return own
    allow, deny = frozenset(plan.allow), frozenset(plan.deny)
    return CastingState(plan.dtype, own.allow - deny | allow, own.deny - allow | deny)


class ToyVerbs(ampx.GenericBackend):
    """The verbs of ampx in the toy framework."""

    def device(self, name: str) -> Device:
        """Describe the only device."""
        if name not in ("auto", "cpu"):
            raise ampx.UnsupportedDeviceError(
                f"device={name!r} is not a device of the toy; accepted: 'cpu', 'auto'. Pass one of these."
            )
        both: frozenset[Dtype] = frozenset({"float16", "bfloat16"})
        return Device("cpu", native=both, preferred="float16", reason="the toy rounds to any dtype")

    def is_optimizer(self, candidate: object) -> bool:
        """Return whether this is a toy optimizer."""
        return isinstance(candidate, framework.Optimizer)

    def autocast(self, plan: CastPlan, enabled: bool) -> AbstractContextManager[Any]:
        """Return a region."""
        return framework.autocast(casting_of(plan, enabled))

    def activate(self, plan: CastPlan) -> None:
        """Switch casting on for the process."""
        framework.set_casting(casting_of(plan, True))

    def deactivate(self, plan: CastPlan) -> None:
        """Switch casting off again."""
        framework.set_casting(CastingState())

    def cast(self, tree: Any, dtype: Dtype) -> Any:
        """Cast the floating tensors of a tree."""
        if isinstance(tree, dict):
            return {key: self.cast(value, dtype) for key, value in tree.items()}
        if isinstance(tree, (list, tuple)):
            return type(tree)(self.cast(value, dtype) for value in tree)
        return tree.to(dtype) if isinstance(tree, Tensor) and tree.dtype in FLOATING else tree

    def inspect_loss(self, loss: Any, check_nan: bool | None) -> LossInfo:
        """Describe a loss."""
        if not isinstance(loss, Tensor):
            raise ampx.LossDtypeError(
                f"scale_loss got {type(loss).__name__}; accepted: a toy tensor. Pass what the loss function returned."
            )
        nan = None if check_nan is False else any(math.isnan(value) for value in loss.data)
        return LossInfo(len(loss.data), loss.dtype, loss.dtype in FLOATING, loss.attached, nan)

    def scale(self, loss: Tensor, scale: float) -> Tensor:
        """Return the loss in float32 times the scale."""
        return loss.to("float32") * scale

    def unscale(self, grads: Sequence[Tensor | None], scale: float) -> Unscaled:
        """Divide gradients by the scale and test them."""
        true = [None if grad is None else Tensor([v / scale for v in grad.data], grad.dtype) for grad in grads]
        return Unscaled(true, all(math.isfinite(v) for grad in grads if grad is not None for v in grad.data))

    def clip(
        self, grads: Sequence[Tensor | None], max_norm: float | None, max_value: float | None
    ) -> tuple[list[Tensor | None], float | None]:
        """Clip by value, then by norm."""
        bound = math.inf if max_value is None else max_value
        clipped = [
            None if grad is None else Tensor([max(-bound, min(bound, v)) for v in grad.data], grad.dtype)
            for grad in grads
        ]
        if max_norm is None:
            return clipped, None
        norm = math.sqrt(sum(v * v for grad in clipped if grad is not None for v in grad.data))
        if norm > max_norm:
            clipped = [None if grad is None else grad * (max_norm / norm) for grad in clipped]
        return clipped, norm
