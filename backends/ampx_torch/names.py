"""The modules of a model, or of every model that is called, with the names that `allow` and `deny` take."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from ampx.modules import Names as RootNames
from ampx_torch.casting.module_rules import plain_name

Names: TypeAlias = dict[nn.Module, str]


def named(model: nn.Module) -> Names:
    """Return the modules with their names; of a wrapper and what it wraps, which have one name, what it wraps."""
    return {module: name for name, module in {plain_name(name): m for name, m in model.named_modules()}.items()}


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
    """Hand over the modules of every model that is called inside the region, before its first call.

    They come again where a larger model takes them: see `ampx.modules.Names`.
    """
    arrivals = RootNames(
        None,
        lambda root: [(name, module) for module, name in named(root).items()],
        lambda added: take({module: name for name, module in added}),
        (nn.Module,),
    )
    _listen(arrivals)
    try:
        yield
    finally:
        _stop(arrivals)


class _Thread(threading.local):
    """How many calls of modules are under way."""

    depth: int = 0


class _Patch:
    """The former `nn.Module.__call__`, and whether `_call` has replaced it."""

    native: Any = None
    stands: bool = False


_thread, _patch = _Thread(), _Patch()
_listeners: list[RootNames] = []
_lock = threading.Lock()


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module; what is outermost is announced before."""
    if torch.compiler.is_compiling():
        return _patch.native(self, *args, **kwargs)
    if _thread.depth == 0 and not getattr(self, "_is_replica", False):  # DataParallel's copies share the hooks
        for listener in tuple(_listeners):
            listener.of(self)
    _thread.depth += 1
    try:
        return _patch.native(self, *args, **kwargs)
    finally:
        _thread.depth -= 1


def _listen(arrivals: RootNames) -> None:
    with _lock:
        _listeners.append(arrivals)
        if not _patch.stands:
            _patch.native, _patch.stands = nn.Module.__call__, True
            nn.Module.__call__ = _call


def _stop(arrivals: RootNames) -> None:
    with _lock:
        _listeners.remove(arrivals)
        if not _listeners and nn.Module.__call__ is _call:  # else somebody else's stands around it
            nn.Module.__call__ = _patch.native
            _patch.stands = False
