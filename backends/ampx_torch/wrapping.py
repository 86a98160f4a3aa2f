"""Check a raw optimizer and wrap it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ampx import callers
from ampx.backend import reject_unknown
from ampx.errors import InvalidOptionError, PrecisionWarning
from ampx.optimizer import WrappedOptimizer
from ampx.protocol import HOST_LEDGER, Member
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
    device = _device_of_scale(optimizer, options)
    group = member.group
    if group.enabled:
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
    session = options.get("session")
    if group.enabled and session is not None and not is_one(group.config):
        unwrapped_steps.watch(session)
        session.at_shutdown(lambda: unwrapped_steps.end(session))
    return AmpOptimizer(optimizer, member, options)


def _of_dtype(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> list[torch.Tensor]:
    """List the trainable parameters of a dtype."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter for parameter in parameters if parameter.dtype is dtype and parameter.requires_grad]


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


def _device_of_scale(optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> torch.device | None:
    """Return the device the scale can live on, or None for the host."""
    wanted, capturable = options.get("device_scale"), options.get("capturable", False)
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
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    devices = {parameter.device for parameter in parameters}
    fused = options.get("fused") is not None or getattr(optimizer, "_step_supports_amp_scaling", False)
    able = fused and len(devices) == 1
    if (wanted or capturable) and not able:
        option = "capturable" if capturable else "device_scale"
        raise InvalidOptionError(
            f"{option}=True needs a fused optimizer with all parameters on one device; this one is not. Make it "
            f"with fused=True, or leave {option} out."
        )
    if not able or wanted is False or (not wanted and not capturable and next(iter(devices)).type == "cpu"):
        return None
    return next(iter(devices))
