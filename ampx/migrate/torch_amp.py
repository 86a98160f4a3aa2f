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
        self._device = self._enabled = self._dtype = ""  # the session's, as code

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
        code = self._program.code
        name = min(self._program.qualified(call.func))
        values = arguments(call, (("device", *_SETTINGS) if name in _NEW_SCALERS else _SETTINGS), "device")
        if values is None:
            raise NeedsHumanError(call, "a scaler with arguments that cannot be read", "Write `ampx.init` by hand.")
        self._device = '"cpu"' if name in _CPU_SCALERS else '"cuda"'
        if "device" in values:
            self._device = self._device_code(values["device"])
        enabled = code(values["enabled"]) if "enabled" in values else "True"
        self._enabled = "" if enabled == "True" else enabled
        self._dtype = self._dtype_of_regions() or self._default_dtype
        options = ['"torch"', f"dtype={self._dtype}"]
        if self._device != '"cuda"':
            options.append(f"device={self._device}")
        options += self._loss_scale({field: code(values[field]) for field in _SETTINGS[:-1] if field in values})
        options.append("process_wide=False")
        if self._device != '"cuda"':
            options.append('nan_loss="skip"')  # as a GradScaler does; on a GPU that is ampx's way too
        return self._plan.of(call).written(call, "ampx.init", [*options, *self._switch(call)])

    @property
    def _default_dtype(self) -> str:
        """What an autocast region computes in that names no dtype, as code."""
        return '"bfloat16"' if self._device == '"cpu"' else '"float16"'

    def _dtype_of_regions(self) -> str | None:
        """Return the first known dtype of the regions that are on where the session is; None where there is none."""
        named = [region.dtype for region in self._regions if self._matches(region) and region.dtype is not None]
        return named[0] if named and named[0].startswith('"') else None

    def _loss_scale(self, settings: dict[str, str]) -> list[str]:
        """Write the `loss_scale` option; in float16 a dynamic one is the default."""
        if settings:
            return [f"loss_scale={loss_scale(settings)}"]
        return [] if self._dtype == '"float16"' else ['loss_scale="dynamic"']

    def _switch(self, call: ast.Call) -> list[str]:
        """Write the `enabled` option: without CUDA a scaler for it switches itself off."""
        switches = [as_bool(self._enabled)] if self._enabled else []
        if self._device == '"cuda"':
            switches.append("torch.cuda.is_available()")
            if not self._imports_torch(call):
                self._plan.of(call).imports["torch"] = ""
        return [f"enabled={' and '.join(switches)}"] if switches else []

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
        regions = [self._region(node, name) for node, name in self._program.references()]
        return [region for region in regions if region is not None]

    def _region(self, node: Reference, name: str) -> Region | None:
        """Read an autocast region; None for another name, and where its arguments cannot be read."""
        call, old = self._program.call_of(node), name in _OLD_REGIONS
        if call is None or not (old or name in _NEW_REGIONS):
            return None
        names = ("enabled", "dtype", "cache_enabled") if old else ("device_type", "dtype", "enabled", "cache_enabled")
        values = arguments(call, names)
        if values is None or "cache_enabled" in values or not (old or "device_type" in values):
            return None
        device = f'"{_OLD_REGIONS[name]}"' if old else self._device_code(values["device_type"])
        enabled = self._program.code(values["enabled"]) if "enabled" in values else None
        return Region(node, call, device, self._dtype_code(values.get("dtype")), None if enabled == "True" else enabled)

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
            dtype = region.dtype or self._default_dtype
            if dtype != self._dtype and region.enabled != "False":
                options.append(f"dtype={dtype}")
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

    def _reason_at(self, node: ast.AST, begin: ast.stmt, seen: tuple[ast.AST, ...]) -> str | None:
        """Return why a node may be reached without a session; None if it cannot."""
        program = self._program
        home, where = program.function(begin), program.function(node)
        if where is home:
            return "it comes before the session" if program.order(node) < program.order(begin) else None
        if where in seen:
            return None
        calls = self._calls_of(where, home)
        if calls is None:
            return "it cannot be told that it is entered after the session begins"
        reasons = [self._reason_at(call, begin, (*seen, where)) for call in calls]
        return "it is entered before the session begins" if any(reasons) else None

    def _calls_of(self, where: Function | ast.Module, home: Function | ast.Module) -> list[ast.Call] | None:
        """Return the calls that may enter a function before a session begins; None where they are not known.

        Where the session is made with an object, those are calls in `__init__`: others need the object.
        """
        program, flow = self._program, self._plan.flow
        if not isinstance(where, FUNCTIONS):
            return None
        if isinstance(home, FUNCTIONS) and home.name == "__init__":
            cls = program.enclosing_class(home)
            if cls is not None and cls is program.enclosing_class(where):
                return [call for call in flow.calls_of(where) if program.function(call) is home]
        return None if self._is_used_otherwise(where) else flow.calls_of(where) or None

    def _is_used_otherwise(self, function: Function) -> bool:
        """Return whether a function is also used as a value, or from a file that is not looked at."""
        place = self._program.scope(function), function.name
        uses = self._plan.flow.uses_at(place)
        calls = [call.func for call in self._plan.flow.calls_of(function)]
        return any(use not in calls for use in uses) or self._program.is_used_elsewhere(function)


def _same_switch(switch: str, other: str) -> bool:
    """Return whether two switches are the same: `args.amp` is also kept as `self.args.amp`."""
    return switch.removeprefix("self.") == other.removeprefix("self.")
