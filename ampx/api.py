"""The module-level functions: each finds the session for what it is given and calls its method."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Literal

from . import annotate, sessions
from .amp import Amp
from .annotate import Region
from .backend import Backend
from .contract import CastPlan, Device
from .effective import Effective
from .errors import InvalidOptionError, PrecisionWarning, UnsupportedByBackendError, UnsupportedDtypeError
from .events import Listener, StepResult
from .gating import Gate
from .levels import Level, OptLevel, find_level
from .policy import Dtype, normalise_dtype
from .registry import default_registry
from .scale_state import LossScale
from .scaling import ScaleLoss


def init(
    framework: str | None = None,
    *,
    dtype: object = "auto",
    level: OptLevel = "O1",
    device: str = "auto",
    loss_scale: object = "auto",
    process_wide: bool = True,
    allow: Iterable[Any] = (),
    deny: Iterable[Any] = (),
    on_unsupported: Literal["raise", "warn"] = "raise",
    nan_loss: Literal["auto", "raise", "skip"] = "auto",
    enabled: bool = True,
) -> Amp:
    """Start mixed precision for one framework. A former session of the same framework is shut down first.

    Args:
        framework: `"torch"` or any registered name; None for the only supported one already imported.
        dtype: `"float16"`, `"bfloat16"`, or `"auto"`: float16 on an NVIDIA GPU with Tensor Cores, bfloat16 on
            a CPU that computes it natively, else off with one warning.
        level: `"O0"` float32, `"O1"` casting by op lists, `"O2"` low-precision parameters with float32 norms
            and master weights (needs `prepare`), `"O3"` all low precision.
        device: Whose computation is cast: `"auto"`, or a name such as `"cuda"` or `"cpu"`.
        loss_scale: `"auto"`: dynamic for float16 at O1 and O2, else no scaling. Or `"dynamic"`, a positive
            number (static), or a `LossScale`.
        process_wide: Casting is on everywhere; False: only inside `autocast` regions.
        allow: Operations to compute in low precision beyond the framework's own list.
        deny: Operations, modules or name patterns to compute in float32. With mixed precision off (O0, float32, or
            nothing better on this device) everything is computed in float32 anyway; the entries are checked still.
        on_unsupported: What to do when the device cannot compute the dtype: `"raise"`, or `"warn"` and fall
            back to what it can.
        nan_loss: A loss that is NaN before scaling: `"auto"` raises where looking is free (the loss is on the
            host) and skips the step elsewhere; `"raise"` always looks; `"skip"` never does.
        enabled: False makes every call transparent, so that a script need not change.

    Returns:
        The session.

    Raises:
        UnknownFrameworkError, AmbiguousFrameworkError, FrameworkNotInstalledError, BackendLoadError,
        PluginError: There is no backend to use.
        UnsupportedDtypeError, UnsupportedDeviceError, UnsupportedLevelError, UnsupportedByBackendError,
        UnsupportedOpError, InvalidOptionError: An argument cannot be honoured.

    Sync: none.
    """
    found_level = find_level(level)
    wanted = None if isinstance(dtype, str) and dtype == "auto" else normalise_dtype(dtype)
    scale = None if isinstance(loss_scale, str) and loss_scale == "auto" else LossScale.parse(loss_scale)
    allowed, denied = _entries("allow", allow), _entries("deny", deny)
    _check_choice("on_unsupported", on_unsupported, ("raise", "warn"))
    _check_choice("nan_loss", nan_loss, ("auto", "raise", "skip"))
    _check_choice("process_wide", process_wide, (True, False))
    _check_choice("enabled", enabled, (True, False))
    registry = default_registry()
    backend = registry.load(registry.guess() if framework is None else framework)
    if found_level.name not in backend.capabilities.levels:
        raise UnsupportedByBackendError(
            f"level={level!r} is not supported by backend {backend.name!r}; supported: "
            f"{', '.join(sorted(backend.capabilities.levels))}. Choose one of these."
        )
    target = backend.device(device)
    chosen, reason = _choose_dtype(backend, target, wanted, found_level, on_unsupported, enabled)
    casts = chosen not in (None, "float32") and found_level.name != "O0" and enabled
    plan = None
    if casts and chosen is not None:
        plan = backend.check_plan(CastPlan(target.name, chosen, found_level.name, allowed, denied))
    elif enabled and (allowed or denied):  # for its errors: entries that no device could honour are mistakes here too
        assumed: OptLevel = "O1" if found_level.name == "O0" else found_level.name
        backend.check_plan(CastPlan(target.name, "float16", assumed, allowed, denied))
    effective = Effective(
        framework=backend.name,
        device=target.name,
        dtype=chosen if casts else None,
        level=found_level.name,
        policy=found_level.policy(chosen if casts and chosen is not None else "float32"),
        loss_scale=scale or _default_scale(chosen if casts else None, found_level),
        native=chosen in target.native,
        process_wide=process_wide and found_level.casts_ops,
        enabled=enabled,
        reason=reason,
    )
    session = Amp(backend, plan, found_level, effective, nan_loss)
    sessions.replace(session)
    return session


def _choose_dtype(
    backend: Backend, device: Device, wanted: Dtype | None, level: Level, on_unsupported: str, enabled: bool
) -> tuple[Dtype | None, str]:
    """Give the compute dtype (None: off) and why, warning where it is not what was hoped for."""
    if not enabled:
        return None, "disabled by enabled=False"
    if level.name == "O0" or wanted == "float32":
        return None, f"float32 was asked for (level={level.name}, dtype={wanted or 'auto'})"
    if wanted is None:
        if device.preferred is None:
            advice = " Pass dtype=… to force it." if device.native | device.emulated else ""
            _warn(f"mixed precision is off on {device.name}: {device.reason}.{advice}")
        return device.preferred, device.reason
    if wanted in device.native:
        return wanted, f"asked for; computed natively on {device.name}"
    if wanted in device.emulated:
        reason = f"asked for; {device.name} has no hardware for {wanted}, so it is emulated and slow"
        _warn(f"dtype={wanted!r}: {reason}.")
        return wanted, reason
    can = ", ".join(sorted(device.native | device.emulated)) or f"none: only float32 ({device.reason})"
    message = f"dtype={wanted!r} is not supported by backend {backend.name!r} on {device.name!r}; supported: {can}"
    if on_unsupported == "raise":
        raise UnsupportedDtypeError(
            f"{message}. Choose one of these, another device, or on_unsupported='warn' to fall back."
        )
    _warn(f"{message}; falling back to {device.preferred or 'float32'}.")
    return device.preferred, f"{wanted} is not supported on {device.name}; fell back as asked"


def _default_scale(dtype: Dtype | None, level: Level) -> LossScale:
    # bfloat16 has the exponents of float32: nothing underflows that scaling could save.
    return LossScale() if level.scales_loss and dtype == "float16" else LossScale.static(1.0)


def _entries(name: str, entries: Iterable[Any]) -> tuple[Any, ...]:
    if isinstance(entries, str) or not isinstance(entries, Iterable):
        raise InvalidOptionError(f"{name}={entries!r} is not a list; accepted: a list of entries. Pass [{entries!r}].")
    return tuple(entries)


def _check_choice(name: str, value: object, accepted: tuple[object, ...]) -> None:
    if value not in accepted:
        raise InvalidOptionError(
            f"{name}={value!r} is not a choice; accepted: {', '.join(map(repr, accepted))}. Pass one of these."
        )


def _warn(message: str) -> None:
    warnings.warn(message, PrecisionWarning, stacklevel=4)


def current(framework: str | None = None) -> Amp:
    """Give the active session (of a framework, where several are active).

    Raises:
        NotInitializedError: There is none.

    Sync: none.
    """
    return sessions.only("current", framework)


def wrap_optimizer(opt: Any, **options: Any) -> Any:
    """Give an optimizer that unscales, checks, skips and keeps its own loss scale: see `Amp.wrap_optimizer`."""
    return sessions.find("wrap_optimizer", opt).wrap_optimizer(opt, **options)


def scale_loss(loss: Any, opt: Any, *, loss_id: int = 0) -> ScaleLoss:
    """Give a region that yields the scaled loss: see `Amp.scale_loss`."""
    return sessions.find("scale_loss", opt, loss).scale_loss(loss, opt, loss_id=loss_id)


def unscale(opt: Any) -> None:
    """Make pending gradients true: see `Amp.unscale`."""
    sessions.find("unscale", opt).unscale(opt)


def clip_grad_norm(opt: Any, max_norm: float) -> Any:
    """Clip the true gradients: see `Amp.clip_grad_norm`."""
    return sessions.find("clip_grad_norm", opt).clip_grad_norm(opt, max_norm)


def gate(scheduler: Any, opt: Any) -> Gate:
    """Give a scheduler that waits for skipped steps: see `Amp.gate`."""
    return sessions.find("gate", opt).gate(scheduler, opt)


def prepare(model: Any, opt: Any = None) -> Any:
    """Do to a model what the level needs: see `Amp.prepare`."""
    return sessions.find("prepare", model, opt).prepare(model, opt)


def autocast(enabled: bool = True, dtype: object = None) -> Region:
    """Give a casting region, also a decorator: see `Amp.autocast`. The session is looked up on entry."""
    wanted = None if dtype is None else normalise_dtype(dtype)
    return Region(lambda: sessions.only("autocast").autocast_now(enabled, wanted))


def float_function(function: annotate.Function) -> annotate.Function:
    """Compute a function in float32; without a session it runs as it is: see `Amp.float_function`."""
    return annotate.annotate(function, "float", _session_of)


def half_function(function: annotate.Function) -> annotate.Function:
    """Compute a function in the compute dtype: see `Amp.half_function`."""
    return annotate.annotate(function, "half", _session_of)


def promote_function(function: annotate.Function) -> annotate.Function:
    """Compute a function in the widest dtype of its arguments: see `Amp.promote_function`."""
    return annotate.annotate(function, "promote", _session_of)


def _session_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Amp | None:
    active = sessions.all_sessions()
    return active[0] if len(active) == 1 else sessions.search((args, kwargs))


def enter_thread() -> None:
    """Switch process-wide casting on in the calling thread too, for every session: see `Amp.enter_thread`."""
    for session in sessions.all_sessions():
        session.enter_thread()


def state_dict(opt: Any = None) -> dict[str, Any]:
    """Give the loss scales as plain JSON types: see `Amp.state_dict`."""
    return _session_for("state_dict", opt).state_dict(opt)


def load_state_dict(state: object, opt: Any = None) -> Any:
    """Take over loss scales; gives `opt`, or the new optimizer state: see `Amp.load_state_dict`."""
    return _session_for("load_state_dict", opt).load_state_dict(state, opt)


def last_step(opt: Any) -> StepResult | None:
    """Tell what the last step of an optimizer, or of an optimizer state, did: see `Amp.last_step`."""
    return sessions.find("last_step", opt).last_step(opt)


def loss_scale(opt: Any) -> Any:
    """Give the current loss scale of an optimizer, or of an optimizer state: see `Amp.loss_scale`."""
    return sessions.find("loss_scale", opt).loss_scale(opt)


def observe(opt: Any) -> StepResult | None:
    """Send the events of the last step that are due, and give its result: see `Amp.observe`."""
    return sessions.find("observe", opt).observe(opt)


def _session_for(call: str, opt: Any) -> Amp:
    return sessions.only(call) if opt is None else sessions.find(call, opt)


def on_event(listener: Listener) -> Callable[[], None]:
    """Call a listener for every event of every active session; gives a function that removes it again.

    Raises:
        NotInitializedError: No session is active.

    Sync: none.
    """
    active = sessions.all_sessions() or [sessions.only("on_event")]
    with ExitStack() as stack:
        for session in active:
            stack.callback(session.on_event(listener))
        return stack.pop_all().close


def trace_overflow(model: Any) -> Any:
    """Give a region whose target tells the first module with a non-finite output: see `ampx.debug`."""
    return sessions.find("trace_overflow", model).backend.trace_overflow(model)


def shutdown(framework: str | None = None) -> None:
    """End the session of a framework, or all sessions: each framework is left as it was before `init`."""
    with ExitStack() as stack:  # all are shut down, whatever one of them raises
        for session in sessions.all_sessions():
            if framework is None or session.framework == framework:
                stack.callback(session.shutdown)


def backends() -> dict[str, str]:
    """List every framework with its state: `"registered"`, or why its plugin is broken. Imports no framework."""
    registry = default_registry()
    known = dict.fromkeys(registry.names(), "registered")
    return {**{name: f"broken: {error}" for name, error in registry.broken.items()}, **known}


def register_plugin(plugin: Any, name: str | None = None) -> None:
    """Register a plugin object by hand, as entry points do: see `Registry.register_plugin`."""
    default_registry().register_plugin(plugin, name)
