"""How the steps of a compiled function reach the host without a callback, which JAX calls slowly.

`jax.jit` gives functions with hidden outputs, whether each update found finite gradients, and a hidden input, the loss
scale, which moves on the device. The script sees neither; the host looks at the outputs some steps later and moves its
own scale by them. That holds for updates that are traced directly in such a function. Where one is traced elsewhere, in
a loop or in a function that the script compiles by other means, functions with updates are from then on as the script
made them, and tell by callbacks: so steps stay in order. `benchmarks/run_jax_outcomes.py` times both ways.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from ampx.scale_state import LossScale, LossScaleState, next_state
from ampx_jax import state as states

# The host looks at half of so many steps at a time: the device has done those, and nothing waits.
_KEPT: Final = 64
_KNOWN_OPTIONS: Final = {"static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "keep_unused"}
# May be newer than the oldest supported JAX: without it everything is reported by callbacks.
_present_trace: Final = getattr(jax.extend.core, "get_opaque_trace_state", None)
_SCALE: Final = "ampx_loss_scale"
_Numbers = tuple[Any, ...] | None


@dataclass
class _Frame:
    """One trace of one compiled function."""

    trace: Any  # stands for the trace: an update belongs to it where the present trace equals it
    state: LossScaleState | None  # the loss scale for what is traced next; None where the script scales by itself
    flags: tuple[Any, ...] = ()  # what came of the updates up to now
    used: bool = False  # the scale was read, or an update was taken


class Outcomes:
    """The steps that the host has not looked at, and the loss scale on the device."""

    def __init__(
        self,
        config: LossScale | None,
        tell: Callable[[Any], None],
        tell_loss: Callable[[Any], None] | None = None,
        at_once: bool = False,
    ) -> None:
        """Start with the scale that `config` gives, or none.

        Args:
            config: Of the loss scale; None where nothing reads one, so that compiled functions have no input for it.
            tell: Takes the outcomes in order.
            tell_loss: Takes the losses that were taken, each before what came of its step.
            at_once: The host looks after every call, and losses come in order with what callbacks tell.
        """
        # An update tells by a callback, or the scale is read by one.
        self.mixed = _present_trace is None or jax.process_count() > 1
        self._moving = config if config is not None and config.dynamic else None
        self._tell = tell
        self._tell_loss = tell_loss
        self._at_once = at_once
        self._thread = threading.get_ident()
        self._outside = present_trace()
        self._frame: _Frame | None = None
        self._kept: deque[Any] = deque()
        # None is another structure: what was compiled with a scale is compiled anew.
        self._numbers: _Numbers = None if config is None else tuple(states.as_arrays(config.initial_state()).values())

    # -- while a function is traced ----------------------------------------------------------------

    def _direct(self) -> _Frame | None:
        frame = self._frame
        if frame is None or threading.get_ident() != self._thread or present_trace() != frame.trace:
            return None
        return frame

    def _used(self) -> _Frame | None:
        frame = None if self.mixed else self._direct()
        if frame is not None:
            frame.used = True
        return frame

    def scale(self) -> Any:
        """Return the loss scale as a traced number; None: read it by a callback."""
        frame = self._used()
        return None if frame is None or frame.state is None else frame.state.scale

    def take(self, outcome: Any) -> bool:
        """Take what came of an update for a hidden output; False: tell it by a callback."""
        frame = self._used()
        if frame is None:
            return False
        frame.flags = (*frame.flags, outcome)
        if self._moving is not None and frame.state is not None:
            frame.state = next_state(self._moving, frame.state, outcome, where=jnp.where)
        return True

    def take_loss(self, loss: Any) -> bool:
        """Take a loss for a hidden output; False: it has to be told in another way."""
        frame = self._used() if self._at_once else self._direct()
        if frame is None:
            return False
        frame.flags = (*frame.flags, {"loss": loss})
        return True

    def mix(self) -> None:
        """From now on there are callbacks. Sync: the first time, with all steps up to now."""
        if not self.mixed:
            try:
                self.look(0)
            finally:
                self.mixed = True

    # -- while it runs -----------------------------------------------------------------------------

    def open(self, body: _Body) -> bool:
        """Return whether this function may be called with hidden parts now."""
        return (
            not (self.mixed and body.used)
            and threading.get_ident() == self._thread
            and present_trace() == self._outside  # else it is called inside another function's trace
        )

    def trace(self, body: _Body, numbers: _Numbers, call: Callable[[], Any]) -> tuple[Any, tuple[Any, ...], Any]:
        """Trace a function; gives its result, the flags of its updates, and the loss scale after them."""
        before = self._frame
        trace = present_trace()
        state = None if numbers is None else LossScaleState(*numbers)
        self._frame = frame = _Frame(trace, state) if trace != self._outside else None
        try:
            result = call()
        finally:
            self._frame = before
        if frame is None or not (frame.used or frame.flags):
            return result, (), None
        body.used = body.used or frame.used
        if self._moving is None or frame.state is None or all(isinstance(flag, dict) for flag in frame.flags):
            return result, frame.flags, None
        return result, frame.flags, tuple(states.as_arrays(frame.state).values())

    def call(self, compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a compiled function and keep what it hides."""
        result, flags, numbers = compiled(*args, **kwargs, **{_SCALE: self._numbers})
        if numbers is not None:
            self._numbers = numbers
            if numbers[0].committed:  # it could meet data on other devices in another function
                self.mix()
        if flags:
            self._kept.append(flags)
            if self.mixed or self._at_once:
                self.look(0)
            elif len(self._kept) >= _KEPT:
                self.look(_KEPT // 2)
        return result

    def look(self, left: int) -> None:
        """Report the kept steps, but for the last `left` calls. Sync: with these steps."""
        steps = [self._kept.popleft() for _ in range(len(self._kept) - left)]
        if steps:
            # There it starts all copies at once; here it would only cost time. Losses alone need not be waited for.
            if jax.default_backend() != "cpu" and not self.mixed:
                steps = jax.device_get(steps)
            for outcome in itertools.chain.from_iterable(steps):
                if isinstance(outcome, dict):
                    assert self._tell_loss is not None
                    self._tell_loss(outcome["loss"])
                else:
                    self._tell(np.asarray(outcome))


def present_trace() -> Any:
    """Return what stands for the trace that goes on in this thread, and equals only itself; None: JAX does not say."""
    return None if _present_trace is None else _present_trace(convention="flax")


class _Body:
    """What is compiled in a function's place."""

    def __init__(self, find: Callable[[], Outcomes | None], function: Callable[[], Any], like: Any) -> None:
        """Keep a getter of the function: a weak reference, where this lives as long as the function."""
        self.used = False  # it reads the loss scale, or an update is in it
        self._find = find
        self._function = function
        self.__name__ = getattr(like, "__name__", type(like).__name__)
        self.__signature__ = inspect.signature(like)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        numbers = kwargs.pop(_SCALE)
        outcomes = self._find()
        assert outcomes is not None
        return outcomes.trace(self, numbers, functools.partial(self._function(), *args, **kwargs))


def jit(
    native: Callable[..., Any], find: Callable[[], Outcomes | None], called: Callable[[Outcomes], None] | None
) -> Callable[..., Any]:
    """Return `jax.jit` whose functions report without callbacks; with an observer, each then calls `called`."""
    # JAX compiles a function once, however often it is given to jit; so shall it be with what stands in its place.
    bodies: weakref.WeakKeyDictionary[Any, _Body] = weakref.WeakKeyDictionary()

    def body_of(function: Any) -> _Body | None:
        try:
            if isinstance(function, types.MethodType):  # a new one each time, which JAX compiles each time
                return _Body(find, lambda: function, function)
            if not isinstance(function, (types.FunctionType, functools.partial)):
                return None
            if function not in bodies:
                bodies[function] = _Body(find, weakref.ref(function), function)
            return bodies[function]
        except (TypeError, ValueError):  # no signature
            return None

    @functools.wraps(native)
    def managed(*function: Any, **options: Any) -> Any:
        if not function:
            return functools.partial(managed, **options)
        plain = native(*function, **options)
        body = body_of(function[0]) if len(function) == 1 and options.keys() <= _KNOWN_OPTIONS else None
        if body is not None:
            return _told(plain, native(body, **options), body, find, called)
        return plain if called is None else _noted(plain, find, called)

    return managed


def _told(
    plain: Any,
    compiled: Any,
    body: _Body,
    find: Callable[[], Outcomes | None],
    called: Callable[[Outcomes], None] | None,
) -> Any:
    """Return what the script takes for the compiled function `plain`; it has everything that this has."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        outcomes = find()
        if outcomes is None:
            return plain(*args, **kwargs)
        hidden = outcomes.open(body)
        result = outcomes.call(compiled, args, kwargs) if hidden else plain(*args, **kwargs)
        if called is not None:
            called(outcomes)
        return result

    def clear_cache() -> None:
        plain.clear_cache()
        compiled.clear_cache()

    _copy_attributes(plain, call)
    call.clear_cache = clear_cache  # type: ignore[attr-defined]
    return call


def mapping(
    native: Callable[..., Any], find: Callable[[], Outcomes | None], called: Callable[[Outcomes], None]
) -> Callable[..., Any]:
    """Return `jax.pmap` whose functions each call `called`."""

    @functools.wraps(native)
    def managed(*args: Any, **options: Any) -> Any:
        return _noted(native(*args, **options), find, called)

    return managed


def _noted(plain: Any, find: Callable[[], Outcomes | None], called: Callable[[Outcomes], None]) -> Any:
    """Return a compiled function that tells by callbacks, after each of whose calls `called` is called."""
    call = noted(plain, find, called)
    _copy_attributes(plain, call)
    return call


def noted(plain: Any, find: Callable[[], Outcomes | None], called: Callable[[Outcomes], None]) -> Any:
    """Return a function after each of whose calls `called` is called."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        result, outcomes = plain(*args, **kwargs), find()
        if outcomes is not None:
            called(outcomes)
        return result

    return call


def _copy_attributes(plain: Any, call: Any) -> None:
    for name in dir(plain):
        if not name.startswith("__"):
            setattr(call, name, getattr(plain, name))
