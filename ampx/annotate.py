"""Casting regions, and functions that say in which dtype they want to be computed."""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, TypeAlias, TypeVar

from .backend import Backend, CastPlan
from .errors import InvalidOptionError, shown
from .policy import Dtype

Function = TypeVar("Function", bound=Callable[..., Any])
Kind = Literal["float", "half", "promote"]
Casting: TypeAlias = tuple[Backend, CastPlan]


class _Thread(threading.local):
    """A number for each thread, which compilers can read where they cannot call `threading.get_ident`."""

    def __init__(self) -> None:
        self.number = next(_numbers)


_numbers = itertools.count()
_thread = _Thread()


class Region:
    """A casting region: a context manager that may be entered again and again, and a decorator."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        """Remember how to make the framework's region; it is made on entry, for the session of that moment."""
        self._make = make
        # By thread, as frameworks keep their switch. Nothing else holds them: after an exit that was interrupted they
        # end with the `with` statement.
        self._entered: dict[int, list[AbstractContextManager[Any]]] = {}

    def __enter__(self) -> None:
        region = self._make()
        region.__enter__()
        self._entered.setdefault(_thread.number, []).append(region)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        thread = _thread.number
        regions = self._entered[thread]
        region = regions.pop()
        if not regions:
            del self._entered[thread]
        region.__exit__(kind, error, trace)

    def __call__(self, function: Function) -> Function:
        """Return the function, run inside the region.

        Raises:
            InvalidOptionError: Its body would run later.
        """
        _check_runs_at_once(function)
        make = self._make

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with make():
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]


def annotate(function: Function, kind: Kind, find: Callable[..., Casting | None]) -> Function:
    """Return a function that casts its floating arguments and runs with casting off.

    Args:
        function: What to annotate.
        kind: `"float"`: float32. `"half"`: the compute dtype. `"promote"`: the widest among the arguments.
        find: Returns backend and plan for the arguments of a call, or None: then the function runs as it is.

    Raises:
        InvalidOptionError: Its body would run later.
    """
    _check_runs_at_once(function)

    @functools.wraps(function)
    def annotated(*args: Any, **kwargs: Any) -> Any:
        casting = find(args, kwargs)
        if casting is None:
            return function(*args, **kwargs)
        backend, plan = casting
        dtype: Dtype = "float32" if kind == "float" else plan.dtype
        if kind == "promote":
            dtype = backend.widest((args, kwargs), plan.dtype)
        with backend.autocast(plan, False):
            return function(*backend.cast(args, dtype), **backend.cast(kwargs, dtype))

    return annotated  # type: ignore[return-value]


def _check_runs_at_once(function: Callable[..., Any]) -> None:
    """Raise for what returns before its body, or its methods, run: the region would have ended by then."""
    deferred = (inspect.isclass, inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(runs_later(function) for runs_later in deferred):
        raise InvalidOptionError(
            f"a decorator of ampx got {shown(function)}: what a class, a generator or a coroutine computes runs when "
            f"the region has ended; accepted: functions that compute what they return. Write `with ampx.autocast(…):` "
            f"around what computes, or decorate the method or function that does."
        )
