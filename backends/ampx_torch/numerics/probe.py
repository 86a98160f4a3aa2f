"""The contract of the precision debugger: its verbs, in one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ampx.backend import CastPlan, Device
from ampx.numerics.probe import Probe, Replayed, Step

from .forcing import SIMULATED, force
from .replaying import clock, replay
from .watching import watch


class TorchProbe(Probe):
    """Looks into modules of torch."""

    watch = staticmethod(watch)
    force = staticmethod(force)
    seed = staticmethod(torch.manual_seed)

    def simulates(self, device: Device) -> frozenset[str]:
        return frozenset(SIMULATED)

    def replay(self, model: Any, step: Step, plan: CastPlan | None, scale: float = 1.0) -> Replayed:
        return replay(self.backend, model, step, plan, scale)

    def clock(self, model: Any, step: Step, plan: CastPlan | None) -> Callable[[], float]:
        return clock(self.backend, model, step, plan)

    def peak_memory(self) -> int | None:
        """Return the peak of torch's allocator on the present GPU; None without one."""
        return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
