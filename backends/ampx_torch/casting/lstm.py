"""LSTM in a low precision for which the CPU has no primitive: computed in float32 rather than an error.

Under autocast torch hands float32 LSTMs on a CPU to oneDNN in the low precision, which has no such primitive where the
CPU lacks the instructions (float16: AVX512-FP16; bfloat16: AVX512), and raises. What goes in and comes out has the
dtypes that it has on other machines, so that a script does not depend on the CPU; between the two it is float32.
"""

from __future__ import annotations

import threading
import weakref
from functools import cache
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ampx import callers
from ampx.backend import CastPlan
from ampx.errors import PrecisionWarning
from ampx_torch.trees import DTYPES, cast

from . import kernels
from .oplists import TorchPlan

_DEVICE: Final = "cpu"
_OPERATION: Final = "aten::mkldnn_rnn_layer.default"
_lock = threading.Lock()


class _Installed:
    """The plans that the kernel is installed for, by the owner's id, and the plan that has warned."""

    def __init__(self) -> None:
        self.plans: dict[int, CastPlan] = {}
        self.library: torch.library.Library | None = None
        self.warned: weakref.ref[CastPlan] | None = None


_installed = _Installed()


@cache
def computable(dtype: torch.dtype) -> bool:
    """Return whether this CPU trains an LSTM in a dtype. A tiny one is tried, once a process."""
    off = torch.autocast(_DEVICE, enabled=False)
    try:
        with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad(), off, torch.device(_DEVICE):
            x, state = torch.zeros(1, 1, 1, dtype=dtype), torch.zeros(1, 1, dtype=dtype)
            weight, bias = torch.zeros(4, 1, dtype=dtype, requires_grad=True), torch.zeros(4, dtype=dtype)
            # Not reversed, no batch sizes, an LSTM (2) of size 1 and one layer with biases, in one direction, trained.
            layer: tuple[Any, ...] = (False, [], 2, 1, 1, True, False, False, True)
            output = torch.ops.aten.mkldnn_rnn_layer(x, weight, weight, bias, bias, state, state, *layer)[0]
            output.sum().backward(inputs=[weight])
    except (NotImplementedError, RuntimeError):
        return False
    return True


def install(plan: CastPlan, owner: object) -> None:
    """Put the kernel in force where this machine needs it, until `uninstall` was called for every owner."""
    if not _needed(plan):
        return
    with _lock:
        if _installed.library is None:
            (_installed.library,) = kernels.replace(_DEVICE, {_OPERATION: _compute})
        _installed.plans[id(owner)] = plan


def uninstall(owner: object) -> None:
    """Undo the `install` of an owner, if there was one; with the last, torch's own kernel is back."""
    with _lock:
        _installed.plans.pop(id(owner), None)
        if not _installed.plans and _installed.library is not None:
            _installed.library._destroy()
            _installed.library = None


def _needed(plan: CastPlan) -> bool:
    if plan.device != _DEVICE or not hasattr(torch.ops.aten, "mkldnn_rnn_layer") or computable(DTYPES[plan.dtype]):
        return False
    # Where the operation is denied, it is computed in float32 already, and returns float32.
    return not isinstance(plan, TorchPlan) or ("deny", _OPERATION) not in plan.operations


def _compute(*args: Any) -> Any:
    low = torch.get_autocast_dtype(_DEVICE)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    dtype = low if computable(low) else torch.float32
    if dtype is not low:
        _warn(low)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        *results, workspace = torch.ops.aten.mkldnn_rnn_layer(*[cast(tensor, dtype, _DEVICE) for tensor in args])
    return (*(tensor.to(low) for tensor in results), workspace)


def _warn(low: torch.dtype) -> None:
    plan = next(reversed(_installed.plans.values()))
    if _installed.warned is not None and _installed.warned() is plan:
        return
    _installed.warned = weakref.ref(plan)
    name = str(low).removeprefix("torch.")
    callers.warn(
        f"an LSTM was to compute in {name}, for which this CPU has no instructions: it computes in float32, and what "
        f"it returns is {name}, as on other CPUs. To have it in float32 altogether, pass deny=[torch.lstm].",
        PrecisionWarning,
    )
