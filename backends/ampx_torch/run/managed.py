"""One optimizer of the script, with the wrapper of ampx that stands beside it."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch

from ampx_torch.delegation import TakenOver
from ampx_torch.gradients import unscale_into
from ampx_torch.optimizer import AmpOptimizer


class Managed:
    """One optimizer of the script.

    Attributes:
        raw: The script's own object. Its `step` is shadowed on the instance, where schedulers shadow it, too.
        wrapped: What `wrap_optimizer` made of it; None until the first backward or step, because a script may move
            its model, or hand the optimizer to a library of its own choice, before.
        group: Where the recorder counts its steps.
        busy: The wrapper, or the script's own GradScaler, is stepping, so that the raw optimizer must run.
        skips: Steps in a row that the script's own GradScaler skipped.
    """

    def __init__(self, raw: torch.optim.Optimizer, place: str = "") -> None:
        """Remember the raw optimizer, and the script's line that made it."""
        self.raw = raw
        self.place = place
        self.wrapped: AmpOptimizer | None = None
        self.group = -1
        self.busy = False
        self.skips = 0
        self.call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.returned: Any = None

    def run_raw(self, *args: Any, **kwargs: Any) -> Any:
        """Run the script's optimizer, with the arguments that the script gave beyond a closure."""
        given, named = self.call
        # Where apex.amp took the object over, its wrapper steps the twin, whose `step` is the shadow that calls this.
        raw = self.raw.optimizer if isinstance(self.raw, TakenOver) else self.raw
        self.returned = type(raw).step(raw, *(args or given), **(kwargs or named))
        return self.returned

    def rescale(self, factor: Any) -> None:
        """Multiply the gradients so that they carry this loss scale, and further ones may be added.

        Loss scales are powers of two, as far as they move by themselves, so no digit is lost.
        """
        wrapped = self.wrapped
        assert wrapped is not None
        member = wrapped.ampx_member
        if member.stage == "idle":
            return
        carried = member.factors.get(0, 1.0) if member.stage == "scaled" else 1.0
        buckets = wrapped.collect()
        if not buckets:
            wrapped.forget()  # they were cleared, by model.zero_grad() say
            return
        if carried is not factor and carried != factor:
            for bucket in buckets:
                flag = torch.zeros((), device=bucket[0].device)  # what is not finite stays so, and is found again
                unscale_into(bucket, flag, torch.as_tensor(factor / carried, dtype=torch.float32).to(flag.device))
        wrapped.take_checked()
        member.note_scaled(factor)

    def release(self) -> None:
        """Put the raw optimizer's own `step` back."""
        if isinstance(self.raw.__dict__.get("step"), MethodType):
            del self.raw.step
        else:
            self.busy = True  # a scheduler holds the shadow: from now on it runs the raw optimizer
        if self.wrapped is not None:
            self.wrapped.ampx_unwrap()
