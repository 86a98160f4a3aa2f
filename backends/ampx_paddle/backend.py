"""The verbs of ampx in PaddlePaddle."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import paddle

import ampx
from ampx.backend import CastPlan, Device, LossInfo, Unscaled
from ampx.policy import Dtype
from ampx.protocol import Member
from ampx.run import Run

from . import casting, devices, gradients
from .losses import inspect_loss, scale_loss
from .prepare import prepare
from .static import StaticOptimizer
from .step import AmpOptimizer
from .wrapping import make_wrapper


class PaddleBackend(ampx.GenericBackend):
    """PaddlePaddle: auto_cast for casting, Paddle's own check-and-unscale kernel for loss scaling."""

    name: ClassVar[str] = "paddle"
    capabilities: ClassVar[ampx.Capabilities] = ampx.Capabilities(
        devices=("gpu", "cpu"),
        dtypes=frozenset({"float16", "bfloat16"}),
        levels=frozenset({"O0", "O1", "O2"}),
        gradients="implicit",
        autocast="scoped",
        promotes=True,
        clipping=True,
        op_lists=True,
        master_weights=True,
        per_loss_scales=True,
        closures=True,
        sparse=True,
        distributed=True,
        names_gradients=True,
        automates=True,
    )

    def device(self, name: str) -> Device:
        """Describe a device."""
        return devices.describe(name)

    def is_optimizer(self, candidate: object) -> bool:
        """Return whether this is a Paddle optimizer, not wrapped."""
        wrapped = isinstance(candidate, (AmpOptimizer, StaticOptimizer))
        return isinstance(candidate, paddle.optimizer.Optimizer) and not wrapped

    def autocast(self, plan: CastPlan, enabled: bool) -> AbstractContextManager[Any]:
        """Return an auto_cast region."""
        return casting.region(plan, enabled)

    def check_plan(self, plan: CastPlan) -> CastPlan:
        """Resolve the op lists."""
        return casting.check_plan(plan)

    def activate(self, plan: CastPlan) -> None:
        """Switch auto_cast on for the calling thread: Paddle keeps the switch by thread."""
        casting.activate(plan)

    def deactivate(self, plan: CastPlan) -> None:
        """Undo `activate`."""
        casting.deactivate()

    def cast(self, tree: Any, dtype: Dtype) -> Any:
        """Cast the floating tensors of a tree."""
        return casting.cast(tree, dtype)

    def widest(self, tree: Any, at_least: Dtype) -> Dtype:
        """Return the widest dtype among the floating tensors of a tree."""
        return casting.widest(tree, at_least)

    def inspect_loss(self, loss: Any, check_nan: bool | None) -> LossInfo:
        """Return what `scale_loss` has to know about a loss."""
        return inspect_loss(loss, check_nan)

    def scale(self, loss: Any, scale: Any) -> Any:
        """Return the loss in float32 times the scale."""
        return scale_loss(loss, scale)

    def gradients(self, optimizer: Any) -> list[Any]:
        """List the parameters that have a gradient: Paddle replaces sparse gradients, so they are named by owner."""
        return gradients.collect(optimizer)

    def zero_gradients(self, optimizer: Any) -> None:
        """Forget the gradients."""
        optimizer.clear_grad()

    def unscale(self, grads: Any, scale: Any) -> Unscaled:
        """Divide gradients by the scale in place and test them, in one pass."""
        return Unscaled(grads, gradients.unscale(grads, scale))

    def clip(self, grads: Any, max_norm: float | None, max_value: float | None) -> tuple[Any, Any]:
        """Clip true gradients in place."""
        return grads, gradients.clip(grads, max_norm, max_value)

    def apply(self, optimizer: Any, grads: Any) -> None:
        """Run the raw optimizer, with casting off."""
        if paddle.amp.is_autocast_enabled():
            with casting.off():
                optimizer.step()
        else:
            optimizer.step()

    def wrap_optimizer(self, optimizer: Any, member: Member, options: Mapping[str, Any]) -> Any:
        """Return a Paddle optimizer that delegates to the raw one."""
        return make_wrapper(self, optimizer, member, options)

    def prepare(self, model: Any, optimizer: Any | None, plan: CastPlan) -> Any:
        """Decorate a model and its optimizer, as the level says."""
        return prepare(model, optimizer, plan)

    def nonfinite_parameters(self, optimizer: Any, model: Any | None) -> list[tuple[str, int, int]]:
        """List the parameters with non-finite gradients."""
        return gradients.name_nonfinite(optimizer.optimizer, model)

    def seed(self, number: int) -> None:
        """Seed Paddle, whose random numbers are then the same in every run."""
        paddle.seed(number)

    def peak_memory(self) -> int | None:
        """Return the peak of Paddle's allocator on the present GPU; None without one."""
        return paddle.device.cuda.max_memory_allocated() if paddle.device.is_compiled_with_cuda() else None

    def automate(self, run: Run) -> AbstractContextManager[Any]:
        """Return a region in which unedited scripts train in mixed precision."""
        from .run import automate  # patches, which nothing else should come near

        return automate(run)

    def demo(self) -> Any:
        """Return the trainer behind `ampx demo`."""
        from .demo import PaddleTrainer  # scikit-learn is needed for the demo only

        return PaddleTrainer()
