"""`apex.multi_tensor_apply`: one call of an operation of `amp_C` for many tensors."""

from __future__ import annotations

from .multi_tensor_apply import MultiTensorApply as MultiTensorApply

multi_tensor_applier = MultiTensorApply(2048 * 32)

__all__ = ["MultiTensorApply", "multi_tensor_applier"]
