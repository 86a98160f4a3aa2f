"""`ampx.init`: choose what a session computes in, check everything, then switch it on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from . import callers, sessions
from .amp import Amp
from .backend import Backend
from .contract import CastPlan, Device
from .effective import Effective
from .errors import InvalidOptionError, PrecisionWarning, UnsupportedByBackendError, UnsupportedDtypeError
from .levels import Level, OptLevel, find_level
from .policy import Dtype, normalise_dtype
from .registry import default_registry
from .scale_state import LossScale


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
    _check_level(backend, found_level)
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


def check_settings(backend: Backend, dtype: str, level: str, device: str) -> None:
    """Raise what `init` would say of settings, as far as it can be known without disturbing the framework.

    A device that was not named is not looked for: that would wake the driver, before the script has said which
    devices it wants to see, or has forked.

    Raises:
        UnsupportedDtypeError, UnsupportedDeviceError, UnsupportedLevelError, UnsupportedByBackendError: A setting
            cannot be honoured.

    Sync: none.
    """
    found_level = find_level(level)
    _check_level(backend, found_level)
    wanted = None if dtype == "auto" else normalise_dtype(dtype)
    if device != "auto":
        found = backend.device(device)
        if wanted is not None and wanted != "float32" and found_level.name != "O0":
            _check_dtype(backend, found, wanted)


def _check_level(backend: Backend, level: Level) -> None:
    if level.name not in backend.capabilities.levels:
        raise UnsupportedByBackendError(
            f"level={level.name!r} is not supported by backend {backend.name!r}; supported: "
            f"{', '.join(sorted(backend.capabilities.levels))}. Choose one of these."
        )


def _check_dtype(backend: Backend, device: Device, wanted: Dtype) -> None:
    if wanted not in device.native | device.emulated:
        raise UnsupportedDtypeError(
            f"{_unsupported(backend, device, wanted)}. Choose one of these, another device, or on_unsupported='warn' "
            f"to fall back."
        )


def _unsupported(backend: Backend, device: Device, wanted: Dtype) -> str:
    can = ", ".join(sorted(device.native | device.emulated)) or f"none: only float32 ({device.reason})"
    return f"dtype={wanted!r} is not supported by backend {backend.name!r} on {device.name!r}; supported: {can}"


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
            callers.warn(f"mixed precision is off on {device.name}: {device.reason}.{advice}", PrecisionWarning)
        return device.preferred, device.reason
    if wanted in device.native:
        return wanted, f"asked for; computed natively on {device.name}"
    if wanted in device.emulated:
        reason = f"asked for; {device.name} has no hardware for {wanted}, so it is emulated and slow"
        callers.warn(f"dtype={wanted!r}: {reason}.", PrecisionWarning)
        return wanted, reason
    if on_unsupported == "raise":
        _check_dtype(backend, device, wanted)
    message = _unsupported(backend, device, wanted)
    callers.warn(f"{message}; falling back to {device.preferred or 'float32'}.", PrecisionWarning)
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
