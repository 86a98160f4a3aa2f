"""The functions behind the norms of `apex.normalization`.

The plain forms give the dtype of the input, the `mixed_dtype` forms that of the weight. Where autocast is on, all
tensors are rounded to its dtype first; torch's own layer norm would compute in float32 there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch
from torch.nn import functional

from ampx.errors import AmpxWarning
from ampx_torch.old.apex.amp_c import in_float32

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
    """
    return _layer_norm(input, normalized_shape, weight, bias, eps, memory_efficient, mixed=False)


def fused_layer_norm(
    input: torch.Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> torch.Tensor:
    """Normalise the last dimensions to mean 0 and variance 1; see `fused_layer_norm_affine`."""
    return _layer_norm(input, normalized_shape, None, None, eps, memory_efficient, mixed=False)


def mixed_dtype_fused_layer_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Do as `fused_layer_norm_affine`, and give the dtype of the weight."""
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
    """
    return _rms_norm(input, normalized_shape, weight, eps, memory_efficient, mixed=False)


def fused_rms_norm(
    input: torch.Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> torch.Tensor:
    """Divide the last dimensions by their root mean square; see `fused_rms_norm_affine`."""
    return _rms_norm(input, normalized_shape, None, eps, memory_efficient, mixed=False)


def mixed_dtype_fused_rms_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Do as `fused_rms_norm_affine`, and give the dtype of the weight."""
    return _rms_norm(input, normalized_shape, weight, eps, memory_efficient, mixed=True)


class _NormFunction:
    """Called as an autograd function of torch; whether autocast is on does not matter."""

    forward: ClassVar[Callable[..., torch.Tensor]]

    @classmethod
    def apply(cls, *args: Any) -> torch.Tensor:
        return cls.forward(None, *args)


class FusedLayerNormAffineFunction(_NormFunction):
    """`fused_layer_norm_affine`, with the shape after the bias."""

    @staticmethod
    def forward(
        ctx: None,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> torch.Tensor:
        """Normalise."""
        return _layer_norm(input, normalized_shape, weight, bias, eps, memory_efficient, mixed=False, casts=False)


class FusedLayerNormFunction(_NormFunction):
    """`fused_layer_norm`."""

    @staticmethod
    def forward(
        ctx: None, input: torch.Tensor, normalized_shape: Shape, eps: float, memory_efficient: bool = False
    ) -> torch.Tensor:
        """Normalise."""
        return _layer_norm(input, normalized_shape, None, None, eps, memory_efficient, mixed=False, casts=False)


class FusedRMSNormAffineFunction(_NormFunction):
    """`fused_rms_norm_affine`."""

    @staticmethod
    def forward(
        ctx: None,
        input: torch.Tensor,
        weight: torch.Tensor,
        normalized_shape: Shape,
        eps: float,
        memory_efficient: bool = False,
    ) -> torch.Tensor:
        """Normalise."""
        return _rms_norm(input, normalized_shape, weight, eps, memory_efficient, mixed=False, casts=False)


class FusedRMSNormFunction(_NormFunction):
    """`fused_rms_norm`."""

    @staticmethod
    def forward(
        ctx: None, input: torch.Tensor, normalized_shape: Shape, eps: float, memory_efficient: bool = False
    ) -> torch.Tensor:
        """Normalise."""
        return _rms_norm(input, normalized_shape, None, eps, memory_efficient, mixed=False, casts=False)


def manual_rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Divide the last dimensions by their root mean square in float32, then scale in the dtype of the weight.

    Args:
        input: Floating tensor whose last dimensions are `normalized_shape`.
        normalized_shape: The last dimensions.
        weight: Floating tensor of that shape, or None.
        eps: Added to the mean square.

    Returns:
        A tensor of the weight's dtype if that is a low precision, else of float32 or the input's wider dtype.
    """
    norm = functional.rms_norm(in_float32(input), _sizes(normalized_shape), None, eps)
    if weight is None:
        return norm
    return weight * (norm.to(weight.dtype) if in_float32(weight) is not weight else norm)


def warn_about_memory(memory_efficient: bool) -> None:
    """Warn where the backward pass is asked to start from the output, which torch's kernels do not."""
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
    casts: bool = True,
) -> torch.Tensor:
    warn_about_memory(memory_efficient)

    def norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.layer_norm(x, _sizes(shape), weight, bias, eps)

    return _in_one_dtype(norm, x, weight, bias, mixed, casts)


def _rms_norm(
    x: torch.Tensor,
    shape: Shape,
    weight: torch.Tensor | None,
    eps: float,
    memory_efficient: bool,
    *,
    mixed: bool,
    casts: bool = True,
) -> torch.Tensor:
    warn_about_memory(memory_efficient)

    def norm(x: torch.Tensor, weight: torch.Tensor | None, _: torch.Tensor | None) -> torch.Tensor:
        return functional.rms_norm(x, _sizes(shape), weight, eps)

    return _in_one_dtype(norm, x, weight, None, mixed, casts)


def _sizes(shape: Shape) -> list[int]:
    return [shape] if isinstance(shape, int) else list(shape)


def _in_one_dtype(
    norm: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mixed: bool,
    casts: bool,
) -> torch.Tensor:
    """Run a norm of torch, which takes tensors of one dtype only, on those given."""
    device = x.device.type
    if casts and torch.is_autocast_enabled(device):
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
