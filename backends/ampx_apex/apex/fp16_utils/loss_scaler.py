"""The loss scales of `FP16_Optimizer`, on the state machine that all of ampx uses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import torch

from ampx.scale_state import FLOAT32_MAX, LossScale, next_state, round_to_float32

_LIMIT: Final = 2.0**127  # the largest power of two in float32


class _Scaler:
    """The common part of the two loss scales: scale a loss, find overflows, and take note of them."""

    def __init__(self, config: LossScale) -> None:
        self._config = config
        self._state = config.initial_state()

    @property
    def cur_scale(self) -> float:
        """The factor for the next loss; may be set."""
        scale: float = self._state.scale
        return scale

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        LossScale.static(value)  # raises for what is no scale
        self._state = replace(self._state, scale=round_to_float32(float(value)))

    @property
    def loss_scale(self) -> float:
        """The factor for the next loss."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Return whether any gradient is not finite. Sync: one."""
        gradients = [parameter.grad for parameter in params if parameter.grad is not None]
        if not gradients:
            return False
        largest = torch._foreach_norm(gradients, float("inf"))
        norms = torch.stack([norm.to(largest[0].device, torch.float32) for norm in largest])
        return not bool(torch.isfinite(norms).all())

    def update_scale(self, overflow: bool) -> None:
        """Move the scale after a step."""
        self._state = next_state(self._config, self._state, not overflow)

    def scale_gradient(self, module: Any, grad_in: tuple[Any, ...], grad_out: tuple[Any, ...]) -> tuple[Any, ...]:
        """Scale gradients; to be registered as a backward hook of a module."""
        return tuple(None if gradient is None else self.loss_scale * gradient for gradient in grad_in)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Scale a loss and compute its gradients."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class LossScaler(_Scaler):
    """A loss scale that never moves."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(LossScale.static(scale))

    def __getstate__(self) -> dict[str, Any]:
        return {"cur_scale": self.cur_scale}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__init__(LossScale.static(state["cur_scale"]))


class DynamicLossScaler(_Scaler):
    """A loss scale that grows after `scale_window` finite steps and falls after each that is not, down to 1."""

    def __init__(self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        lowest = min(1.0, init_scale)
        config = LossScale(
            init_scale=init_scale,
            growth_factor=scale_factor,
            backoff_factor=1 / scale_factor,
            growth_interval=scale_window,
            min_scale=lowest,
            max_scale=max(_LIMIT, min(init_scale, FLOAT32_MAX)),
        )
        super().__init__(config)
        self.cur_iter = 0
        self.last_overflow_iter = -1

    @property
    def scale_factor(self) -> float:
        """The factor on growth."""
        return self._config.growth_factor

    @property
    def scale_window(self) -> int:
        """The finite steps in a row before growth."""
        return self._config.growth_interval

    def update_scale(self, overflow: bool) -> None:
        """Move the scale after a step."""
        super().update_scale(overflow)
        if overflow:
            self.last_overflow_iter = self.cur_iter
        self.cur_iter += 1

    def __getstate__(self) -> dict[str, Any]:
        names = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        DynamicLossScaler.__init__(self, state["cur_scale"], state["scale_factor"], state["scale_window"])
        self.cur_iter, self.last_overflow_iter = state["cur_iter"], state["last_overflow_iter"]
        finite = (self.cur_iter - 1 - self.last_overflow_iter) % self.scale_window
        low = min(1.0, state["cur_scale"])
        self._config = replace(self._config, min_scale=low)
        self._state = replace(self._state, growth_tracker=finite)
