"""Paddle's GradScaler, with its usual methods, over the loss scale of wrapped optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import paddle

import ampx
from ampx.errors import InvalidOptionError, NotWrappedError, UnsupportedByBackendError
from ampx.saved_state import parse_state
from ampx.scale_state import LossScale, LossScaleState

from . import casting
from .step import AmpOptimizer


def _widened(layer: Any, inputs: Any, outputs: Any) -> Any:
    """Return a network's outputs in float32: a model hands them to its metrics as arrays, where bfloat16 is bits."""
    return casting.each(outputs, lambda tensor: tensor.astype("float32") if tensor.dtype in casting.LOW else tensor)


class GradScaler(paddle.amp.GradScaler):
    """A `paddle.amp.GradScaler` for scripts and for Paddle's own loops, which call one.

    It holds no state: scale, counters and finiteness are the wrapped optimizers', each by itself. So it is right with
    several optimizers, on the CPU, with any numpy, and whatever `auto_cast` came before; and it prints nothing.
    """

    def __init__(self, *optimizers: AmpOptimizer) -> None:
        """Serve optimizers that `ampx.wrap_optimizer` returned: all that a scaled loss has gradients for.

        Wrap them as one list to share one scale.
        """
        super().__init__(enable=False)
        if not optimizers:
            raise InvalidOptionError(
                "GradScaler got no optimizer; accepted: wrapped ones. Pass the result of ampx.wrap_optimizer(opt)."
            )
        for optimizer in optimizers:
            if not isinstance(optimizer, AmpOptimizer):
                raise NotWrappedError(
                    f"GradScaler got {type(optimizer).__name__}, which wrap_optimizer did not return; accepted: "
                    f"wrapped optimizers. Pass the result of ampx.wrap_optimizer(opt)."
                )
        self._optimizers = list(optimizers)

    @property
    def _group(self) -> Any:
        return self._optimizers[0].ampx_member.group

    def attach(self, model: Any) -> None:
        """Make `model.fit` and `model.train_batch` scale their losses with this scaler, and cast as the session says.

        What the network returns is float32 then, for losses, metrics and predictions.

        Args:
            model: A `paddle.Model`, after `model.prepare(opt, loss, amp_configs="O1")` with the wrapped optimizer;
                call it again after every `prepare`.

        Raises:
            InvalidOptionError: The model was prepared without `amp_configs`, or with another optimizer; or the session
                casts nothing and Paddle would, on a GPU.
        """
        if getattr(model, "_optimizer", None) not in self._optimizers or model._adapter._amp_level == "O0":
            raise InvalidOptionError(
                "attach got a model that does not train one of this scaler's optimizers in mixed precision; accepted: "
                "a prepared one. Call model.prepare(opt, loss, amp_configs='O1') with the wrapped optimizer first."
            )
        plan = self._optimizers[0]._plan
        if plan is not None and plan.level != "O0":
            # Native defect: the model casts to float16 by Paddle's lists, whatever the dtype and the lists around it.
            arguments = casting.options(plan)
            model._adapter._amp_level = arguments.pop("level")
            model._adapter._amp_custom_lists = arguments
            if _widened not in model.network._forward_post_hooks.values():
                model.network.register_forward_post_hook(_widened)
        elif not paddle.get_device().startswith("cpu"):
            raise InvalidOptionError(
                f"attach got a model that casts to float16 on {paddle.get_device()!r} wherever it scales its loss, in "
                f"a session of level O0, which casts nothing; accepted: O1 to O3. Use ampx.init(level='O1'), with "
                f"dtype='bfloat16' where float16 overflows."
            )
        model._scaler = self

    def scale(self, var: Any) -> Any:
        """Return the loss in float32 times the scale; see `ampx.scale_loss`."""
        with ampx.scale_loss(var, self._optimizers) as scaled:
            return scaled

    def unscale_(self, optimizer: Any) -> None:
        """Unscale the pending gradients of an optimizer. Sync: one a dtype."""
        self._own(optimizer).ampx_unscale()

    def step(self, optimizer: Any) -> None:
        """Check, apply or skip; the scale moves with the last optimizer that shares it. Sync: one a dtype."""
        self._own(optimizer).step()

    def update(self) -> None:
        """Do nothing: `step` has moved the scale."""

    def minimize(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step, as Paddle's `minimize` does after backward. Sync: one a dtype."""
        return self._own(optimizer).minimize(*args, **kwargs)

    def _own(self, optimizer: Any) -> AmpOptimizer:
        for wrapped in self._optimizers:
            if optimizer is wrapped or optimizer is wrapped.optimizer:
                return wrapped
        raise NotWrappedError(
            f"this GradScaler was called with {type(optimizer).__name__}, an optimizer that it was not made for; "
            f"accepted: the wrapped ones. Pass all of them when making the GradScaler."
        )

    # -- numbers: read from the loss scale, set on it --------------------------------------------------

    def is_enable(self) -> bool:
        """Return whether losses are scaled."""
        return bool(self._group.enabled)

    def is_use_dynamic_loss_scaling(self) -> bool:
        """Return whether the scale moves."""
        return bool(self._group.enabled and self._group.config.dynamic)

    def get_init_loss_scaling(self) -> float:
        """Return the first scale."""
        return float(self._group.config.init_scale)

    def set_init_loss_scaling(self, new_init_loss_scaling: float) -> None:
        """Set the scale, as Paddle does."""
        self._configure(True, init_scale=float(new_init_loss_scaling))

    @property
    def _scale(self) -> paddle.Tensor:
        """The scale by the name under which trainers read and set it; of shape [1], float32."""
        return paddle.to_tensor([self._group.states[0].scale], "float32")

    @_scale.setter
    def _scale(self, value: Any) -> None:
        if value is not None:  # as Paddle's constructor has it
            self.set_init_loss_scaling(float(np.asarray(value).item()))

    def get_incr_ratio(self) -> float:
        """Return the growth factor."""
        return float(self._group.config.growth_factor)

    def set_incr_ratio(self, new_incr_ratio: float) -> None:
        """Set the growth factor."""
        self._configure(growth_factor=new_incr_ratio)

    def get_decr_ratio(self) -> float:
        """Return the backoff factor."""
        return float(self._group.config.backoff_factor)

    def set_decr_ratio(self, new_decr_ratio: float) -> None:
        """Set the backoff factor."""
        self._configure(backoff_factor=new_decr_ratio)

    def get_incr_every_n_steps(self) -> int:
        """Return the growth interval."""
        return int(self._group.config.growth_interval)

    def set_incr_every_n_steps(self, new_incr_every_n_steps: int) -> None:
        """Set the growth interval."""
        self._configure(growth_interval=new_incr_every_n_steps)

    def get_decr_every_n_nan_or_inf(self) -> int:
        """Return the hysteresis."""
        return int(self._group.config.hysteresis)

    def set_decr_every_n_nan_or_inf(self, new_decr_every_n_nan_or_inf: int) -> None:
        """Set the hysteresis."""
        self._configure(hysteresis=new_decr_every_n_nan_or_inf)

    def _configure(self, restart: bool = False, **changes: Any) -> None:
        for group in self._groups():
            config = replace(group.config, **changes)
            group.load(config, {} if restart else group.states)

    def _groups(self) -> list[Any]:
        groups = [optimizer.ampx_member.group for optimizer in self._optimizers]
        return list({id(group): group for group in groups}.values())

    # -- state: Paddle's own form, so that plain Paddle reads it -----------------------------------------

    def state_dict(self) -> Any:
        """Return the first optimizer's scale in Paddle's form (`amp.state_dict()` has them all)."""
        if not self.is_enable():
            return {}
        config: LossScale = self._group.config
        state: LossScaleState = self._group.states[0]
        return {
            "scale": np.array([state.scale], np.float32),
            "incr_ratio": config.growth_factor,
            "decr_ratio": config.backoff_factor,
            "incr_every_n_steps": config.growth_interval,
            "decr_every_n_nan_or_inf": config.hysteresis,
            "incr_count": state.growth_tracker,
            "decr_count": config.hysteresis - state.hysteresis_tracker,
            "use_dynamic_loss_scaling": config.dynamic,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state that this class or plain Paddle saved; it holds one scale."""
        groups = self._groups()
        if len(groups) > 1:
            raise UnsupportedByBackendError(
                f"this GradScaler serves {len(groups)} loss scales, and Paddle's state holds one; accepted: optimizers "
                f"that share a scale. Use amp.load_state_dict, or wrap the optimizers as one list."
            )
        if not groups[0].enabled:
            return
        ((config, states),) = parse_state(ampx.import_state(state_dict))
        # Paddle's state has no first scale: a loaded one takes its place, as in Paddle's own scaler.
        groups[0].load(replace(config, init_scale=states[0].scale), states)
