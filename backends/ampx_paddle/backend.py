"""The verbs of ampx in PaddlePaddle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import paddle

import ampx
from ampx.backend import CastPlan, Unscaled

from . import casting, devices, gradients
from .losses import inspect_loss, scale_loss, watch_backward
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
        levels=frozenset({"O0", "O1", "O2", "O3"}),
        gradients="implicit",
        autocast="scoped",
        clipping=True,
        op_lists=True,
        per_loss_scales=True,
        sees_backward=True,
    )
    offers: ClassVar[Mapping[str, str]] = {
        "probe": "ampx_paddle.numerics:PaddleProbe",
        "converter": "ampx_paddle.inference:PaddleConverter",
        "automation": "ampx_paddle.run:PaddleAutomation",
        "demo": "ampx_paddle.demo:PaddleTrainer",
    }

    # Verbs that stand in modules of their own; those that take the backend are methods as they are.
    device = staticmethod(devices.describe)
    autocast = staticmethod(casting.region)
    check_plan = staticmethod(casting.check_plan)
    activate = staticmethod(casting.activate)
    cast = staticmethod(casting.cast)
    widest = staticmethod(casting.widest)
    inspect_loss = staticmethod(inspect_loss)
    scale = staticmethod(scale_loss)
    watch_backward = staticmethod(watch_backward)
    gradients = staticmethod(gradients.collect)
    prepare = staticmethod(prepare)
    wrap_optimizer = make_wrapper

    def is_optimizer(self, candidate: object) -> bool:
        wrapped = isinstance(candidate, (AmpOptimizer, StaticOptimizer))
        return isinstance(candidate, paddle.optimizer.Optimizer) and not wrapped

    def deactivate(self, plan: CastPlan) -> None:
        casting.deactivate()

    def zero_gradients(self, optimizer: Any) -> None:
        optimizer.clear_grad()

    def unscale(self, grads: Any, scale: Any) -> Unscaled:
        return Unscaled(grads, gradients.unscale(grads, scale))

    def clip(self, grads: Any, max_norm: float | None, max_value: float | None) -> tuple[Any, Any]:
        return grads, gradients.clip(grads, max_norm, max_value)

    def apply(self, optimizer: Any, grads: Any) -> None:
        """Run the raw optimizer, with casting off."""
        if paddle.amp.is_autocast_enabled():
            with casting.off():
                optimizer.step()
        else:
            optimizer.step()

    def nonfinite_parameters(self, optimizer: Any, model: Any | None) -> list[tuple[str, int, int]]:
        return gradients.name_nonfinite(optimizer.optimizer, model)
