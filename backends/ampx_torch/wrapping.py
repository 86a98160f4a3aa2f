"""Check a raw optimizer and wrap it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ampx.backend import reject_unknown
from ampx.errors import InvalidOptionError
from ampx.optimizer import WrappedOptimizer
from ampx.protocol import HOST_LEDGER, Member

from . import casting, fused as fusing
from .device_scale import DeviceLedger, TensorLedger
from .device_scale.capture import CapturableLedger
from .gradients import refuse_half
from .step import AmpOptimizer


def make_wrapper(optimizer: torch.optim.Optimizer, member: Member, options: Mapping[str, Any]) -> WrappedOptimizer:
    """Check the options of `wrap_optimizer`, and wrap a raw optimizer."""
    reject_unknown("torch", options, ("process_group", "device_scale", "fused", "capturable", "wrapper"))
    if options.get("wrapper") is not None:  # a way to wrap of its own, which apex.amp has
        return options["wrapper"](optimizer, member, options)
    fusing.check(optimizer, options.get("fused"))
    if options["plan"] is not None:
        casting.check_resolved(options["plan"])
    if member.group.enabled and options["level"].name != "O3":
        refuse_half(optimizer.param_groups)
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
    return AmpOptimizer(optimizer, member, options)


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
