"""float32 master weights behind a low-precision model."""

from __future__ import annotations

from typing import Any


class MasterWeights:
    """The pairs of low-precision parameters and their float32 copies; being written."""


def of(optimizer: Any) -> MasterWeights | None:
    """Give the master weights of a raw optimizer, if `prepare` made any. Sync: none."""
    return getattr(optimizer, "ampx_masters", None)
