"""Functions that a script registered by module and name, to be cast from the next `initialize` on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ampx.annotate import Kind
from ampx.backend import CastPlan
from ampx.errors import InvalidOptionError, UnsupportedOpError
from ampx_torch.casting.oplists import Rule, TorchPlan, resolve

from . import decorators, lists


@dataclass
class _Registry:
    """What was registered, by (module, name); and (module, name, its own attribute or None) of what was replaced."""

    entries: dict[tuple[Any, str], Kind] = field(default_factory=dict)
    replaced: list[tuple[Any, str, Any]] = field(default_factory=list)


_registry = _Registry()


def add(module: Any, name: str, kind: Kind) -> None:
    """Register a function of a module or class, by its name there."""
    if not hasattr(module, name):
        raise InvalidOptionError(
            f"register_{kind}_function got {name!r}, which {getattr(module, '__name__', module)!r} does not have; "
            f"accepted: the name of a function of the module or class. Correct it."
        )
    _registry.entries[module, name] = kind


def entries(device: str) -> tuple[list[Any], list[Any]]:
    """Return the entries for `allow` and `deny`: registered functions that are operations of torch."""
    allow: list[Any] = []
    deny: list[Any] = []
    for (module, name), kind in _all().items():
        entry = _entry(getattr(module, name), kind)
        if entry is not None and _is_operation(entry, device):
            (allow if kind == "half" else deny).append(entry)
    return allow, deny


def _all() -> dict[tuple[Any, str], Kind]:
    """What was registered, after what was added to the lists by name."""
    return {**lists.edits(), **_registry.entries}


def _entry(function: Any, kind: Kind) -> Any:
    return Rule("promote", function) if kind == "promote" else function


def _is_operation(entry: Any, device: str = "cpu") -> bool:
    return bool(operation(entry))


def operation(entry: Any) -> tuple[str, ...]:
    """Return the overloads that an entry of an op list is about; none where it is no operation."""
    try:
        plan = resolve(CastPlan("cpu", "float16", "O1", (), (entry,)))
    except UnsupportedOpError:
        return ()
    return tuple(name for _, name in plan.operations) if isinstance(plan, TorchPlan) else ()


def patch() -> None:
    """Put casting functions in the place of registered ones that are no operations of torch."""
    restore()
    for (module, name), kind in _all().items():
        function = getattr(module, name)
        if not _is_operation(_entry(function, kind)):
            _registry.replaced.append((module, name, vars(module).get(name)))
            setattr(module, name, decorators.annotate(function, kind))


def forget() -> None:
    """Put the functions back, and register none."""
    restore()
    _registry.entries.clear()


def restore() -> None:
    """Put the functions back."""
    while _registry.replaced:
        module, name, own = _registry.replaced.pop()
        if own is None:
            delattr(module, name)
        else:
            setattr(module, name, own)
