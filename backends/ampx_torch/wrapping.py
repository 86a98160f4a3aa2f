"""Check a raw optimizer and wrap it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ampx import callers
from ampx.backend import reject_unknown
from ampx.errors import InvalidOptionError, PrecisionWarning
from ampx.optimizer import WrappedOptimizer
from ampx.protocol import HOST_LEDGER, Member, ScaleGroup
from ampx.scale_state import is_one

from . import casting, fused as fusing, unwrapped_steps
from .device_scale import DeviceLedger, TensorLedger
from .device_scale.capture import CapturableLedger
from .gradients import refuse_half
from .step import AmpOptimizer
from .trees import LOW


def make_wrapper(optimizer: torch.optim.Optimizer, member: Member, options: Mapping[str, Any]) -> WrappedOptimizer:
    """Check the options of `wrap_optimizer`, and wrap a raw optimizer."""
    if options.get("wrapper") is not None:  # a way to wrap of its own, which apex.amp has
        return options["wrapper"](optimizer, member, options)
    _check(optimizer, member, options)
    device, group = _device_of_scale(optimizer, options), member.group
    if group.enabled:
        _place_scale(group, device, options)
        session = options.get("session")
        if session is not None and not is_one(group.config):
            unwrapped_steps.watch(session)
            session.at_shutdown(lambda: unwrapped_steps.end(session))
    return AmpOptimizer(optimizer, member, options)


def _check(optimizer: torch.optim.Optimizer, member: Member, options: Mapping[str, Any]) -> None:
    """Raise for options that are unknown, and for parameters in a dtype that the optimizer cannot update."""
    reject_unknown("torch", options, ("process_group", "device_scale", "fused", "capturable"))
    fusing.check(optimizer, options.get("fused"))
    for dtype in LOW:
        fusing.check_kernel(optimizer, _of_dtype(optimizer, dtype), dtype, options.get("fused") is not None)
    if options["plan"] is not None:
        casting.check_resolved(options["plan"])
    if member.group.enabled and options["level"].name != "O3":
        refuse_half(optimizer.param_groups)
    if options["level"].name != "O3":
        _warn_of_lost_updates(optimizer)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _of_dtype(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> list[torch.Tensor]:
    """List the trainable parameters of a dtype."""
    return [p for p in _parameters(optimizer) if p.dtype is dtype and p.requires_grad]


def _warn_of_lost_updates(optimizer: torch.optim.Optimizer) -> None:
    """Warn where the optimizer steps bfloat16 parameters that have no float32 copies."""
    low = len(_of_dtype(optimizer, torch.bfloat16))
    if low:
        callers.warn(
            f"the optimizer holds {low} bfloat16 parameters without float32 copies: an update of less than 1/256 of a "
            f"weight rounds to nothing, and opt.meter says how many do. Keep the parameters in float32 (autocast "
            f"computes in bfloat16 all the same), or use ampx.init(level='O2') and "
            f"model, opt = ampx.prepare(model, opt).",
            PrecisionWarning,
        )


def _place_scale(group: ScaleGroup, device: torch.device | None, options: Mapping[str, Any]) -> None:
    """Keep the scale on the device where all optimizers that share it are there, or else on the host."""
    if len(group.members) == 1:
        kind = CapturableLedger if options.get("capturable") else DeviceLedger
        group.ledger = HOST_LEDGER if device is None else kind(device)
    elif isinstance(group.ledger, TensorLedger) and group.ledger.device != device:
        if options.get("device_scale") or options.get("capturable"):
            raise InvalidOptionError(
                "device_scale=True or capturable=True got optimizers on several devices; they cannot share a scale "
                "on a device. Leave these out, or wrap them one by one."
            )
        group.ledger = HOST_LEDGER


def _device_of_scale(optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> torch.device | None:
    """Return the device the scale can live on, or None for the host."""
    wanted, capturable = options.get("device_scale"), options.get("capturable", False)
    _check_choices(wanted, capturable)
    devices = {parameter.device for parameter in _parameters(optimizer)}
    fused = options.get("fused") is not None or getattr(optimizer, "_step_supports_amp_scaling", False)
    if fused and len(devices) == 1:
        (device,) = devices
        return device if wanted or capturable or (wanted is None and device.type != "cpu") else None
    if wanted or capturable:
        option = "capturable" if capturable else "device_scale"
        raise InvalidOptionError(
            f"{option}=True needs a fused optimizer with all parameters on one device; this one is not. Make it "
            f"with fused=True, or leave {option} out."
        )
    return None


def _check_choices(wanted: Any, capturable: Any) -> None:
    """Raise for values of `device_scale` and `capturable` that are none, or contradict each other."""
    if wanted not in (None, True, False):
        raise InvalidOptionError(
            f"device_scale={wanted!r} is not a choice; accepted: None (for fused optimizers on an accelerator), True, "
            f"False. Pass one of these."
        )
    if capturable not in (True, False) or (capturable and wanted is False):
        raise InvalidOptionError(
            f"capturable={capturable!r} with device_scale={wanted!r} is not a choice; accepted: False, or True with "
            f"the scale on the device. Leave device_scale out."
        )
