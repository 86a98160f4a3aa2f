"""The dialect of `torch.amp` and `torch.cuda.amp`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import libcst as cst

from .backwards import Scaler
from .flow import Flow
from .numbers import loss_scale
from .plan import Plan
from .scalers import ScalerRewriter
from .source import arguments, as_bool

ROOTS: Final = ("torch.amp", "torch.cuda.amp", "torch.cpu.amp", "torch.autocast")
_OLD_SCALERS: Final = {"torch.cuda.amp.GradScaler", "torch.cuda.amp.grad_scaler.GradScaler"}
_NEW_SCALERS: Final = {"torch.amp.GradScaler", "torch.amp.grad_scaler.GradScaler", "torch.GradScaler"}
_CPU_SCALERS: Final = {"torch.cpu.amp.GradScaler", "torch.cpu.amp.grad_scaler.GradScaler"}
_SCALERS: Final = _OLD_SCALERS | _NEW_SCALERS | _CPU_SCALERS
_SETTINGS: Final = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")
_OLD_REGIONS: Final = {
    "torch.cuda.amp.autocast": "cuda",
    "torch.cuda.amp.autocast_mode.autocast": "cuda",
    "torch.cpu.amp.autocast": "cpu",
    "torch.cpu.amp.autocast_mode.autocast": "cpu",
}
_NEW_REGIONS: Final = {"torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast"}
_DTYPES: Final = {
    "torch.float16": "float16",
    "torch.half": "float16",
    "torch.bfloat16": "bfloat16",
}
_KEPT: Final = "It is PyTorch's own and works beside ampx: nothing has to be done."


@dataclass
class Region:
    """One autocast region.

    Attributes:
        node: The reference to the class.
        call: The constructor call.
        device: Code of the device type; the words cuda and cpu in double quotes.
        dtype: Code of the dtype, in double quotes where it is known; None for the device's own.
        enabled: Code of the switch; None where the region is always on.
    """

    node: cst.CSTNode
    call: cst.Call
    device: str
    dtype: str | None
    enabled: str | None


class TorchAmp:
    """Plans the edits of one file."""

    def __init__(self, plan: Plan) -> None:
        """Read the regions of the file."""
        self._plan = plan
        self._source = plan.source
        self._regions = self._find_regions()
        self._device = self._enabled = ""
        self._dtype: str | None = None

    def rewrite(self) -> None:
        """Plan everything.

        Raises:
            NeedsHumanError: Something is not fully understood.
        """
        flow = Flow(self._source)
        scalers = ScalerRewriter(self._plan, flow, _SCALERS, self._init).rewrite()
        if len(scalers) > 1:
            raise self._plan.block(
                scalers[1].call,
                "a second scaler; a process has one session of ampx for PyTorch",
                "Make one session, and wrap each optimizer with a `loss_scale` of its own.",
            )
        for scaler in scalers:
            self._rewrite_regions(flow, scaler)
        for node, name in self._source.references():
            if name.startswith(ROOTS) and node not in self._plan.claimed:
                self._plan.tell(node, "note", f"`{self._source.code(node)}` stays", _KEPT)

    # -- the session -----------------------------------------------------------------------------------

    def _init(self, call: cst.Call) -> str:
        """Write the call of `ampx.init` for the call of a GradScaler."""
        name = min(self._source.qualified(call.func))
        found = arguments(call, (("device", *_SETTINGS) if name in _NEW_SCALERS else _SETTINGS))
        if found is None or not found.keys() <= {"device", *_SETTINGS}:
            raise self._plan.block(call, "a scaler with arguments that cannot be read", "Write `ampx.init` by hand.")
        device = '"cpu"' if name in _CPU_SCALERS else '"cuda"'
        if "device" in found:
            device = self._device_code(found["device"])
        enabled = self._source.code(found["enabled"]) if "enabled" in found else None
        enabled = None if enabled == "True" else enabled
        self._device, self._enabled = device, enabled or ""
        same = [one for one in self._regions if self._matches(one)]
        self._dtype = next((one.dtype for one in same if one.dtype is not None), None)
        if self._dtype is None or not self._dtype.startswith('"'):
            self._dtype = '"bfloat16"' if device == '"cpu"' else '"float16"'
        options = ['"torch"', f"dtype={self._dtype}"]
        on_cuda = device == '"cuda"'
        if not on_cuda:
            options.append(f"device={device}")
        settings: dict[str, str] = {
            field: self._source.code(found[field]) for field in _SETTINGS[:-1] if field in found
        }
        if settings:
            options.append(f"loss_scale={loss_scale(settings)}")
        elif self._dtype != '"float16"':
            options.append('loss_scale="dynamic"')
        options.append("process_wide=False")
        if not on_cuda:
            options.append('nan_loss="skip"')  # as a GradScaler does; on a GPU that is ampx's way too
        if on_cuda:  # without CUDA such a scaler switches itself off
            cuda = "torch.cuda.is_available()"
            if not self._source.binds("torch"):
                self._plan.imports["torch"] = ""
            options.append(f"enabled={cuda}" if enabled is None else f"enabled={as_bool(enabled)} and {cuda}")
        elif enabled is not None:
            options.append(f"enabled={as_bool(enabled)}")
        return self._plan.written(call, "ampx.init", options)

    def _device_code(self, node: cst.BaseExpression) -> str:
        if isinstance(node, cst.SimpleString):
            return f'"{node.raw_value.partition(":")[0]}"'
        return self._source.code(node)

    # -- regions ---------------------------------------------------------------------------------------

    def _find_regions(self) -> list[Region]:
        found = []
        for node, name in self._source.references():
            call = self._source.parent(node)
            if name not in _OLD_REGIONS and name not in _NEW_REGIONS:
                continue
            if not isinstance(call, cst.Call) or call.func is not node:
                continue
            old = name in _OLD_REGIONS
            names = (
                ("enabled", "dtype", "cache_enabled") if old else ("device_type", "dtype", "enabled", "cache_enabled")
            )
            given = arguments(call, names)
            if given is None or not given.keys() <= set(names) - {"cache_enabled"}:
                continue
            if not old and "device_type" not in given:
                continue
            device = f'"{_OLD_REGIONS[name]}"' if old else self._device_code(given["device_type"])
            dtype = self._dtype_code(given.get("dtype"))
            enabled = self._source.code(given["enabled"]) if "enabled" in given else None
            found.append(Region(node, call, device, dtype, None if enabled == "True" else enabled))
        return found

    def _dtype_code(self, node: cst.BaseExpression | None) -> str | None:
        if node is None or self._source.code(node) == "None":
            return None
        names = self._source.qualified(node)
        known = _DTYPES.get(min(names)) if len(names) == 1 else None
        return self._source.code(node) if known is None else f'"{known}"'

    def _matches(self, region: Region) -> bool:
        """Tell whether a region is on where the session is: same device, same switch."""
        off = region.enabled == "False"
        return region.device == self._device and (off or _same_switch(region.enabled or "", self._enabled))

    def _rewrite_regions(self, flow: Flow, scaler: Scaler) -> None:
        for region in self._regions:
            reason = self._reason_to_keep(flow, scaler, region)
            self._plan.claim(region.node)
            if reason is not None:
                self._plan.tell(region.call, "note", f"`{self._source.code(region.call)}` stays: {reason}", _KEPT)
                continue
            options = []
            if region.enabled is not None:
                options.append(f"enabled={region.enabled}")
            if region.dtype != self._dtype and region.enabled != "False":
                default = '"bfloat16"' if self._device == '"cpu"' else '"float16"'
                if region.dtype is not None or self._dtype != default:
                    options.append(f"dtype={region.dtype or default}")
            self._plan.expression(region.call, f"ampx.autocast({', '.join(options)})")

    def _reason_to_keep(self, flow: Flow, scaler: Scaler, region: Region) -> str | None:
        """Give why a region cannot become one of the session; None if it can."""
        if not self._matches(region):
            return "its device or its switch is not the scaler's"
        if not self._device.startswith('"') and region.dtype is None:
            return "its dtype depends on the device"
        if scaler.start.maybe_none or self._source.branches(scaler.start.statement):
            return "there is not always a session"
        begin = scaler.start.statement
        home = self._source.function(begin)
        where = self._source.function(region.call)
        decorates = any(isinstance(one, cst.Decorator) for one in self._source.around(region.call))
        if where is home:
            early = self._source.order(region.call) < self._source.order(begin) and not decorates
            return "it comes before the session" if early else None
        if isinstance(where, cst.FunctionDef):
            for call in flow.calls_of(where):
                if self._source.function(call) is home and self._source.order(call) < self._source.order(begin):
                    return "it is entered before the session begins"
        return None


def _same_switch(one: str, other: str) -> bool:
    """Tell whether two switches are one: `args.amp` is also kept as `self.args.amp`."""
    return one.removeprefix("self.") == other.removeprefix("self.")
