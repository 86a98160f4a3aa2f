"""The sessions of this process: the only global state of ampx."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from .errors import NotInitializedError, ScaleCollapsedWarning
from .events import Event, ScaleCollapsed
from .registry import default_registry

if TYPE_CHECKING:
    from .amp import Amp

_active: dict[str, Amp] = {}
# The wrapped optimizers by framework, those of ended sessions too: any backward may reach their parameters.
_wrapped: dict[str, list[weakref.ref[Any]]] = {}
_watchers: list[list[Callable[[Amp], None]]] = []


def replace(session: Amp) -> None:
    """Make a session the one of its framework; the former one is shut down, and stays if that fails."""
    former = _active.get(session.framework)
    try:
        if former is not None:
            former.shutdown()
        session.activate()
    except BaseException:
        if _active.get(session.framework) is session:  # what it switched on before the exception goes off again
            session.shutdown()
        if former is not None:
            former.activate()
        raise
    for (started,) in tuple(_watchers):
        started(session)


def watch(started: Callable[[Amp], None]) -> Callable[[], None]:
    """Call a function with every session that `init` starts from now on; the result of this ends that."""
    entry = [started]
    _watchers.append(entry)

    def end() -> None:
        _watchers[:] = [one for one in _watchers if one is not entry]

    return end


def add(session: Amp) -> None:
    """Make a session the one of its framework."""
    _active[session.framework] = session


def remove(session: Amp) -> None:
    """Forget a session."""
    if _active.get(session.framework) is session:
        del _active[session.framework]


def get(framework: str) -> Amp | None:
    """Give the session of a framework, if there is one."""
    return _active.get(framework)


def note_wrapped(framework: str, optimizers: Iterable[Any]) -> None:
    """Note optimizers that a session has wrapped."""
    _wrapped.setdefault(framework, []).extend(map(weakref.ref, optimizers))


def living_optimizers(framework: str) -> list[Any]:
    """List the wrapped optimizers of a framework that are alive, whichever session wrapped them."""
    references = _wrapped.get(framework, [])
    living = [optimizer for reference in references if (optimizer := reference()) is not None]
    if len(living) < len(references):
        _wrapped[framework] = [reference for reference in references if reference() is not None]
    return living


def all_sessions() -> list[Amp]:
    """List the active sessions."""
    return list(_active.values())


def only(call: str, framework: str | None = None) -> Amp:
    """Give the only active session, or that of a framework.

    Raises:
        NotInitializedError: There is none, or several.
    """
    found = _active.get(framework) if framework is not None else None
    if framework is None and len(_active) == 1:
        found = next(iter(_active.values()))
    if found is None:
        raise _not_initialized(call)
    return found


def find(call: str, *objects: Any) -> Amp:
    """Give the session of the framework that these objects belong to, importing nothing.

    Raises:
        NotInitializedError: No session is active for it.
    """
    found: Amp | None
    member = getattr(objects[0], "ampx_member", None)
    if member is not None:
        found = _active.get(member.group.framework)
    elif len(_active) == 1:
        found = next(iter(_active.values()))
    else:
        found = search(objects)
    if found is None:
        raise _not_initialized(call)
    return found


def search(objects: Iterable[Any]) -> Amp | None:
    """Give the session whose framework owns the first recognised object, looking into containers."""
    for item in objects:
        member = getattr(item, "ampx_member", None)
        if member is not None:
            return _active.get(member.group.framework)
        found = _owner(item)  # first: a named tuple such as optax's has an owner, and functions inside that have none
        if found is None and isinstance(item, (list, tuple)):
            found = search(item)
        elif found is None and isinstance(item, dict):
            found = search(item.values())
        if found is not None:
            return found
    return None


def _owner(item: Any) -> Amp | None:
    modules = {base.__module__.partition(".")[0] for base in type(item).__mro__}
    for name, session in _active.items():
        if modules.intersection(default_registry().registration(name).roots):
            return session
    return None


def emit(framework: str, event: Event) -> None:
    """Send an event to the framework's session and to the plugins; warn once a collapse."""
    session = _active.get(framework)
    if session is not None:
        session.emit(event)
    default_registry().manager.hook.ampx_event(event=event)
    if isinstance(event, ScaleCollapsed):
        names = ", ".join(event.parameters) or "(the backend cannot tell)"
        warnings.warn(
            f"{event.consecutive_skips} steps in a row were skipped on {framework}; the loss scale is "
            f"{event.next_scale:g}. Gradients that are not finite: {names}. The loss or a layer overflows whatever "
            f"the scale: look with ampx.trace_overflow(model), lower the learning rate, or use bfloat16.",
            ScaleCollapsedWarning,
            stacklevel=2,
        )


def _not_initialized(call: str) -> NotInitializedError:
    active = ", ".join(sorted(_active)) or "none"
    return NotInitializedError(
        f"{call} found no session for what it was given; active sessions: {active}. Call "
        f"ampx.init(framework=…) first, or, with several sessions, call the method of the one you mean."
    )
