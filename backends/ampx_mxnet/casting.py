"""MXNet's amp, switched on and off again: `amp.init` underneath, with what it lacks around it.

`amp.init` replaces functions in MXNet's modules of operators, for the process and for ever. Here every replacement is
put behind a function that chooses, at each call, between it and the original; and the originals come back at the end.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from ampx.backend import CastPlan
from ampx.errors import ProtocolError, UnsupportedByBackendError
from ampx.session import sessions

from . import accumulation, hybrid, oplists, switch
from .compat import amp, mx
from .dtypes import DTYPES

_amp = amp.amp
_FLAGS: Final = ("_amp_initialized", "_amp_loss_scale_initialized", "_loss_scaler")
_lock = threading.RLock()

check_plan = oplists.check_plan


@dataclass(eq=False)
class _Installed:
    """What stands in MXNet's modules now.

    Attributes:
        plan: By which it casts.
        replaced: Module, name, the original and what replaces it.
        flags: The state of MXNet's amp before.
        users: Regions, and the session, that need it.
    """

    plan: CastPlan
    replaced: list[tuple[ModuleType, str, Any, Any]]
    flags: dict[str, Any]
    users: int = 0


class _State:
    """The one thing that can be installed in a process."""

    installed: _Installed | None = None
    session: _Installed | None = None


def activate(plan: CastPlan) -> None:
    """Switch casting on in all threads until `deactivate`.

    Raises:
        ProtocolError: The script called MXNet's own `amp.init`, which cannot be undone.
    """
    deactivate()
    _State.session = _acquire(plan)
    switch.set_default(plan)


def deactivate() -> None:
    """Undo `activate`: every function that `amp.init` replaced is the original again."""
    switch.set_default(None)
    held, _State.session = _State.session, None
    if held is not None:
        _release(held)


def region(plan: CastPlan, enabled: bool) -> AbstractContextManager[None]:
    """Return a region with casting on or off in the calling thread.

    Raises:
        ProtocolError: As `activate`.
    """
    return _on(plan) if enabled else switch.within(None)


@contextmanager
def _on(plan: CastPlan) -> Iterator[None]:
    held = _acquire(plan)
    try:
        with switch.within(plan):
            yield
    finally:
        _release(held)


def _acquire(plan: CastPlan) -> _Installed:
    with _lock:
        installed = _State.installed
        if installed is not None and installed.plan != plan:
            _uninstall(installed)
            installed = None
        if installed is None:
            installed = _State.installed = _install(plan)
        installed.users += 1
        return installed


def _release(held: _Installed) -> None:
    with _lock:
        held.users -= 1
        if held.users == 0 and _State.installed is held:
            _uninstall(held)


def _install(plan: CastPlan) -> _Installed:
    if _amp._amp_initialized:
        raise ProtocolError(
            "mxnet's own amp.init was called in this process, and cannot be undone; accepted: ampx.init alone. Remove "
            "amp.init from the script and start it again."
        )
    flags = {name: getattr(_amp, name) for name in _FLAGS}
    before = [(module, dict(vars(module))) for module in _modules()]
    handlers = list(logging.getLogger().handlers)
    try:
        amp.init(plan.dtype, **oplists.lists(plan))
    except BaseException:
        for module, names in before:
            for name, original in names.items():
                setattr(module, name, original)
        _restore_flags(flags)
        raise
    finally:
        # Native defect: amp.init logs on the root logger, and so configures logging for the whole process.
        logging.getLogger().handlers[:] = handlers
    outputs = set(_amp.list_loss_output_functions(DTYPES[plan.dtype]))
    replaced = []
    for module, names in before:
        for name, original in names.items():
            native = vars(module)[name]
            if native is not original:
                ours = _refusing(original) if name in outputs else _choosing(original, native)
                setattr(module, name, ours)
                replaced.append((module, name, original, ours))
    hybrid.follow()
    accumulation.follow()
    return _Installed(plan, replaced, flags)


def _uninstall(installed: _Installed) -> None:
    _State.installed = None
    hybrid.unfollow()
    accumulation.unfollow()
    for module, name, original, ours in installed.replaced:
        if vars(module).get(name) is ours:  # else somebody replaced it once more, and owns it
            setattr(module, name, original)
    _restore_flags(installed.flags)


def _restore_flags(flags: dict[str, Any]) -> None:
    for name, value in flags.items():
        setattr(_amp, name, value)


def _modules() -> list[ModuleType]:
    """List the modules in which `amp.init` replaces functions, each once."""
    found: dict[int, ModuleType] = {}
    for module in (mx.ndarray, mx.symbol):
        parts = [getattr(module, prefix[1:-1]) for prefix in mx.base._OP_NAME_PREFIX_LIST]
        for one in (module, module.op, module._internal, *parts):
            found[id(one)] = one
    return list(found.values())


def _choosing(original: Callable[..., Any], native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (original if switch.current() is None else native)(*args, **kwargs)

    return choose


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Guard an operator that makes its own gradient, whatever its output is multiplied with."""

    @functools.wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        session = sessions.get("mxnet")
        if session is not None and session.enabled:
            for group in session.live_groups():
                if group.states[0].scale != 1.0:
                    raise UnsupportedByBackendError(
                        f"{original.__name__} makes its own gradient, which scale_loss cannot scale (the loss scale is "
                        f"{group.states[0].scale:g}); accepted: losses of mxnet.gluon.loss. Use one of these, or "
                        f"loss_scale=1."
                    )
        return original(*args, **kwargs)

    return refuse
