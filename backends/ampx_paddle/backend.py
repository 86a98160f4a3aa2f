"""The verbs of ampx in PaddlePaddle."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import paddle

import ampx
from ampx.backend import CastPlan, Unscaled
from ampx.run import Run

from . import casting, devices, gradients, inference, numerics
from .losses import inspect_loss, scale_loss, watch_backward
from .prepare import prepare
from .static import StaticOptimizer
from .step import AmpOptimizer
from .wrapping import make_wrapper


class PaddleBackend(ampx.GenericBackend):
    """PaddlePaddle: auto_cast for casting, Paddle's own check-and-unscale kernel for loss scaling."""

    name: ClassVar[str] = "paddle"
    rounds_unseen: ClassVar[bool] = True
    capabilities: ClassVar[ampx.Capabilities] = ampx.Capabilities(
        devices=("gpu", "cpu"),
        dtypes=frozenset({"float16", "bfloat16"}),
        levels=frozenset({"O0", "O1", "O2", "O3"}),
        gradients="implicit",
        autocast="scoped",
        promotes=True,
        clipping=True,
        op_lists=True,
        master_weights=True,
        per_loss_scales=True,
        closures=True,
        sparse=True,
        sees_backward=True,
        distributed=True,
        names_gradients=True,
        automates=True,
        watches=True,
        forces=True,
        replays=True,
        simulates=numerics.SIMULATED,
        converts=True,
    )

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
    watch = numerics.watch
    force = numerics.force
    replay = numerics.replay
    clock = numerics.clock
    convert = inference.convert
    infer = staticmethod(inference.infer)

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

    def seed(self, number: int) -> None:
        """Seed Paddle, whose random numbers are then the same in every run."""
        paddle.seed(number)

    def peak_memory(self) -> int | None:
        """Return the peak of Paddle's allocator on the present GPU; None without one."""
        return paddle.device.cuda.max_memory_allocated() if paddle.device.is_compiled_with_cuda() else None

    def automate(self, run: Run) -> AbstractContextManager[Any]:
        from .run import automate  # patches, which nothing else should come near

        return automate(run)

    def demo(self) -> Any:
        from .demo import PaddleTrainer  # scikit-learn is needed for the demo only

        return PaddleTrainer()
