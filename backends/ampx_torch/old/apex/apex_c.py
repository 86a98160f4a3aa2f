"""The functions of `apex_C` that scripts call: many tensors in one, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy tensors of one dtype into one of one dimension."""
    return torch.cat([one.reshape(-1) for one in tensors])


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a flat tensor, of the shapes of these tensors one after the other."""
    parts = flat.split([one.numel() for one in tensors])
    return [part.view_as(one) for part, one in zip(parts, tensors, strict=True)]
