"""MXNet's amp, switched on and off again: `amp.init` underneath, with what it lacks around it.

`amp.init` replaces functions in MXNet's modules of operators, for the process and for ever. Here every replacement is
put behind a function that chooses, at each call, between it and the original; and the originals come back at the end.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final

import ampx
from ampx.backend import CastPlan
from ampx.errors import NotInitializedError, ProtocolError, UnsupportedByBackendError
from ampx.protocol import ScaleGroup
from ampx_mxnet import accumulation
from ampx_mxnet.compat import amp, mx
from ampx_mxnet.dtypes import DTYPES

from . import hybrid, numpy_extension, oplists, reading, switch
from .rules import modules_ruled

_amp = amp.amp
# Native defect: amp casts what this copies, and so the gradient that a custom function returns is lost on its way.
_COPY: Final = "_copyto"
_FLAGS: Final = ("_amp_initialized", "_amp_loss_scale_initialized", "_loss_scaler")
_lock = threading.RLock()

check_plan = oplists.check_plan


@dataclass(eq=False)
class _Installed:
    """What stands in MXNet's modules now."""

    plan: CastPlan  # by which it casts
    flags: dict[str, Any]  # the state of MXNet's amp before
    # Module, name, the original and what replaces it; while they are being replaced, all names and None.
    replaced: list[tuple[ModuleType, str, Any, Any]]
    whole: bool = False  # all of it is in place
    rules: ExitStack = field(default_factory=ExitStack)  # what undoes the rules about modules


class _State:
    """The casting that can be installed in a process once, and its users."""

    installed: _Installed | None = None
    session: CastPlan | None = None
    regions: tuple[weakref.ref[_On], ...] = ()  # of all threads; they may be gone, as in `switch`


class _On(switch.Region):
    """A region with casting on, which needs what is installed."""

    __slots__ = ()

    def __enter__(self) -> None:
        with _lock:
            _State.regions = (*_State.regions, weakref.ref(self, _settle_without))
            _settle()
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        with _lock:
            _State.regions = tuple(entry for entry in _State.regions if entry() is not self)
            _settle()


def running_session() -> ampx.Amp | None:
    """Return the session of MXNet; None where none runs."""
    try:
        return ampx.current("mxnet")
    except NotInitializedError:
        return None


def activate(plan: CastPlan) -> None:
    """Switch casting on in all threads until `deactivate`."""
    with _lock:
        _State.session = plan
        _settle()
    switch.set_default(plan)


def deactivate() -> None:
    """Undo `activate`: every function that `amp.init` replaced is the original again."""
    switch.set_default(None)
    with _lock:
        _State.session = None
        _settle()


def keep(plan: CastPlan) -> None:
    """Keep in place what regions of a plan need, until the running session ends: to put it there takes milliseconds."""
    session = running_session()
    if session is not None and _State.session is None:
        with _lock:
            _State.session = plan
            _settle()
        session.at_shutdown(deactivate)


def region(plan: CastPlan, enabled: bool) -> AbstractContextManager[None]:
    """Return a region with casting on or off in the calling thread."""
    return _On(plan) if enabled else switch.Region(None)


def _settle() -> None:
    """Install what the last region or else the session needs, and nothing else; also after an interrupted call."""
    regions = [region for entry in _State.regions if (region := entry()) is not None]
    plan = regions[-1].plan if regions else _State.session
    installed = _State.installed
    if installed is not None and not (installed.whole and installed.plan == plan):
        _uninstall(installed)
    if plan is not None and _State.installed is None:
        _install(plan)


def _settle_without(gone: weakref.ref[_On]) -> None:
    """Do without a region that an exception kept from being left to the end."""
    with _lock:
        _State.regions = tuple(entry for entry in _State.regions if entry is not gone)
        if _State.installed is not None and _State.installed.whole:  # else the garbage collector came amid a change
            _settle()


def _install(plan: CastPlan) -> None:
    if _amp._amp_initialized:
        raise ProtocolError(
            "mxnet's own amp.init was called in this process, and cannot be undone; accepted: ampx.init alone. Remove "
            "amp.init from the script and start it again."
        )
    # Noted before anything changes, so that it can be undone from wherever it is interrupted.
    before = [(module, name, value, None) for module in modules() for name, value in list(vars(module).items())]
    installed = _State.installed = _Installed(plan, {name: getattr(_amp, name) for name in _FLAGS}, before)
    handlers = list(logging.getLogger().handlers)
    try:
        with oplists.corrected():
            lists = oplists.lists(plan)
            amp.init(plan.dtype, **lists)
        numpy_extension.lower(lists["target_precision_ops"], plan.dtype)
        installed.rules.enter_context(modules_ruled(plan))
        hybrid.follow()
        accumulation.follow()
        reading.follow()
        installed.replaced = _replace(before, set(_amp.list_loss_output_functions(DTYPES[plan.dtype])))
        installed.whole = True
    except BaseException:
        _uninstall(installed)
        raise
    finally:
        # Native defect: amp.init logs on the root logger, and so configures logging for the whole process.
        logging.getLogger().handlers[:] = handlers


def _replace(
    before: list[tuple[ModuleType, str, Any, None]], outputs: set[str]
) -> list[tuple[ModuleType, str, Any, Any]]:
    """Put functions that look at the switch in the place of those that `amp.init` put there."""
    replaced = []
    for module, name, original, _ in before:
        native = vars(module)[name]
        if name == _COPY:
            setattr(module, name, original)
        elif native is not original:
            ours = _refusing(original) if name in outputs else _choosing(original, native)
            setattr(module, name, ours)
            replaced.append((module, name, original, ours))
    return replaced


def _uninstall(installed: _Installed) -> None:
    installed.whole = False
    installed.rules.close()
    hybrid.unfollow()
    accumulation.unfollow()
    reading.unfollow()
    for module, name, original, ours in installed.replaced:
        # Unless it was replaced once more by other code, which owns it.
        if ours is None or vars(module).get(name) is ours:
            setattr(module, name, original)
    for name, value in installed.flags.items():
        setattr(_amp, name, value)
    _State.installed = None


def modules() -> list[ModuleType]:
    """List the modules in which functions are replaced, each once."""
    modules: dict[int, ModuleType] = {id(place): place for place in numpy_extension.modules()}
    for module in (mx.ndarray, mx.symbol):
        parts = [getattr(module, prefix[1:-1]) for prefix in mx.base._OP_NAME_PREFIX_LIST]
        modules.update({id(place): place for place in (module, module.op, module._internal, *parts)})
    return list(modules.values())


def _choosing(original: Callable[..., Any], native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (original if switch.current() is None else native)(*args, **kwargs)

    return choose


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Guard an operator that makes its own gradient, whatever its output is multiplied with."""

    @functools.wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        for group in _scaled_groups():
            raise UnsupportedByBackendError(
                f"{original.__name__} makes its own gradient, which scale_loss cannot scale (the loss scale is "
                f"{group.states[0].scale:g}); accepted: losses of mxnet.gluon.loss. Use one of these, or loss_scale=1."
            )
        return original(*args, **kwargs)

    return refuse


def _scaled_groups() -> list[ScaleGroup]:
    session = running_session()
    if session is None or not session.enabled:
        return []
    return [group for group in session.live_groups() if group.states[0].scale != 1.0]
