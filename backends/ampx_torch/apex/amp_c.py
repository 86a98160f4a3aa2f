"""The operations of `amp_C` that scripts call, on torch's foreach kernels.

All take a chunk size, which is of no meaning here, an integer tensor that they set to 1 where they meet a value that
is not finite, and lists of tensors. They compute in float32 and round into the dtype of the tensors they write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from ampx.errors import InvalidOptionError

TensorLists: TypeAlias = Sequence[Sequence[torch.Tensor]]


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, scale: float) -> None:
    """Write `source * scale` for every tensor.

    Args:
        chunk_size: Of no meaning.
        noop_flag: Integer tensor of one element; set to 1 where a source is not finite, else left.
        tensor_lists: The sources, and the tensors to write.
        scale: The factor.

    Raises:
        InvalidOptionError: There are not two lists of one length.

    Sync: none.
    """
    sources, targets = _check("multi_tensor_scale", tensor_lists, 2)
    if sources:
        _flag(noop_flag, sources)
        torch._foreach_copy_(targets, torch._foreach_mul(_in_float32(sources), scale))


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, a: float, b: float, arg_to_check: int = -1
) -> None:
    """Write `a * x + b * y` for every pair of tensors.

    Args:
        chunk_size: Of no meaning.
        noop_flag: Integer tensor of one element; set to 1 where a checked tensor is not finite, else left.
        tensor_lists: All x, all y, and the tensors to write.
        a: The factor of x.
        b: The factor of y.
        arg_to_check: 0 checks x, 1 checks y, -1 checks both.

    Raises:
        InvalidOptionError: There are not three lists of one length, or `arg_to_check` is none of these.

    Sync: none.
    """
    xs, ys, targets = _check("multi_tensor_axpby", tensor_lists, 3)
    checked = {-1: [*xs, *ys], 0: xs, 1: ys}.get(arg_to_check)
    if checked is None:
        raise InvalidOptionError(
            f"multi_tensor_axpby(arg_to_check={arg_to_check!r}) is not accepted; accepted: 0 (x), 1 (y), -1 (both). "
            f"Change it."
        )
    if xs:
        _flag(noop_flag, checked)
        sums = torch._foreach_mul(_in_float32(xs), a)
        torch._foreach_add_(sums, _in_float32(ys), alpha=b)
        torch._foreach_copy_(targets, sums)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the L2 norm over all tensors, and where asked for the norm of each.

    Args:
        chunk_size: Of no meaning.
        noop_flag: Integer tensor of one element, of the device of the result; left as it is.
        tensor_lists: One list of tensors.
        per_tensor: Whether the norms of the tensors are given too.

    Returns:
        A float32 tensor of one element, and a float32 tensor of one element a tensor, or of none.

    Raises:
        InvalidOptionError: There is not one list.

    Sync: none.
    """
    (tensors,) = _check("multi_tensor_l2norm", tensor_lists, 1)
    if not tensors:
        return torch.zeros(1, device=noop_flag.device), torch.zeros(0, device=noop_flag.device)
    norms = torch.stack([one.to(tensors[0].device) for one in torch._foreach_norm(_in_float32(tensors))]).float()
    return torch.linalg.vector_norm(norms).reshape(1), norms if per_tensor else norms.new_zeros(0)


def _check(name: str, tensor_lists: TensorLists, count: int) -> list[list[torch.Tensor]]:
    lists = [list(one) for one in tensor_lists]
    if len(lists) != count or len({len(one) for one in lists}) > 1:
        raise InvalidOptionError(
            f"{name} got lists of {[len(one) for one in lists]} tensors; accepted: {count} of one length. Pass these."
        )
    return lists


def _in_float32(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [one.float() if one.dtype in (torch.float16, torch.bfloat16) else one for one in tensors]


def _flag(noop_flag: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    # A sum may overflow where no value is infinite; the largest magnitude cannot, and it carries NaN along.
    largest = [one.to(noop_flag.device) for one in torch._foreach_norm(tensors, float("inf"))]
    finite = torch.isfinite(torch.stack([one.float() for one in largest])).all()
    noop_flag.masked_fill_(~finite, 1)
