"""The norms of `apex.normalization`: modules, and functions under the names that scripts import.

The plain forms give the dtype of the input, the mixed ones that of the weight. Where autocast is on, all tensors are
rounded to its dtype first; torch's own layer norm would compute in float32 there. `memory_efficient=True` warns:
torch's kernels keep their input, and the result is the same.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from ampx.errors import AmpxWarning, UnsupportedByBackendError
from ampx_apex.apex.amp_c import in_float32

Shape: TypeAlias = int | Sequence[int]
Maybe: TypeAlias = torch.Tensor | None


def fused_layer_norm_affine(
    input: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Normalise the last dimensions to mean 0 and variance 1, then scale and shift; the dtype is the input's."""
    return _norm(functional.layer_norm, input, normalized_shape, (weight, bias), eps, memory_efficient)


def fused_layer_norm(
    input: torch.Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> torch.Tensor:
    """Normalise the last dimensions to mean 0 and variance 1."""
    return _norm(functional.layer_norm, input, normalized_shape, (None, None), eps, memory_efficient)


def mixed_dtype_fused_layer_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: Maybe,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Do as `fused_layer_norm_affine`, and give the dtype of the weight."""
    return _norm(functional.layer_norm, input, normalized_shape, (weight, bias), eps, memory_efficient, mixed=True)


def fused_rms_norm_affine(
    input: torch.Tensor, weight: Maybe, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> torch.Tensor:
    """Divide the last dimensions by their root mean square, then scale; the dtype is the input's."""
    return _norm(functional.rms_norm, input, normalized_shape, (weight,), eps, memory_efficient)


def fused_rms_norm(
    input: torch.Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> torch.Tensor:
    """Divide the last dimensions by their root mean square."""
    return _norm(functional.rms_norm, input, normalized_shape, (None,), eps, memory_efficient)


def mixed_dtype_fused_rms_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Do as `fused_rms_norm_affine`, and give the dtype of the weight."""
    return _norm(functional.rms_norm, input, normalized_shape, (weight,), eps, memory_efficient, mixed=True)


class _NormFunction:
    """Called as an autograd function of torch; whether autocast is on does not matter."""

    forward: ClassVar[Callable[..., torch.Tensor]]

    @classmethod
    def apply(cls, *arguments: Any) -> torch.Tensor:
        """Do as `forward`, without its first argument."""
        return cls.forward(None, *arguments)


class FusedLayerNormAffineFunction(_NormFunction):
    """`fused_layer_norm_affine`."""

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
        return _norm(functional.layer_norm, input, normalized_shape, (weight, bias), eps, memory_efficient, casts=False)


class FusedLayerNormFunction(_NormFunction):
    """`fused_layer_norm`."""

    @staticmethod
    def forward(
        ctx: None, input: torch.Tensor, normalized_shape: Shape, eps: float, memory_efficient: bool = False
    ) -> torch.Tensor:
        """Normalise."""
        return _norm(functional.layer_norm, input, normalized_shape, (None, None), eps, memory_efficient, casts=False)


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
        return _norm(functional.rms_norm, input, normalized_shape, (weight,), eps, memory_efficient, casts=False)


class FusedRMSNormFunction(_NormFunction):
    """`fused_rms_norm`."""

    @staticmethod
    def forward(
        ctx: None, input: torch.Tensor, normalized_shape: Shape, eps: float, memory_efficient: bool = False
    ) -> torch.Tensor:
        """Normalise."""
        return _norm(functional.rms_norm, input, normalized_shape, (None,), eps, memory_efficient, casts=False)


def manual_rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Divide the last dimensions by their root mean square in float32, then scale in the dtype of the weight."""
    norm = functional.rms_norm(in_float32(input), _sizes(normalized_shape), None, eps)
    if weight is None:
        return norm
    return weight * (norm.to(weight.dtype) if in_float32(weight) is not weight else norm)


class FusedLayerNorm(nn.LayerNorm):
    """Layer norm that gives the dtype of its input, and the dtype of autocast where that is on."""

    mixed = False

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        _refuse_plain(self, elementwise_affine)
        warn_about_memory(memory_efficient)
        super().__init__(_sizes(normalized_shape), eps, elementwise_affine)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise."""
        parameters = (self.weight, self.bias)
        return _norm(functional.layer_norm, input, self.normalized_shape, parameters, self.eps, mixed=self.mixed)


class FusedRMSNorm(nn.RMSNorm):
    """RMS norm that gives the dtype of its input, and the dtype of autocast where that is on."""

    mixed = False
    eps: float

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        _refuse_plain(self, elementwise_affine)
        warn_about_memory(memory_efficient)
        super().__init__(_sizes(normalized_shape), eps, elementwise_affine)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise."""
        parameters = (self.weight,)
        return _norm(functional.rms_norm, input, self.normalized_shape, parameters, self.eps, mixed=self.mixed)


class MixedFusedLayerNorm(FusedLayerNorm):
    """Layer norm that gives the dtype of its weight: a float32 norm in a float16 model gives float32."""

    mixed = True


class MixedFusedRMSNorm(FusedRMSNorm):
    """RMS norm that gives the dtype of its weight."""

    mixed = True


def _refuse_plain(norm: FusedLayerNorm | FusedRMSNorm, elementwise_affine: bool) -> None:
    if norm.mixed and not elementwise_affine:
        name = type(norm).__name__
        raise UnsupportedByBackendError(
            f"{name}(elementwise_affine=False) is not accepted: the dtype of its result is that of its weight. Use "
            f"{name.removeprefix('Mixed')}."
        )


def warn_about_memory(memory_efficient: bool) -> None:
    """Warn where the backward pass is asked to start from the output, which torch's kernels do not."""
    if memory_efficient:
        warnings.warn(
            "memory_efficient=True has no effect: torch's kernel keeps its input for the backward pass, and the result "
            "is the same. Leave it out.",
            AmpxWarning,
            stacklevel=3,
        )


def _sizes(shape: Shape) -> list[int]:
    return [shape] if isinstance(shape, int) else list(shape)


def _norm(
    kernel: Callable[..., torch.Tensor],
    x: torch.Tensor,
    shape: Shape,
    parameters: tuple[Maybe, ...],
    eps: float,
    memory_efficient: bool = False,
    *,
    mixed: bool = False,
    casts: bool = True,
) -> torch.Tensor:
    """Run a norm of torch, which takes tensors of one dtype only, on those that were passed."""
    warn_about_memory(memory_efficient)
    device = x.device.type
    tensors: tuple[Maybe, ...] = (x, *parameters)
    if casts and torch.is_autocast_enabled(device):
        low = torch.get_autocast_dtype(device)
        tensors = tuple(_to(tensor, low) for tensor in tensors)
    dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
    result = dtypes[1] if mixed and dtypes[1] is not None else dtypes[0]
    common = functools.reduce(torch.promote_types, [dtype for dtype in dtypes if dtype is not None])
    x, *rest = [_to(tensor, common) for tensor in tensors]
    with torch.autocast(device, enabled=False):
        return kernel(x, _sizes(shape), *rest, eps).to(result)


def _to(tensor: Maybe, dtype: torch.dtype) -> Any:
    # Autocast leaves float64 alone.
    if tensor is None or (tensor.dtype == torch.float64 and dtype != torch.float64):
        return tensor
    return tensor.to(dtype)
