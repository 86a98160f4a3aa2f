"""Names of modules: where in the model a traced operation comes from.

An operation carries a stack of names. `jax.named_scope` puts names there. Modules of flax (linen and nnx) are marked
there while a function is traced under `naming`, by their path in the model and their class.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple
from unittest import mock

import jax

from ampx.modules import is_meant

from .taps import tap

_MARK: Final = "ampx.module"
_TRANSFORMATION: Final = re.compile(r"[\w.]*\(|\)")
# What JAX itself puts there, and the regions of `ampx_jax.casting`.
_NO_NAMES: Final = re.compile(r"|checkpoint|rematted_computation|ampx\.(off|float16|bfloat16)")
# Marks and taps are in what was traced, so they are part of jax.jit's key.
_key: Final = jax.make_user_context(None)


class Scope(NamedTuple):
    """A named part of a model.

    Attributes:
        name: Its path, with dots.
        kind: Its class; "" for a name of `jax.named_scope`.
    """

    name: str
    kind: str


@functools.lru_cache(4096)
def scopes_of(name_stack: str) -> tuple[Scope, ...]:
    """Return the parts of the model that an operation is in, the outermost first."""
    scopes: list[Scope] = []
    for part in _TRANSFORMATION.sub("", name_stack).split("/"):
        if part.startswith(_MARK):
            _, name, kind = part.split("|")
            scopes.append(Scope(name, kind))
        elif not _NO_NAMES.fullmatch(part):
            outer = scopes[-1].name if scopes else ""
            scopes.append(Scope(f"{outer}.{part}" if outer else part, ""))
    return tuple(scopes)


def dtype_for(name: str, forced: tuple[tuple[str, str], ...]) -> str | None:
    """Return the dtype that the last matching pattern asks for."""
    return next((dtype for pattern, dtype in reversed(forced) if is_meant(name, pattern)), None)


class _Naming:
    """The modules of one trace."""

    def __init__(self, names: Mapping[int, tuple[str, Any]], taps: bool) -> None:
        self.names = dict(names)  # the modules are kept, so that no other gets the same id
        self.taps = taps
        self.roots: list[Any] = [type(module) for name, module in names.values() if not name]
        self.running: list[str] = []

    def prefix(self, root: Any, kind: str) -> str:
        """Return what the names within an outermost module begin with."""
        if root not in self.roots:
            self.roots.append(root)
        return "" if self.roots[0] == root else f"{kind}:"

    def call(self, name: str, kind: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module's method; what it calls on itself is no other call."""
        if self.running and self.running[-1] == name:
            return function(*args, **kwargs)
        if self.taps:
            args, kwargs = tap((args, kwargs), name, kind, "inputs")
        self.running.append(name)
        try:
            with jax.named_scope("|".join((_MARK, re.sub(r"[|/()]", "_", name), kind))):
                result = function(*args, **kwargs)
        finally:
            self.running.pop()
        return tap(result, name, kind, "forward") if self.taps else result


class _Thread(threading.local):
    naming: _Naming | None = None


_thread: Final = _Thread()


@contextmanager
def naming(model: Any = None, taps: bool = False) -> Iterator[None]:
    """Mark the modules of what is traced inside.

    Args:
        model: A module of flax nnx, by whose attributes it and its parts are named; else names begin at the outermost
            module that is called.
        taps: Let their inputs and outputs pass taps.
    """
    names = module_names(model)
    before, key = _thread.naming, (taps, tuple(sorted(name for name, _ in names.values())))
    _thread.naming = _Naming(names, taps)
    try:
        with ExitStack() as stack:
            stack.enter_context(_key(key))
            linen, nnx = sys.modules.get("flax.linen"), sys.modules.get("flax.nnx")
            if linen is not None:
                stack.enter_context(linen.override_named_call(False))
                stack.enter_context(linen.intercept_methods(_intercept))
            for kind in _subclasses(nnx.Module) if nnx is not None else ():
                if "__call__" in vars(kind):
                    stack.enter_context(mock.patch.object(kind, "__call__", _named(nnx, kind.__call__)))
            yield
    finally:
        _thread.naming = before


def module_names(model: Any) -> dict[int, tuple[str, Any]]:
    """Return, by their ids, names and modules of a module of flax nnx and its parts; nothing for other models."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(model, nnx.Module):
        return {}
    return {id(module): (_dotted(path), module) for path, module in nnx.iter_modules(model)}


def _dotted(path: Any) -> str:
    return ".".join(map(str, path))


def _subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


def _intercept(following: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    """Call a method of a module of flax linen."""
    module, this = context.module, _thread.naming
    if this is None or context.method_name == "setup" or module.scope is None or module.is_initializing():
        return following(*args, **kwargs)
    root = module
    while isinstance(root.parent, sys.modules["flax.linen"].Module):
        root = root.parent
    name = this.prefix(root, type(root).__name__) + _dotted(module.path)
    return this.call(name, type(module).__name__, following, args, kwargs)


def _named(nnx: Any, native: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call of a class of flax nnx that marks its module."""

    @functools.wraps(native)
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        this = _thread.naming
        if this is None:
            return native(module, *args, **kwargs)
        kind = type(module).__name__
        if id(module) not in this.names:
            prefix = this.prefix(type(module), kind)
            for path, part in nnx.iter_modules(module):
                this.names.setdefault(id(part), (prefix + _dotted(path), part))
        return this.call(this.names[id(module)][0], kind, functools.partial(native, module), args, kwargs)

    return call
