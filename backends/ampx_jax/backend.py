"""The verbs of ampx in JAX."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

import ampx
from ampx.backend import CastPlan, LossInfo, reject_unknown
from ampx.protocol import Member

from . import casting, devices, optimizer, prepare, rules
from .handle import StateHandle


class JaxBackend(ampx.Backend):
    """JAX: optax transformations whose state carries the loss scale, and a function transform that casts."""

    name: ClassVar[str] = "jax"
    capabilities: ClassVar[ampx.Capabilities] = ampx.Capabilities(
        devices=("cuda", "cpu"),
        dtypes=frozenset({"float16", "bfloat16"}),
        levels=frozenset({"O0", "O1", "O2", "O3"}),
        gradients="explicit",
        autocast="explicit",
        op_lists=True,
        clipping=True,
    )
    offers: ClassVar[Mapping[str, str]] = {
        "probe": "ampx_jax.numerics:JaxProbe",
        "converter": "ampx_jax.inference:JaxConverter",
        "automation": "ampx_jax.run:JaxAutomation",
        "demo": "ampx_jax.demo:JaxTrainer",
    }

    # Verbs that stand in modules of their own; those that take the backend are methods as they are.
    device = staticmethod(devices.describe)
    check_plan = staticmethod(rules.resolve)
    cast = staticmethod(casting.cast)
    widest = staticmethod(casting.widest)
    prepare = staticmethod(prepare.prepare)

    def is_optimizer(self, candidate: object) -> bool:
        return isinstance(candidate, optax.GradientTransformation)

    def autocast(self, plan: CastPlan, enabled: bool) -> AbstractContextManager[Any]:
        """Return a region that `ampx_jax.autocast` obeys."""
        return casting.region(rules.resolve(plan), enabled)

    def activate(self, plan: CastPlan) -> None:
        """Let `ampx_jax.autocast` cast in the calling thread: JAX keeps what its cache depends on by thread."""
        casting.switch(rules.resolve(plan))

    def deactivate(self, plan: CastPlan) -> None:
        casting.switch(None)

    def inspect_loss(self, loss: Any, check_nan: bool | None) -> LossInfo:
        """Return what `scale_loss` has to know; whether a traced loss is NaN cannot be known."""
        if not casting.is_array(loss):
            raise ampx.LossDtypeError(
                f"scale_loss got {type(loss).__name__}; accepted: a JAX array. Pass what the loss function returned."
            )
        concrete = not isinstance(loss, jax.core.Tracer)
        look = concrete and loss.size == 1 and jnp.issubdtype(loss.dtype, jnp.floating)
        if check_nan is None:
            look = look and all(device.platform == "cpu" for device in jnp.asarray(loss).devices())
        nan = bool(jnp.isnan(loss).all()) if look and check_nan is not False else None
        return LossInfo(loss.size, str(loss.dtype), jnp.issubdtype(loss.dtype, jnp.floating), True, nan)

    def scale(self, loss: Any, scale: Any) -> Any:
        return loss.astype(jnp.float32) * scale

    def wrap_optimizer(self, optimizer: Any, member: Member, options: Mapping[str, Any]) -> Any:
        """Return a transformation whose state carries the loss scale."""
        reject_unknown(self.name, options, ("axis_name",))
        return _wrap(optimizer, member.group, options)

    def state_handle(self, state: Any, call: str) -> StateHandle:
        if isinstance(state, optax.GradientTransformation) and isinstance(state.update, optimizer.Update):
            raise ampx.NotWrappedError(
                f"{call} got a wrapped transformation, but the loss scale is in its state; accepted: what its init or "
                f"update returned, or what holds that. Pass opt_state in place of tx."
            )
        return StateHandle(state, call)

    def nonfinite_parameters(self, optimizer: Any, model: Any | None) -> list[tuple[str, int, int]]:
        """List what the last step of an optimizer state counted; names are the keys of the parameters' tree."""
        return StateHandle(optimizer, "nonfinite_parameters").ampx_nonfinite


_wrap = optimizer.wrap  # the verb's argument is called like the module
