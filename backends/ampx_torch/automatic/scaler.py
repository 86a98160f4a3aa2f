"""A script's own `GradScaler`: refused, or a front for the loss scales of ampx.

The managed optimizers scale, unscale, skip and move their loss scales by themselves, so that most methods have
nothing left to do. Every optimizer has a loss scale of its own; the scaler tells the first one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import torch
from torch.amp.grad_scaler import GradScaler

import ampx
from ampx.scale_state import LossScale

from .managing import Manager
from .native import ADVICE, asked_by_script

_HELD: Final = "_ampx_held"


@contextmanager
def scaler_watched(manager: Manager) -> Iterator[None]:
    """Patch the methods of GradScaler that scripts call; its older names inherit them."""
    front = Front(manager)
    true = GradScaler.__init__

    def make(self: GradScaler, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        ours = asked_by_script() and not manager.stood_down
        absent = ours and device == "cuda" and not torch.cuda.is_available()  # where torch would switch itself off
        true(self, "cpu" if absent else device, *args, **kwargs)
        if ours and self.is_enabled():
            front.take(self)

    replaced: dict[str, Callable[..., Any]] = {
        "scale": front.scale,
        "unscale_": front.unscale_,
        "step": front.step,
        "update": front.update,
        "get_scale": front.get_scale,
        "state_dict": front.state_dict,
        "load_state_dict": front.load_state_dict,
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(GradScaler, "__init__", make))
        for name, method in replaced.items():
            stack.enter_context(mock.patch.object(GradScaler, name, _chosen(front, name, method)))
        yield


def _chosen(front: Front, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Give a method that is ampx's for scalers of the script, and torch's for others."""
    native = getattr(GradScaler, name)

    def call(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
        return (method if self.__dict__.get("_ampx") is front else native)(self, *args, **kwargs)

    return call


class Front:
    """What a script's GradScaler does."""

    def __init__(self, manager: Manager) -> None:
        """Remember whose optimizers there are."""
        self._manager = manager

    def take(self, scaler: GradScaler) -> None:
        """Refuse a scaler, or have its settings hold for the optimizers."""
        run = self._manager.run
        if not run.settings.replace_native:
            run.refuse(f"the script makes a GradScaler of its own; {ADVICE}")
        scaler.__dict__["_ampx"] = self
        late = self._manager.config is None
        self._manager.config = _config(scaler, scaler._init_scale)
        if self._manager.follows:
            self._manager.settle()
            if late:
                self._load_known(self._manager.config, 0)

    def scale(self, scaler: GradScaler, outputs: Any) -> Any:
        """Give the losses as they are: backward scales them for the optimizers that it reaches."""
        return outputs

    def unscale_(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Make the gradients of an optimizer true; once is enough."""
        managed = optimizer.__dict__.get("_ampx_managed")
        if managed is not None and managed.wrapped is not None:
            self._manager.unscale(managed)

    def step(self, scaler: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step, or skip. Until `update`, the scaler tells what it told before.

        Raises:
            RuntimeError: There is a closure, which GradScaler never took.
        """
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        scaler.__dict__.setdefault(_HELD, self._where(scaler))
        return optimizer.step(*args, **kwargs)

    def update(self, scaler: GradScaler, new_scale: Any = None) -> None:
        """Tell the new scale from now on, which moved with the step; take one that the script sets by hand."""
        scaler.__dict__.pop(_HELD, None)
        if new_scale is not None:
            self._load(_config(scaler, float(new_scale)), 0)

    def get_scale(self, scaler: GradScaler) -> float:
        """Give the loss scale of the first optimizer; between `step` and `update`, the one before the step.

        Scripts compare it before and after `update` to see whether the step was skipped.
        """
        return self._told(scaler)[0]

    def state_dict(self, scaler: GradScaler) -> dict[str, Any]:
        """Give what torch's GradScaler would save."""
        scale, tracker = self._told(scaler)
        return {
            "scale": scale,
            "growth_factor": scaler._growth_factor,
            "backoff_factor": scaler._backoff_factor,
            "growth_interval": scaler._growth_interval,
            "_growth_tracker": tracker,
        }

    def _told(self, scaler: GradScaler) -> tuple[float, int]:
        held: tuple[float, int] | None = scaler.__dict__.get(_HELD)
        return self._where(scaler) if held is None else held

    def _where(self, scaler: GradScaler) -> tuple[float, int]:
        """Give scale and growth tracker of the first optimizer."""
        for one in self._manager.all()[:1]:
            assert one.wrapped is not None
            group = one.wrapped.ampx_member.group
            group.resolve()
            return one.wrapped.loss_scale, int(group.states[0].growth_tracker)
        return float(scaler._init_scale) if self._manager.scales else 1.0, 0

    def load_state_dict(self, scaler: GradScaler, state_dict: dict[str, Any]) -> None:
        """Take over what torch's GradScaler saved, for the optimizers made so far and those to come."""
        ampx.import_state(state_dict)  # for its errors
        scaler.__dict__.pop(_HELD, None)
        scaler._growth_factor = state_dict["growth_factor"]
        scaler._backoff_factor = state_dict["backoff_factor"]
        scaler._growth_interval = state_dict["growth_interval"]
        self._load(_config(scaler, float(state_dict["scale"])), int(state_dict["_growth_tracker"]))

    def _load(self, config: LossScale, tracker: int) -> None:
        self._manager.config = config
        if self._manager.scales:
            self._manager.all()  # wraps them
            self._load_known(config, tracker)

    def _load_known(self, config: LossScale, tracker: int) -> None:
        for one in self._manager.known():
            if one.wrapped is not None:
                one.wrapped.ampx_member.group.load(config, {0: _state(config, tracker)})


def _state(config: LossScale, tracker: int) -> ampx.LossScaleState:
    start = config.initial_state()
    return ampx.LossScaleState(start.scale, tracker, start.hysteresis_tracker, 0)


def _config(scaler: GradScaler, scale: float) -> LossScale:
    return LossScale(
        init_scale=scale,
        growth_factor=scaler._growth_factor,
        backoff_factor=scaler._backoff_factor,
        growth_interval=scaler._growth_interval,
        min_scale=min(1.0, scale),
        max_scale=max(2.0**24, scale),
    )
