"""The folded step: a fused kernel unscales and clips the gradients while it applies them.

Torch's scaler rewrites all gradients to check them, once more to clip them, and its fused kernels write them again.
Here they are read once, to check them and to know their norm; the kernel, which reads and writes them anyway,
divides them by scale / clip coefficient. After the step gradients are unscaled and clipped, as they are without
folding. What the reading cannot decide is left to torch's own check: a sum that overflows may come from finite
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from ampx.scale_state import FLOAT32_MAX

# From so many elements on, reading a gradient takes less time on a CPU than torch's kernel, which also writes it.
LARGE: Final = 2**16
# What torch.nn.utils.clip_grad_norm_ adds to the norm before it divides.
EPSILON: Final = 1e-6


class Folded(NamedTuple):
    """The arguments of a fused kernel."""

    divisor: torch.Tensor | None  # of the gradients: a float32 scalar tensor; None where it is 1
    # A float32 flag on the device that makes the kernel change nothing; None where the host knows.
    overflow: torch.Tensor | None
    norm: Any  # of the unscaled gradients: a float, or a float32 scalar on the device; None where not asked for


def accepts(optimizer: torch.optim.Optimizer, gradients: Sequence[list[torch.Tensor]]) -> bool:
    """Return whether no code sees gradients between the check and the kernel, and the kernel divides them."""
    # Not `_step_supports_amp_scaling`, which copies and loaded checkpoints do not have, or have for no reason.
    if not all([group.get("fused") for group in optimizer.param_groups]):
        return False
    # A step that is not torch's own may look at the gradients before it calls the kernel.
    if not type(optimizer).step.__module__.startswith("torch.optim."):
        return False
    # The one hook is our guard; others (and those of the process) would see gradients that still carry the scale.
    if len(optimizer._optimizer_step_pre_hooks) != 1:
        return False
    own_step = vars(optimizer).get("step")  # a scheduler counts steps in this way
    if own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"):
        return False
    device = gradients[0][0].device if gradients else None
    return bool(gradients) and all([bucket[0].device == device and is_plain(bucket) for bucket in gradients])


def is_plain(bucket: list[torch.Tensor]) -> bool:
    """Return whether gradients are float32, dense and whole: shards (DTensor) have norms that all processes share."""
    if bucket[0].dtype is not torch.float32 or set(map(type, bucket)) != {torch.Tensor}:
        return False
    return not any([gradient.is_sparse for gradient in bucket])


def on_host(gradients: Sequence[list[torch.Tensor]], scale: float, max_norm: float | None) -> Folded | None:
    """Check scaled gradients of one device by reading them once; return None where that does not decide.

    Sync: one, as torch's scaler.
    """
    if max_norm is None:
        if not all(map(reads_finite, gradients)):
            return None
        return Folded(None if scale == 1.0 else _scalar(scale, gradients[0][0].device), None, None)
    norm = norm_of(gradients).item() / scale
    if not math.isfinite(norm):
        return None
    divisor = scale * max(1.0, (norm + EPSILON) / max_norm)
    if divisor > FLOAT32_MAX:
        return None
    return Folded(None if divisor == 1.0 else _scalar(divisor, gradients[0][0].device), None, norm)


def on_device(gradients: Sequence[list[torch.Tensor]], scale: torch.Tensor, max_norm: float) -> Folded:
    """Check scaled gradients and take their norm on the device.

    The norm is taken in float64, in which no sum of squares of float32 numbers overflows: nothing could decide later
    whether an infinite norm came from finite gradients.
    """
    norms = torch._foreach_norm([gradient for bucket in gradients for gradient in bucket], 2, torch.float64)
    norm = torch.linalg.vector_norm(torch.stack(norms))
    scale = scale.to(norm.device)  # one backward for optimizers on several devices has the scale of one
    norm = norm / scale
    divisor = (scale * ((norm + EPSILON) / max_norm).clamp(min=1.0)).float()
    # Beyond float32 the kernel would apply zeros: that counts as an overflow, after which a smaller scale is tried.
    return Folded(divisor, (~torch.isfinite(divisor)).float(), norm.float())


def is_large(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is read faster than written."""
    return tensor.numel() >= LARGE


def reads_finite(bucket: list[torch.Tensor]) -> bool:
    """Check gradients of one size on a CPU without writing; False: not finite, or very large. Sync: none on a CPU."""
    if is_large(bucket[0]) and all(map(torch.Tensor.is_contiguous, bucket)):
        flat = [gradient.view(-1) for gradient in bucket]
        # Squares cannot cancel, so that one inf or NaN shows in the sum.
        return math.isfinite(sum([torch.dot(gradient, gradient) for gradient in flat]))
    # For small tensors torch's kernel is the fastest check there is; what it writes is what it read.
    flag = _scalar(0.0, bucket[0].device)
    torch._amp_foreach_non_finite_check_and_unscale_(bucket, flag, _scalar(1.0, flag.device))
    return not flag.item()


def norm_of(gradients: Sequence[list[torch.Tensor]]) -> torch.Tensor:
    """Return the global L2 norm: a float32 scalar tensor, infinite where the sum of squares overflows."""
    norms: list[torch.Tensor] = []
    for bucket in gradients:
        if bucket[0].is_cpu and is_large(bucket[0]):
            norms += map(_norm_by_rows, bucket)
        else:
            norms += torch._foreach_norm(bucket, 2)
    return torch.linalg.vector_norm(torch.stack(norms))


def _norm_by_rows(gradient: torch.Tensor) -> torch.Tensor:
    """Return the norm of the norms of rows: many threads take part, and short sums lose less to rounding."""
    if gradient.dim() > 1 and gradient.is_contiguous():
        gradient = torch.linalg.vector_norm(gradient.view(len(gradient), -1), dim=1)
    return torch.linalg.vector_norm(gradient)


def _scalar(value: float, device: torch.device) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)
