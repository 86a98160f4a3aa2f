"""Fused optimizers: choose the implementation of one that was made without it, and start the momentum of fused SGD."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch.optim.sgd import sgd

from ampx.errors import InvalidOptionError, UnsupportedByBackendError

from .trees import gradient_of

_FUSED: Final = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_MARKS: Final = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")


def check(optimizer: torch.optim.Optimizer, wanted: object) -> None:
    """Check the option `fused` of `wrap_optimizer`: None, or "auto" for an optimizer that torch can fuse."""
    if wanted is None:
        return
    if wanted != "auto":
        raise InvalidOptionError(
            f"fused={wanted!r} is not a choice; accepted: None (as the optimizer was made) and 'auto' (fused). "
            f"Pass one of these."
        )
    reason = _obstacle(optimizer)
    if reason is not None:
        raise InvalidOptionError(
            f"fused='auto' got {type(optimizer).__name__}, {reason}; accepted: Adam, AdamW, SGD and Adagrad of "
            f"torch.optim, not differentiable, with floating parameters on CPU or CUDA (Adagrad: CPU). Leave fused out."
        )


def check_kernel(
    optimizer: torch.optim.Optimizer, low: Iterable[torch.Tensor], dtype: torch.dtype, chosen: bool = False
) -> None:
    """Refuse SGD that is, or is `chosen` to be, fused of parameters that are, or shall be, in 16 bits on a CPU."""
    fused = chosen or any(group.get("fused") for group in optimizer.param_groups)
    if not isinstance(optimizer, torch.optim.SGD) or not fused:
        return
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(parameter.is_cpu and id(parameter) in own for parameter in low) and not _updates(dtype):
        raise UnsupportedByBackendError(
            f"fused SGD got parameters in {str(dtype).removeprefix('torch.')} on a CPU, where the kernel of PyTorch "
            f"{torch.__version__} leaves most of their elements as they are; accepted: SGD that is not fused, or "
            f"parameters or master weights in float32. Make it with fused=False and leave fused='auto' out, or use "
            f"level='O1' or 'O2'."
        )


@functools.cache
def _updates(dtype: torch.dtype) -> bool:
    """Return whether fused SGD updates parameters of a dtype on a CPU.

    Native defect: in 16 bits it computes whole vectors and never stores them; only the elements after them move.
    """
    parameter, gradient = torch.ones(2, 64, dtype=dtype, device="cpu")
    options = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.5, "dampening": 0.0, "nesterov": False, "maximize": False}
    sgd([parameter], [gradient], [None], fused=True, **options)
    return bool((parameter == 0.5).all())


def use(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Switch a checked optimizer to its fused implementation, in place; its state stays. Return what switches it back.

    Sync: none, unless its state is on an accelerator and its step counters are on the host.
    """
    every = (optimizer.defaults, *optimizer.param_groups)
    chosen = [(options, options["fused"], options["foreach"]) for options in every]
    counters = [(state, state["step"]) for state in optimizer.state.values() if "step" in state]
    for options in every:
        options["fused"], options["foreach"] = True, False
    for parameter, state in optimizer.state.items():
        if "step" in state:
            # Fused kernels count on the device, in float32; the others count on the host.
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)
    # What torch's own constructors set for fused=True.
    marks = vars(optimizer)
    before: dict[str, object] = {name: marks[name] for name in _MARKS if name in marks}
    marks.update(dict.fromkeys(_MARKS, True))

    def undo() -> None:
        for options, fused, foreach in chosen:
            options["fused"], options["foreach"] = fused, foreach
        for state, count in counters:
            state["step"] = count
        for name in _MARKS:
            del marks[name]
        marks.update(before)

    return undo


def _obstacle(optimizer: torch.optim.Optimizer) -> str | None:
    kind = type(optimizer)
    if kind not in _FUSED:
        return "for which torch has no fused implementation, or which is a subclass that may not use it"
    if any(group["differentiable"] for group in optimizer.param_groups):
        return "which is differentiable"
    devices = ("cpu",) if kind is torch.optim.Adagrad else ("cpu", "cuda")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.device.type not in devices or not parameter.is_floating_point():
                return f"which holds a parameter of {parameter.dtype} on {parameter.device}"
    return None


def makes_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether this step is the one in which SGD makes its momentum buffers.

    Native defect: fused SGD makes them uninitialised, and its kernel leaves them so where the first step overflows;
    the next step adds to whatever the memory held.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    for group in optimizer.param_groups:
        first = next((parameter for parameter in group["params"] if gradient_of(parameter) is not None), None)
        if first is not None and group["momentum"] and optimizer.state.get(first, {}).get("momentum_buffer") is None:
            return True
    return False


def check_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a first gradient that comes too late where the group dampens momentum, before anything changes."""
    for group in optimizer.param_groups:
        late, _ = _without_momentum(optimizer, group)
        if late and group["dampening"]:
            raise UnsupportedByBackendError(
                "step got the first gradient of a parameter after others of its group had theirs, for fused SGD with "
                "dampening, whose kernel cannot start one momentum by itself; accepted: dampening=0, or SGD that is "
                "not fused. Make it with fused=False, and leave fused='auto' out."
            )


def complete_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Start the momentum of parameters whose first gradient comes after the first step.

    Native defect: the kernel of fused SGD takes the momentum of all parameters or of none, and raises a TypeError.

    Return whether every parameter will have its momentum after this step, so that this need not be called again.
    """
    complete = True
    for group in optimizer.param_groups:
        late, waits = _without_momentum(optimizer, group)
        for parameter in late:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        complete = complete and not waits
    return complete


def _without_momentum(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> tuple[list[torch.Tensor], bool]:
    """List fused SGD's parameters that have a gradient and alone no momentum; say whether others will be without."""
    if not group.get("fused") or not group.get("momentum"):
        return [], False
    states, parameters = optimizer.state, group["params"]
    without = [parameter for parameter in parameters if states.get(parameter, {}).get("momentum_buffer") is None]
    late = [parameter for parameter in without if gradient_of(parameter) is not None]
    if len(without) == len(parameters):
        return [], True  # torch makes them, unless the step is skipped
    return late, len(late) < len(without)
