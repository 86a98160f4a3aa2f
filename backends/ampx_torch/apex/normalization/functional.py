"""The functions behind the norms of `apex.normalization`.

The plain forms give the dtype of the input, the `mixed_dtype` forms that of the weight. Where autocast is on, all
tensors are rounded to its dtype first; torch's own layer norm would compute in float32 there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch.nn import functional

from ampx.errors import AmpxWarning

Shape: TypeAlias = int | Sequence[int]


def fused_layer_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Normalise the last dimensions to mean 0 and variance 1, then scale and shift.

    Args:
        input: Floating tensor whose last dimensions are `normalized_shape`.
        weight: Floating tensor of that shape.
        bias: Floating tensor of that shape.
        normalized_shape: The last dimensions.
        eps: Added to the variance.
        memory_efficient: True warns: torch's kernel keeps its input, the result is the same.

    Returns:
        A tensor of the input's shape and dtype.

    Sync: none.
    """
    return _layer_norm(input, normalized_shape, weight, bias, eps, memory_efficient, mixed=False)


def fused_layer_norm(
    input: torch.Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> torch.Tensor:
    """Normalise the last dimensions to mean 0 and variance 1; see `fused_layer_norm_affine`. Sync: none."""
    return _layer_norm(input, normalized_shape, None, None, eps, memory_efficient, mixed=False)


def mixed_dtype_fused_layer_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Do as `fused_layer_norm_affine`, and give the dtype of the weight. Sync: none."""
    return _layer_norm(input, normalized_shape, weight, bias, eps, memory_efficient, mixed=True)


def fused_rms_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Divide the last dimensions by their root mean square, then scale.

    Args:
        input: Floating tensor whose last dimensions are `normalized_shape`.
        weight: Floating tensor of that shape.
        normalized_shape: The last dimensions.
        eps: Added to the mean square.
        memory_efficient: True warns: torch's kernel keeps its input, the result is the same.

    Returns:
        A tensor of the input's shape and dtype.

    Sync: none.
    """
    return _rms_norm(input, normalized_shape, weight, eps, memory_efficient, mixed=False)


def fused_rms_norm(
    input: torch.Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> torch.Tensor:
    """Divide the last dimensions by their root mean square; see `fused_rms_norm_affine`. Sync: none."""
    return _rms_norm(input, normalized_shape, None, eps, memory_efficient, mixed=False)


def mixed_dtype_fused_rms_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Do as `fused_rms_norm_affine`, and give the dtype of the weight. Sync: none."""
    return _rms_norm(input, normalized_shape, weight, eps, memory_efficient, mixed=True)


def warn_about_memory(memory_efficient: bool) -> None:
    """Warn where the backward pass is asked to start from the output, which torch's kernels do not. Sync: none."""
    if memory_efficient:
        warnings.warn(
            "memory_efficient=True has no effect: torch's kernel keeps its input for the backward pass, and the result "
            "is the same. Leave it out.",
            AmpxWarning,
            stacklevel=3,
        )


def _layer_norm(
    x: torch.Tensor,
    shape: Shape,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    memory_efficient: bool,
    *,
    mixed: bool,
) -> torch.Tensor:
    warn_about_memory(memory_efficient)
    return _in_one_dtype(
        lambda tensor, own, shift: functional.layer_norm(tensor, _sizes(shape), own, shift, eps), x, weight, bias, mixed
    )


def _rms_norm(
    x: torch.Tensor, shape: Shape, weight: torch.Tensor | None, eps: float, memory_efficient: bool, *, mixed: bool
) -> torch.Tensor:
    warn_about_memory(memory_efficient)
    return _in_one_dtype(
        lambda tensor, own, _: functional.rms_norm(tensor, _sizes(shape), own, eps), x, weight, None, mixed
    )


def _sizes(shape: Shape) -> list[int]:
    return [shape] if isinstance(shape, int) else list(shape)


def _in_one_dtype(
    norm: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mixed: bool,
) -> torch.Tensor:
    """Run a norm of torch, which takes tensors of one dtype only, on those given."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        low = torch.get_autocast_dtype(device)
        x, weight, bias = _to(x, low), _to(weight, low), _to(bias, low)
    result = weight.dtype if mixed and weight is not None else x.dtype
    common = x.dtype
    for one in (weight, bias):
        common = common if one is None else torch.promote_types(common, one.dtype)
    with torch.autocast(device, enabled=False):
        return norm(_to(x, common), _to(weight, common), _to(bias, common)).to(result)


_Maybe = TypeVar("_Maybe", torch.Tensor, torch.Tensor | None)


def _to(tensor: _Maybe, dtype: torch.dtype) -> _Maybe:
    # Autocast leaves float64 alone.
    if tensor is None or (tensor.dtype == torch.float64 and dtype != torch.float64):
        return tensor
    return tensor.to(dtype)
