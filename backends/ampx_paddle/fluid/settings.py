"""What `install` was told."""

from __future__ import annotations


class _Chosen:
    """What decorated optimizers compute in."""

    dtype: str = "auto"


def chosen_dtype() -> str:
    """Give the dtype for decorated optimizers. Sync: none."""
    return _Chosen.dtype


def choose_dtype(dtype: str) -> None:
    """Set it. Sync: none."""
    _Chosen.dtype = dtype
