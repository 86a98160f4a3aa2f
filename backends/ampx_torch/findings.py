"""Finiteness and norm of the gradients that wait for a step, and whether they were clipped."""

from __future__ import annotations

from typing import Any

import torch

from ampx.protocol import NotCopied


class Findings(NotCopied):
    """Results of checks of one optimizer's gradients since its last step.

    Attributes:
        checked: Finiteness by loss id of gradients that are unscaled already: bools, or flags on a device that nobody
            has read, which are set where something overflowed.
        revealed: The unscaled gradients may have changed since they were tested: the step tests them again.
        norm: Their norm before clipping; None where nobody measured it.
        clipped: They are clipped as `wrap_optimizer` was asked to.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget gradients that were used or cleared."""
        self.checked: dict[int, Any] = {}
        self.revealed = self.clipped = False
        self.norm: Any = None

    def joined(self, loss_id: int, finite: Any) -> Any:
        """Return the finiteness of more gradients of a loss together with what was found of it before."""
        earlier = self.checked[loss_id]
        return torch.maximum(earlier, finite) if isinstance(finite, torch.Tensor) else earlier and finite

    def note_norm(self, norm: Any) -> None:
        """Keep the first norm that was measured: later ones are of clipped gradients."""
        if self.norm is None:
            self.norm = norm

    def unread(self) -> list[torch.Tensor]:
        """List the flags that were not read."""
        return [finite for finite in self.checked.values() if isinstance(finite, torch.Tensor)]

    def take(self) -> dict[int, bool]:
        """Return and forget the finiteness so far, by loss id. Sync: where it was not read yet."""
        checked, self.checked = self.checked, {}
        return {
            loss_id: not bool(finite) if isinstance(finite, torch.Tensor) else finite
            for loss_id, finite in checked.items()
        }
