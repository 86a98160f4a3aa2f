"""Calls operations of `amp_C`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class MultiTensorApply:
    """Calls an operation on lists of tensors.

    Attributes:
        available: True: the operations need no compiled extension.
        chunk_size: Passed on as apex did; torch's kernels choose their own.
    """

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: torch.Tensor,
        tensor_lists: Sequence[Sequence[torch.Tensor]],
        *args: Any,
    ) -> Any:
        """Return what `op(chunk_size, noop_flag_buffer, tensor_lists, *args)` gives."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
