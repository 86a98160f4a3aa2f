"""The modules of a model, or of every model that is called, with the names that `allow` and `deny` take."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import nn

from ampx.errors import UnsupportedOpError
from ampx_torch.casting.module_rules import plain_name

Names: TypeAlias = dict[nn.Module, str]


def named(model: nn.Module) -> Names:
    """Return the modules with their names; of a wrapper and what it wraps, which have one name, what it wraps."""
    return {module: name for name, module in {plain_name(name): m for name, m in model.named_modules()}.items()}


def check_patterns(patterns: tuple[str, ...], names: Names) -> None:
    """Raise where a pattern matches no module.

    Raises:
        UnsupportedOpError: One does not.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names.values()):
            shown = [name for name in names.values() if name]
            raise UnsupportedOpError(
                f"the pattern {pattern!r} matches no module of the model; accepted: patterns of names of its modules, "
                f"which are {', '.join(shown[:8]) or 'none'}{', …' if len(shown) > 8 else ''}. Correct it."
            )


@contextmanager
def each_model(model: nn.Module | None, take: Callable[[Names], None]) -> Iterator[None]:
    """Hand over the modules of a model; where it is None, those of every model inside the region, before its call.

    Compiled parts run uncompiled inside: hooks that come after the compiler would not be called.
    """
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if model is not None:
            take(named(model))
        else:
            stack.enter_context(called_models(take))
        yield


@contextmanager
def called_models(take: Callable[[Names], None]) -> Iterator[None]:
    """Hand over the modules of every model that is called inside the region, before its first call."""
    arrivals = _Arrivals(take)
    _listen(arrivals)
    try:
        yield
    finally:
        _stop(arrivals)


class _Arrivals:
    """The models that were called so far."""

    def __init__(self, take: Callable[[Names], None]) -> None:
        self._take = take
        self._names: Names = {}
        self._roots: dict[nn.Module, None] = {}
        self._prefixes: set[str] = set()

    def arrive(self, root: nn.Module) -> None:
        """Hand over the modules of a model that is called for the first time."""
        if root in self._roots or root in self._names:
            return
        names, prefix = named(root), ""
        if self._roots:
            kind = type(next(module for module, name in names.items() if not name)).__name__
            prefix, count = f"{kind}:", 1
            while prefix in self._prefixes:
                count += 1
                prefix = f"{kind}#{count}:"
        self._roots[root] = None
        self._prefixes.add(prefix)
        fresh = {module: prefix + name for module, name in names.items() if module not in self._names}
        self._names |= fresh
        self._take(fresh)


class _Thread(threading.local):
    """How many calls of modules are under way."""

    depth: int = 0


class _Patch:
    """What stood in the place of `nn.Module.__call__` before, and whether `_call` stands there."""

    native: Any = None
    stands: bool = False


_thread, _patch = _Thread(), _Patch()
_listeners: list[_Arrivals] = []
_lock = threading.Lock()


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module; what is outermost is announced before."""
    if torch.compiler.is_compiling():
        return _patch.native(self, *args, **kwargs)
    if _thread.depth == 0 and not getattr(self, "_is_replica", False):  # DataParallel's copies share the hooks
        for listener in tuple(_listeners):
            listener.arrive(self)
    _thread.depth += 1
    try:
        return _patch.native(self, *args, **kwargs)
    finally:
        _thread.depth -= 1


def _listen(arrivals: _Arrivals) -> None:
    with _lock:
        _listeners.append(arrivals)
        if not _patch.stands:
            _patch.native, _patch.stands = nn.Module.__call__, True
            nn.Module.__call__ = _call


def _stop(arrivals: _Arrivals) -> None:
    with _lock:
        _listeners.remove(arrivals)
        if not _listeners and nn.Module.__call__ is _call:  # else somebody else's stands around it
            nn.Module.__call__ = _patch.native
            _patch.stands = False
