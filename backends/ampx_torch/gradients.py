"""Gradients of an optimizer: collect, unscale and check, clip."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, Final

import torch

from ampx.errors import LowPrecisionParametersError
from ampx.protocol import NotCopied

from .debug import name_parameters
from .folded_step import EPSILON, is_large, is_plain, reads_finite
from .trees import gradient_of, stored

# The reciprocal of a loss scale on a device, kept because scales change rarely.
_Reciprocals = dict[torch.device, tuple[float, torch.Tensor]]
_HAS_TOTAL_NORM: Final = hasattr(torch.nn.utils, "get_total_norm")  # torch 2.6 and later


class GradientSet(NotCopied):
    """The gradients behind an optimizer's parameter groups, sorted by device and dtype.

    The sorting is done once and checked cheaply afterwards; only the gradients are looked up in every step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, accepts_half: bool) -> None:
        self._optimizer = optimizer
        self._accepts_half = accepts_half
        self._parameters: list[torch.nn.Parameter] = []
        self._buckets: list[list[torch.nn.Parameter]] = []
        self._reciprocals: _Reciprocals = {}
        self._flags: dict[torch.device, torch.Tensor] = {}
        self._unusual = False  # some gradients were sparse: torch's kernel is not tried on them again
        # The parameters are on a CPU and mostly large, so that reading takes less time than torch's kernel.
        self.reads_fast = False

    def parameters(self) -> list[torch.nn.Parameter]:
        """List the parameters."""
        parameters: list[torch.nn.Parameter] = []
        for group in self._optimizer.param_groups:
            parameters += group["params"]
        return parameters

    def collect(self) -> list[list[torch.Tensor]]:
        """List the gradients that exist, one list a device, dtype and size: large or not."""
        parameters, before = self.parameters(), self._parameters
        if len(parameters) != len(before) or not all(map(is_, parameters, before)):
            self._sort(parameters)
        for bucket in self._buckets:
            if bucket[0].dtype is not bucket[-1].dtype:  # the model was converted since
                self._sort(parameters)
                break
        collected = []
        for bucket in self._buckets:
            gradients = [gradient for parameter in bucket if (gradient := gradient_of(parameter)) is not None]
            if gradients:
                collected.append(gradients)
        return collected

    def _sort(self, parameters: list[torch.nn.Parameter]) -> None:
        buckets: dict[Any, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            buckets.setdefault(_kind(parameter), []).append(parameter)
        self._buckets = list(buckets.values())
        self._parameters = parameters
        on_cpu = [bucket for bucket in self._buckets if bucket[0].is_cpu]
        large = sum(parameter.numel() for bucket in on_cpu if is_large(bucket[0]) for parameter in bucket)
        self.reads_fast = 2 * large > sum(map(torch.Tensor.numel, parameters))

    def unscale(
        self,
        gradients: Sequence[list[torch.Tensor]],
        scale: Any,
        fresh: bool,
        bounds: tuple[float, float] | None = None,
    ) -> list[torch.Tensor]:
        """Divide gradients by the scale in place and test them for inf and NaN, in one pass; return a flag a device.

        Fresh flags stay as they are; the others `finite` resets for the next step. `bounds` are those of a scale on the
        device: below 1, quotients may overflow. Where a float16 parameter came in after `wrap_optimizer` it raises, and
        nothing was divided.
        """
        flags: dict[torch.device, torch.Tensor] = {}
        if not self._accepts_half:
            for bucket in gradients:
                if bucket[0].dtype is torch.float16:
                    refuse_half(self._optimizer.param_groups)
        on_host = not isinstance(scale, torch.Tensor)
        reads = self.reads_fast and on_host and scale == 1.0  # nothing to write
        lowest, highest = (scale, scale) if on_host else bounds or (1.0, math.inf)
        for bucket in gradients:
            device = bucket[0].device
            flag = flags.get(device)
            if flag is None:
                flag = None if fresh else self._flags.get(device)
                if flag is None:
                    # Kept for later steps, which could not reset a tensor that was made in inference mode.
                    with torch.inference_mode(False):
                        flag = torch.zeros((), dtype=torch.float32, device=device)
                    if not fresh:
                        self._flags[device] = flag
                flags[device] = flag
            if reads and is_plain(bucket) and reads_finite(bucket):
                continue
            if self._unusual:
                bucket = [_plain_values(gradient) for gradient in bucket]
            kept = self._reciprocals.get(device)
            reciprocal = kept[1] if kept is not None and kept[0] is scale else self._reciprocal(device, scale)
            self._unusual |= unscale_into(bucket, flag, reciprocal, 1.0 / lowest if lowest == highest else None)
            if lowest < 1.0:  # torch's kernel looks at what it divides, not at the quotient
                unscale_into(bucket, flag, torch.ones_like(flag), 1.0)
        return list(flags.values())

    def combine(self, flags: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return one flag for several (or for none: nothing overflowed)."""
        if flags:
            return any_flag(flags)
        parameters = self.parameters()
        return torch.zeros((), dtype=torch.float32, device=parameters[0].device if parameters else None)

    def finite(self, flags: Sequence[torch.Tensor]) -> bool:
        """Read flags on the host. Sync: one a device."""
        overflowed = False
        for flag in flags:
            if flag.item():
                flag.zero_()
                overflowed = True
        return not overflowed

    def forget_flags(self) -> None:
        """Use new flags from now on: an exception may have kept one from being reset."""
        self._flags = {}

    def _reciprocal(self, device: torch.device, scale: Any) -> torch.Tensor:
        if isinstance(scale, torch.Tensor):
            # The same bits as torch's detour over float64: a float64 quotient of float32 numbers rounds to the
            # correctly rounded float32 quotient.
            return scale.to(device).reciprocal()
        reciprocal = torch.full((), 1.0 / scale, dtype=torch.float32, device=device)
        self._reciprocals[device] = (scale, reciprocal)
        return reciprocal


def _kind(parameter: torch.Tensor) -> tuple[torch.device, torch.dtype, bool]:
    return parameter.device, parameter.dtype, is_large(parameter)


def unscale_into(
    gradients: list[torch.Tensor], flag: torch.Tensor, reciprocal: torch.Tensor, factor: float | None = None
) -> bool:
    """Run torch's own kernel on gradients of one device and dtype; return whether some were sparse.

    `factor` is the reciprocal, where the host knows it.
    """
    if gradients[0].dtype is torch.bfloat16 and not gradients[0].is_cpu:
        _unscale_bfloat16(gradients, flag, reciprocal, factor)
        return False
    if gradients[0].is_complex():  # the kernel takes real ones; compiled steps do not come to an `except` of ours
        gradients = [_plain_values(gradient) for gradient in gradients]
    try:
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, reciprocal)
        return False
    except (NotImplementedError, RuntimeError):
        # The kernel knows no sparse gradients and refuses before it touches anything; their values are dense.
        plain = [_plain_values(gradient) for gradient in gradients]
        if all(value is gradient for value, gradient in zip(plain, gradients, strict=True)):
            raise
        torch._amp_foreach_non_finite_check_and_unscale_(plain, flag, reciprocal)
        return True


def _unscale_bfloat16(
    gradients: list[torch.Tensor], flag: torch.Tensor, reciprocal: torch.Tensor, factor: float | None
) -> None:
    """Do by other kernels what torch's own does: it has no code for bfloat16 on GPUs (pytorch/pytorch#127176)."""
    # Of a sharded gradient (DTensor) this process's part: a norm of all parts would wait for the other processes.
    plain = [values for values in map(stored, gradients) if values.numel()]
    if plain:
        largest = torch.stack(torch._foreach_norm(plain, math.inf, torch.float32))
        torch._amp_foreach_non_finite_check_and_unscale_([largest], flag, reciprocal)
        if factor is None or math.frexp(factor)[0] != 0.5:
            for gradient in plain:  # beside a tensor in bfloat16, kernels round the factor to it, too
                torch.mul(gradient.float(), reciprocal, out=gradient)
        elif factor != 1.0:
            torch._foreach_mul_(plain, factor)


def _plain_values(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout is not torch.strided:
        gradient = gradient.values() if gradient.layout is not torch.sparse_coo else gradient._values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def any_nonzero(gradient: torch.Tensor) -> bool:
    """Return whether a gradient is more than zeros. Sync: one."""
    return bool(_plain_values(gradient).any())


def unscale_(gradients: Iterable[torch.Tensor], scale: Any) -> torch.Tensor:
    """Unscale any gradients once; the flag is 0 where all were finite."""
    kinds: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault(_kind(gradient), []).append(gradient)
    flags = []
    for (device, _, _), bucket in kinds.items():
        flag = torch.zeros((), dtype=torch.float32, device=device)
        reciprocal = torch.as_tensor(scale, dtype=torch.float64, device=device).reciprocal().float()
        unscale_into(bucket, flag, reciprocal)
        flags.append(flag)
    return any_flag(flags)


def any_flag(flags: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a flag that is set where one of some is, on the first one's device."""
    if len(flags) == 1:
        return flags[0]
    return torch.stack([flag.to(flags[0].device) for flag in flags]).amax()


def clip(
    parameters: Iterable[torch.nn.Parameter], max_norm: float | None, max_value: float | None, overflow: Any = None
) -> torch.Tensor | None:
    """Clip unscaled gradients in place by value, then by global L2 norm; return the norm before.

    Gradients on a CPU are clipped as torch clips them, bit for bit. Elsewhere the norm is taken in float64, because
    nobody could look without waiting whether a norm in float32 is infinite though the gradients are finite.

    Gradients that are not finite (`overflow` is True, or a flag on the device) stay as they are: dividing by their
    norm would make all of them NaN.
    """
    parameters = list(parameters)
    if max_value is not None:
        torch.nn.utils.clip_grad_value_(parameters, max_value)
    if max_norm is None:
        return None
    gradients = [gradient for gradient in map(gradient_of, parameters) if gradient is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    plain = all([type(gradient) is torch.Tensor and gradient.layout is torch.strided for gradient in gradients])
    on_host = not isinstance(overflow, torch.Tensor)
    if not plain or (on_host and all_on_cpu(gradients)):
        norm = _clip_as_torch(parameters, gradients, max_norm, overflow, plain)
        if norm is not None:
            return norm
    return _clip_in_float64(gradients, max_norm, overflow)


def all_on_cpu(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether all tensors are on the CPU, so that reading them waits for no device."""
    return all([tensor.is_cpu for tensor in tensors])


def _clip_as_torch(
    parameters: list[torch.nn.Parameter], gradients: list[torch.Tensor], max_norm: float, overflow: Any, plain: bool
) -> torch.Tensor | None:
    """Clip by torch's own norm and return it; None where that of plain gradients is infinite, and nothing changed."""
    norm: torch.Tensor = _native_norm(gradients)
    whole = getattr(norm, "full_tensor", None)  # a sharded norm (DTensor) is partial until asked for
    norm = norm if whole is None else whole()
    if overflow is True:
        return norm
    if plain and not math.isfinite(norm.item()):
        return None
    _shorten(parameters, max_norm, norm, overflow)
    return norm


def _clip_in_float64(gradients: list[torch.Tensor], max_norm: float, overflow: Any) -> torch.Tensor:
    """Clip by a norm in float64, in which no sum of squares of float32 numbers overflows; return it."""
    kinds: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault(gradient.device, []).append(_plain_values(gradient))
    norms = [norm for kind in kinds.values() for norm in torch._foreach_norm(kind, 2, torch.float64)]
    norm = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    if overflow is not True:
        coefficient = (max_norm / (norm + EPSILON)).clamp(max=1.0)
        if overflow is not None:
            coefficient = torch.where(overflow == 0, coefficient, 1.0)
        unscale_(gradients, 1.0 / coefficient)
    return norm


def _norm_of_norms(gradients: list[torch.Tensor]) -> torch.Tensor:
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


_native_norm: Final = getattr(torch.nn.utils, "get_total_norm", _norm_of_norms)  # torch 2.6 and later


def _shorten(parameters: list[torch.nn.Parameter], max_norm: float, norm: torch.Tensor, overflow: Any) -> None:
    if overflow is not None:
        norm = torch.where(overflow == 0, norm, 0.0)
    if _HAS_TOTAL_NORM:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    else:
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def _is_half(parameter: torch.Tensor) -> bool:
    return parameter.dtype is torch.float16 and parameter.requires_grad


def refuse_half(groups: list[dict[str, Any]]) -> None:
    """Raise where trainable float16 parameters would be updated in float16."""
    if any(_is_half(parameter) for group in groups for parameter in group["params"]):
        half = [name for name, parameter in name_parameters(groups, None) if _is_half(parameter)]
        names = ", ".join(half[:5]) + (", …" if half[5:] else "")
        raise LowPrecisionParametersError(
            f"the optimizer holds {len(half)} float16 parameters ({names}); updates smaller than their "
            f"precision would be lost. Keep the parameters in float32 (remove .half(); "
            f"casting computes in low precision all the same), or use ampx.init(level='O2') and "
            f"model, opt = ampx.prepare(model, opt)."
        )
