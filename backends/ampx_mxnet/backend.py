"""The verbs of ampx in MXNet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import ampx
from ampx.backend import CastPlan, Unscaled
from ampx.protocol import Member

from . import casting, devices, dtypes, gradients
from .compat import mx
from .losses import inspect_loss, scale_loss
from .prepare import prepare
from .step import AmpTrainer
from .wrapping import make_wrapper


class MXNetBackend(ampx.GenericBackend):
    """MXNet 1.9.1: its own amp for casting, its gluon trainer and finiteness kernel for loss scaling."""

    name: ClassVar[str] = "mxnet"
    optimizers: ClassVar[str] = "a gluon.Trainer"
    capabilities: ClassVar[ampx.Capabilities] = ampx.Capabilities(
        devices=("gpu", "cpu"),
        dtypes=frozenset({"float16", "bfloat16"}),
        levels=frozenset({"O0", "O1", "O2", "O3"}),
        gradients="implicit",
        autocast="scoped",
        op_lists=True,
        clipping=True,
        per_loss_scales=True,
        vector_losses=True,
    )
    offers: ClassVar[Mapping[str, str]] = {
        "probe": "ampx_mxnet.numerics:MXNetProbe",
        "converter": "ampx_mxnet.inference:MXNetConverter",
        "automation": "ampx_mxnet.run:MXNetAutomation",
        "demo": "ampx_mxnet.demo:MxnetTrainer",
    }

    # Verbs that stand in modules of their own; those that take the backend are methods as they are.
    device = staticmethod(devices.describe)
    autocast = staticmethod(casting.region)
    check_plan = staticmethod(casting.check_plan)
    activate = staticmethod(casting.activate)
    cast = staticmethod(dtypes.cast)
    widest = staticmethod(dtypes.widest)
    inspect_loss = staticmethod(inspect_loss)
    scale = staticmethod(scale_loss)
    prepare = staticmethod(prepare)

    def is_optimizer(self, candidate: object) -> bool:
        return isinstance(candidate, mx.gluon.Trainer) and not isinstance(candidate, AmpTrainer)

    def deactivate(self, plan: CastPlan) -> None:
        """Undo `activate`, which MXNet itself cannot."""
        casting.deactivate()

    def enter_thread(self, plan: CastPlan) -> None:
        """Do nothing: MXNet's amp is on in every thread."""

    def gradients(self, optimizer: Any) -> Any:
        """List the gradients that a backward wrote since the last step, by context and dtype."""
        return gradients.collect(optimizer, True)

    def zero_gradients(self, optimizer: Any) -> None:
        gradients.clear(optimizer)

    def unscale(self, grads: Any, scale: Any) -> Unscaled:
        return Unscaled(grads, gradients.unscale(grads, scale))

    def apply(self, optimizer: Any, grads: Any) -> None:
        """Update with what hangs on the parameters; a batch size of 1 leaves the gradients as they are."""
        optimizer.update(1, ignore_stale_grad=True)

    def wrap_optimizer(self, optimizer: Any, member: Member, options: Mapping[str, Any]) -> Any:
        return make_wrapper(self, optimizer, member, options)

    def nonfinite_parameters(self, optimizer: Any, model: Any | None) -> list[tuple[str, int, int]]:
        return gradients.name_nonfinite(optimizer.trainer, model)
