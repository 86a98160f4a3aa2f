"""The dialect of `torch.amp` and `torch.cuda.amp`."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Final

from ampx.syntax.program import FUNCTIONS, Function, Reference, arguments

from .edits import Plan
from .grad_scaler import Scaler, ScalerRewriter
from .numbers import as_bool, loss_scale
from .report import NeedsHumanError

ROOTS: Final = ("torch.amp", "torch.cuda.amp", "torch.cpu.amp", "torch.autocast")
_OLD_SCALERS: Final = {"torch.cuda.amp.GradScaler", "torch.cuda.amp.grad_scaler.GradScaler"}
_NEW_SCALERS: Final = {"torch.amp.GradScaler", "torch.amp.grad_scaler.GradScaler", "torch.GradScaler"}
_CPU_SCALERS: Final = {"torch.cpu.amp.GradScaler", "torch.cpu.amp.grad_scaler.GradScaler"}
SCALERS: Final = _OLD_SCALERS | _NEW_SCALERS | _CPU_SCALERS
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


@dataclass(frozen=True)
class Region:
    """One autocast region."""

    node: Reference  # the reference to the class
    call: ast.Call
    device: str  # code of the device type; the words cuda and cpu in double quotes
    dtype: str | None  # code of the dtype, in double quotes where it is known; None for the device's own
    enabled: str | None  # code of the switch; None where the region is always on


class TorchAmp:
    """Plans the edits of one program."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._program = plan.program
        self._regions = self._find_regions()
        self._device = self._enabled = ""
        self._dtype: str | None = None

    def rewrite(self) -> None:
        """Plan everything."""
        scaler = ScalerRewriter(self._plan, "PyTorch", SCALERS, self._init).rewrite()
        if scaler is not None:
            self._rewrite_regions(scaler)
        for node, name in self._program.references():
            edits = self._plan.of(node)
            if name.startswith(ROOTS) and node not in edits.claimed:
                edits.tell(node, "note", f"`{self._program.code(node)}` stays", _KEPT)

    # -- the session -----------------------------------------------------------------------------------

    def _init(self, call: ast.Call) -> str:
        """Write the call of `ampx.init` for the call of a GradScaler."""
        code, edits = self._program.code, self._plan.of(call)
        name = min(self._program.qualified(call.func))
        values = arguments(call, (("device", *_SETTINGS) if name in _NEW_SCALERS else _SETTINGS))
        if values is None or not values.keys() <= {"device", *_SETTINGS}:
            raise NeedsHumanError(call, "a scaler with arguments that cannot be read", "Write `ampx.init` by hand.")
        device = '"cpu"' if name in _CPU_SCALERS else '"cuda"'
        if "device" in values:
            device = self._device_code(values["device"])
        enabled = code(values["enabled"]) if "enabled" in values else None
        enabled = None if enabled == "True" else enabled
        self._device, self._enabled = device, enabled or ""
        same = [region for region in self._regions if self._matches(region)]
        self._dtype = next((region.dtype for region in same if region.dtype is not None), None)
        if self._dtype is None or not self._dtype.startswith('"'):
            self._dtype = '"bfloat16"' if device == '"cpu"' else '"float16"'
        options = ['"torch"', f"dtype={self._dtype}"]
        on_cuda = device == '"cuda"'
        if not on_cuda:
            options.append(f"device={device}")
        settings: dict[str, str] = {field: code(values[field]) for field in _SETTINGS[:-1] if field in values}
        if settings:
            options.append(f"loss_scale={loss_scale(settings)}")
        elif self._dtype != '"float16"':
            options.append('loss_scale="dynamic"')
        options.append("process_wide=False")
        if not on_cuda:
            options.append('nan_loss="skip"')  # as a GradScaler does; on a GPU that is ampx's way too
        if on_cuda:  # without CUDA such a scaler switches itself off
            cuda = "torch.cuda.is_available()"
            if not self._imports_torch(call):
                edits.imports["torch"] = ""
            options.append(f"enabled={cuda}" if enabled is None else f"enabled={as_bool(enabled)} and {cuda}")
        elif enabled is not None:
            options.append(f"enabled={as_bool(enabled)}")
        return edits.written(call, "ampx.init", options)

    def _imports_torch(self, call: ast.Call) -> bool:
        """Return whether the file has the name `torch`, at its top level."""
        definitions = self._program.scope(self._program.module(call)).names.get("torch", [])
        return any(
            definition.imported == "torch"
            and self._program.parent(self._program.statement(definition.node)) is self._program.module(call)
            for definition in definitions
        )

    def _device_code(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return f'"{node.value.partition(":")[0]}"'
        return self._program.code(node)

    # -- regions ---------------------------------------------------------------------------------------

    def _find_regions(self) -> list[Region]:
        regions = []
        for node, name in self._program.references():
            call = self._program.parent(node)
            if name not in _OLD_REGIONS and name not in _NEW_REGIONS:
                continue
            if not isinstance(call, ast.Call) or call.func is not node:
                continue
            old = name in _OLD_REGIONS
            names = (
                ("enabled", "dtype", "cache_enabled") if old else ("device_type", "dtype", "enabled", "cache_enabled")
            )
            values = arguments(call, names)
            if values is None or not values.keys() <= set(names) - {"cache_enabled"}:
                continue
            if not old and "device_type" not in values:
                continue
            device = f'"{_OLD_REGIONS[name]}"' if old else self._device_code(values["device_type"])
            dtype = self._dtype_code(values.get("dtype"))
            enabled = self._program.code(values["enabled"]) if "enabled" in values else None
            regions.append(Region(node, call, device, dtype, None if enabled == "True" else enabled))
        return regions

    def _dtype_code(self, node: ast.expr | None) -> str | None:
        if node is None or self._program.code(node) == "None":
            return None
        names = self._program.qualified(node)
        dtype = _DTYPES.get(min(names)) if len(names) == 1 else None
        return self._program.code(node) if dtype is None else f'"{dtype}"'

    def _matches(self, region: Region) -> bool:
        """Return whether a region is on where the session is: same device, same switch."""
        off = region.enabled == "False"
        return region.device == self._device and (off or _same_switch(region.enabled or "", self._enabled))

    def _rewrite_regions(self, scaler: Scaler) -> None:
        for region in self._regions:
            edits = self._plan.of(region.node)
            if edits.source is not self._program.source(scaler.call):
                continue  # only the file that begins the session is sure to have one
            reason = self._reason_to_keep(scaler, region)
            edits.claimed.add(region.node)
            if reason is not None:
                edits.tell(region.call, "note", f"`{self._program.code(region.call)}` stays: {reason}", _KEPT)
                continue
            options = []
            if region.enabled is not None:
                options.append(f"enabled={region.enabled}")
            if region.dtype != self._dtype and region.enabled != "False":
                default = '"bfloat16"' if self._device == '"cpu"' else '"float16"'
                if region.dtype is not None or self._dtype != default:
                    options.append(f"dtype={region.dtype or default}")
            edits.expression(region.call, f"ampx.autocast({', '.join(options)})")

    def _reason_to_keep(self, scaler: Scaler, region: Region) -> str | None:
        """Return why a region cannot become one of the session; None if it can."""
        begin = scaler.start.statement
        if not self._matches(region):
            return "its device or its switch is not the scaler's"
        if not self._device.startswith('"') and region.dtype is None:
            return "its dtype depends on the device"
        if scaler.start.maybe_none or self._program.is_branched(begin):
            return "there is not always a session"
        for outer in self._program.around(region.call):
            decorators = getattr(outer, "decorator_list", ())
            if any(self._program.inside(region.call, decorator) for decorator in decorators):
                return self._reason_at(outer.body[0], begin, ())  # type: ignore[attr-defined]
        return self._reason_at(region.call, begin, ())

    def _reason_at(self, node: ast.AST, begin: ast.stmt, seen: tuple[Function, ...]) -> str | None:
        """Return why a node may be reached without a session; None if it cannot."""
        program = self._program
        home, where = program.function(begin), program.function(node)
        if where is home:
            return "it comes before the session" if program.order(node) < program.order(begin) else None
        if not isinstance(where, FUNCTIONS) or where in seen:
            return None if where in seen else "it cannot be told that it is entered after the session begins"
        cls = program.enclosing_class(where)
        if isinstance(home, FUNCTIONS) and home.name == "__init__" and cls is program.enclosing_class(home) is not None:
            early = [call for call in self._plan.flow.calls_of(where) if program.function(call) is home]
            reasons = [self._reason_at(call, begin, (*seen, where)) for call in early]
        else:
            calls = self._plan.flow.calls_of(where)
            if not calls or self._is_used_otherwise(where):
                return "it cannot be told that it is entered after the session begins"
            reasons = [self._reason_at(call, begin, (*seen, where)) for call in calls]
        return "it is entered before the session begins" if any(reasons) else None

    def _is_used_otherwise(self, function: Function) -> bool:
        """Return whether a function is also used as a value, or from a file that is not looked at."""
        place = self._program.scope(function), function.name
        uses = self._plan.flow.uses.get(place, [])
        calls = [call.func for call in self._plan.flow.calls_of(function)]
        return any(use not in calls for use in uses) or self._program.is_used_elsewhere(function)


def _same_switch(switch: str, other: str) -> bool:
    """Return whether two switches are the same: `args.amp` is also kept as `self.args.amp`."""
    return switch.removeprefix("self.") == other.removeprefix("self.")
