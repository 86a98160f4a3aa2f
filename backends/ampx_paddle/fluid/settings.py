"""What `install` was told."""

from __future__ import annotations


class _Chosen:
    """What decorated optimizers compute in."""

    dtype: str = "auto"


def chosen_dtype() -> str:
    """Return the dtype for decorated optimizers."""
    return _Chosen.dtype


def choose_dtype(dtype: str) -> None:
    """Set it."""
    _Chosen.dtype = dtype
