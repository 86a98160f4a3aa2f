"""Functions that were traced under one casting are traced anew under another.

TensorFlow has no way to say that a trace depends on anything but the arguments: a `tf.function` that was traced with
casting on would compute in low precision inside `autocast(enabled=False)`, silently. The traces of a function lie in
its cache under a context (device, strategy, ...), to which this module adds what ampx decided in the trace.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, Final, TypeVar
from unittest import mock

import tensorflow as tf
from tensorflow.core.function.polymorphism.function_cache import FunctionCache, FunctionContext
from tensorflow.core.function.polymorphism.type_dispatch import TypeDispatchTable

from ampx.errors import AmpxWarning

_seen: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
# Gives what traces depend on at the moment, one function a module that decides something.
_decisions: Final[list[Callable[[], Hashable]]] = []


# Called before every call of a function whose traces depend on something.
_callers: Final[list[Callable[[], None]]] = []

Decision = TypeVar("Decision", bound=Callable[[], Hashable])


def decided_by(decision: Decision) -> Decision:
    """Name something that traces depend on; a decorator."""
    _decisions.append(decision)
    return decision


def before_calls(function: Callable[[], None]) -> None:
    """Have a function called before every call of a function whose traces depend on something."""
    _callers.append(function)


def depend() -> None:
    """Let the functions that are being traced now be traced anew when a decision changes."""
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    if graph in _seen:
        return
    _seen.add(graph)
    for function in _functions_being_traced():
        cache = getattr(function, "_function_cache", None)
        if type(cache) is FunctionCache:
            cache.__class__ = _Cache
        elif type(cache) is not _Cache:
            warnings.warn(
                f"TensorFlow {tf.__version__} keeps the traces of {function!r} where ampx does not find them: it will "
                f"not notice when casting changes. Trace it under one casting only.",
                AmpxWarning,
                stacklevel=2,
            )


def launcher() -> int | None:
    """Return the thread that runs a strategy's step, where the caller is one of its replicas."""
    if not tf.distribute.has_strategy():
        return None
    replica = threading.current_thread()
    for ident, stack in sys._current_frames().items():
        for frame in _frames(stack, "tensorflow.python.distribute.mirrored_run"):
            if replica in frame.f_locals.get("threads", ()):
                return ident
    return None


def _functions_being_traced() -> Iterator[Any]:
    waiting = launcher()  # the replicas of a strategy run in threads of their own; who traces waits in another
    stack = sys._getframe() if waiting is None else sys._current_frames()[waiting]
    for frame in _frames(stack, "tensorflow.python.eager.polymorphic_function"):
        function = frame.f_locals.get("self")
        if isinstance(function, tf.types.experimental.PolymorphicFunction):
            yield function


def _frames(stack: FrameType | None, package: str) -> Iterator[FrameType]:
    while stack is not None:
        if stack.f_globals.get("__name__", "").startswith(package):
            yield stack
        stack = stack.f_back


class _Table(TypeDispatchTable):
    """The traces of one context; what was asked for last is found by one comparison.

    TensorFlow hashes the types of all arguments and captured variables up to five times a call. Without this a step
    takes 12 % longer with 2 layers of 64 units, and 9 % with 40 (paired medians on one core).
    """

    request: Any = None
    trace: Any = None


class _Cache(FunctionCache):
    """The traces of a function, kept apart by what they depend on."""

    __slots__ = ()

    def lookup(self, function_type: Any, context: Any = None) -> Any:
        """Find a trace; a function that calls this one then depends on the same."""
        if tf.executing_eagerly():
            for function in _callers:
                function()
        else:
            depend()
        context = _with_decisions(context)
        table = self._dispatch_dict.get(context)
        if type(table) is not _Table:
            return super().lookup(function_type, context)
        if table.trace is None or table.request != function_type:
            table.request, table.trace = function_type, super().lookup(function_type, context)
        return table.trace

    def delete(self, function_type: Any, context: Any = None) -> Any:
        """Forget a trace."""
        context = _with_decisions(context)
        table = self._dispatch_dict.get(context)
        if type(table) is _Table:
            table.request = table.trace = None
        return super().delete(function_type, context)

    def add(self, fn: Any, context: Any = None) -> None:
        """Keep a trace."""
        context = _with_decisions(context)
        table = self._dispatch_dict.setdefault(context, _Table())
        if type(table) is _Table:  # another trace may suit the last request better
            table.request = table.trace = None
        super().add(fn, context)

    def generalize(self, context: Any, function_type: Any) -> Any:
        """Find a wider signature among the traces."""
        return super().generalize(_with_decisions(context), function_type)


def _with_decisions(context: Any) -> FunctionContext:
    context = context or FunctionContext()
    return context._replace(context=(context.context, *(decision() for decision in _decisions)))


_alone: Final[list[object]] = []


@decided_by
def _region() -> Hashable:
    return tuple(map(id, _alone))


@contextmanager
def anew() -> Iterator[None]:
    """Return a region in which every function has traces of its own."""
    key = object()
    _alone.append(key)
    try:
        with ExitStack() as stack:
            for name in ("lookup", "add", "delete", "generalize"):
                method = _keyed(getattr(FunctionCache, name), key, name)
                stack.enter_context(mock.patch.object(FunctionCache, name, method))
            yield
    finally:
        _alone.remove(key)


def _keyed(native: Callable[..., Any], key: object, name: str) -> Callable[..., Any]:
    """Return a method of a cache that looks under a key, too; caches of `depend` have it among their decisions."""

    def keyed(self: Any, first: Any, second: Any = None) -> Any:
        if type(self) is not FunctionCache:
            return native(self, first, second)
        passed = first if name == "generalize" else second
        context = passed or FunctionContext()
        context = context._replace(context=(context.context, key))
        return native(self, context, second) if name == "generalize" else native(self, first, context)

    return keyed
