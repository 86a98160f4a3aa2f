"""The verbs of ampx in TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import tensorflow as tf

import ampx
from ampx.contract import CastPlan, Device, LossInfo, Unscaled
from ampx.group import Member
from ampx.policy import Dtype

from . import casting, devices, gradients
from .losses import inspect_loss, scale_loss
from .wrapping import is_optimizer, make_wrapper


class TensorFlowBackend(ampx.Backend):
    """TensorFlow and Keras: dtype policies for casting, Keras' own LossScaleOptimizer for loss scaling."""

    name: ClassVar[str] = "tensorflow"
    capabilities: ClassVar[ampx.Capabilities] = ampx.Capabilities(
        devices=("gpu", "cpu"),
        dtypes=frozenset({"float16", "bfloat16"}),
        levels=frozenset({"O0", "O1"}),
        gradients="explicit",
        autocast="scoped",
        promotes=True,
        clipping=True,
        sparse=True,
        distributed=True,
        device_scale=True,
        traceable=True,
    )

    def device(self, name: str) -> Device:
        """Describe a device."""
        return devices.describe(name)

    def is_optimizer(self, candidate: object) -> bool:
        """Tell whether this is an optimizer of Keras or TensorFlow, not wrapped."""
        return is_optimizer(candidate)

    def autocast(self, plan: CastPlan, enabled: bool) -> AbstractContextManager[Any]:
        """Give a region that Keras layers follow."""
        return casting.region(plan, enabled)

    def activate(self, plan: CastPlan) -> None:
        """Switch casting on for the process; for layers made from now on, in the calling thread."""
        casting.activate(plan)

    def deactivate(self, plan: CastPlan) -> None:
        """Undo `activate`, and what `prepare` did."""
        casting.deactivate()

    def enter_thread(self, plan: CastPlan) -> None:
        """Let layers made in the calling thread cast, too."""
        casting.enter_thread(plan)

    def cast(self, tree: Any, dtype: Dtype) -> Any:
        """Cast the floating tensors of a tree."""
        return casting.cast(tree, dtype)

    def widest(self, tree: Any, at_least: Dtype) -> Dtype:
        """Give the widest dtype among the floating tensors of a tree."""
        return casting.widest(tree, at_least)

    def smallest(self, scales: Sequence[Any]) -> Any:
        """Give the smallest of some scales, which are tensors."""
        return tf.reduce_min(tf.stack([tf.convert_to_tensor(scale, tf.float32) for scale in scales]))

    def inspect_loss(self, loss: Any, check_nan: bool | None) -> LossInfo:
        """Tell what `scale_loss` has to know about a loss."""
        return inspect_loss(loss, check_nan)

    def scale(self, loss: Any, scale: Any) -> Any:
        """Give the loss in float32 times the scale, with a `gradient` of its own for use outside the tape."""
        return scale_loss(loss, scale)

    def unscale(self, grads: Any, scale: Any) -> Unscaled:
        """Divide gradients by the scale and test them."""
        true = gradients.unscale(grads, scale)
        return Unscaled(true, gradients.finite(true))

    def clip(self, grads: Any, max_norm: float | None, max_value: float | None) -> tuple[Any, Any]:
        """Clip true gradients by value, then by global norm."""
        return gradients.clip(grads, max_norm, max_value)

    def apply(self, optimizer: Any, grads: Any) -> None:
        """Run a raw optimizer that was built, with casting off."""
        with casting.off():
            optimizer.apply(grads)

    def wrap_optimizer(self, optimizer: Any, member: Member, options: Mapping[str, Any]) -> Any:
        """Give an optimizer that Keras accepts wherever it accepts the raw one."""
        return make_wrapper(self, optimizer, member, options)

    def prepare(self, model: Any, optimizer: Any | None, plan: CastPlan) -> Any:
        """Let a model that was made before `init` cast."""
        prepared = casting.prepare(model, plan)
        return prepared if optimizer is None else (prepared, optimizer)
