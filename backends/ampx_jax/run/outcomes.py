"""How updates and losses reach the host from traced code, and the loss scale comes there: hidden outputs, or callbacks.

JAX calls functions with callbacks slowly. So `jax.jit` returns functions with hidden outputs, whether each update found
finite gradients, and a hidden input, the loss scale, which moves on the device. The script sees neither; the host looks
at the outputs some steps later and moves its own scale by them. That holds for updates that are traced directly in such
a function. Where one is traced elsewhere, in a loop or in a function that the script compiles by other means, functions
with updates are from then on as the script made them, and call back: so steps stay in order. JAX makes callbacks in
threads of its own, from every device. `benchmarks/run_jax_outcomes.py` times both ways.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from ampx.run import Run
from ampx.scale_state import LossScale, LossScaleState, next_state
from ampx_jax import state as states, varying
from ampx_jax.casting import is_traced
from ampx_jax.taps import is_floating

# The host looks at half of so many steps at a time: the device has done those, and nothing waits.
_KEPT: Final = 64
_WAITING: Final = 8  # losses that may wait for an update that calls back
_KNOWN_OPTIONS: Final = {"static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "keep_unused"}
# May be newer than the oldest supported JAX: without it everything is reported by callbacks.
_present_trace: Final = getattr(jax.extend.core, "get_opaque_trace_state", None)
_SCALE: Final = "ampx_loss_scale"
_Numbers = tuple[Any, ...] | None
# Of all elements of a `jax.vmap`: a step is finite where all are.
_least, _mean = varying.over_elements(jnp.min), varying.over_elements(jnp.mean)


@dataclass
class _Frame:
    """One trace of one compiled function."""

    trace: Any  # stands for the trace: an update belongs to it where the present trace equals it
    state: LossScaleState | None  # the loss scale for what is traced next; None where the script scales by itself
    flags: tuple[Any, ...] = ()  # what came of the updates up to now, and losses
    used: bool = False  # the scale was read, or an update was taken


class _Thread(threading.local):
    callback: int | None = None  # the place of the callback that runs


class Outcomes:
    """What the host has not seen of the steps of one session, and the loss scale on the device."""

    def __init__(
        self,
        run: Run,
        config: LossScale | None,
        stepped: Callable[[Any], None],
        lost: Callable[[Any], None],
        scale_now: Callable[[], Any],
    ) -> None:
        """Start with no steps: `stepped` takes what came of each in order, at run time, and `lost` its loss before.

        Without a `config` nothing reads the loss scale, and compiled functions have no input for it.
        """
        self._run, self._stepped, self._lost, self._scale_now = run, stepped, lost, scale_now
        # An update calls back, or the scale is read by a callback.
        self.mixed = _present_trace is None or jax.process_count() > 1
        self._moving = config if config is not None and config.dynamic else None
        self._thread = threading.get_ident()
        self._outside = present_trace()
        self._frame: _Frame | None = None
        self._kept: deque[Any] = deque()
        # None is another structure: what was compiled with a scale is compiled anew.
        self._numbers: _Numbers = None if config is None else tuple(states.as_arrays(config.initial_state()).values())
        self._here = _Thread()
        self._places = itertools.count()  # of callbacks, in the order of the trace
        self._devices: dict[int, int] = {}  # by place, the number of the device that counts
        self._waiting: list[tuple[int, Callable[[], None]]] = []  # for the observer, by place
        # For a report: losses whose update has not come, each with its trace, which is None where it has a value.
        self._losses: list[tuple[Any, Any]] = []

    @property
    def _observed(self) -> bool:
        return self._run.recorder.observer is not None

    # -- while a function is traced ----------------------------------------------------------------

    def scale(self) -> Any:
        """Return the present loss scale, at run time. Sync: none where it is a hidden input; else the host is asked."""
        frame = self._used()
        if frame is not None and frame.state is not None:
            return frame.state.scale
        self.mix()
        self._check_callbacks()
        scale = jax.experimental.io_callback(self._scale_now, jax.ShapeDtypeStruct((), jnp.float32))
        return varying.of_the_first(scale)  # others may read before it has reported the last step

    def update(self, outcome: Any, rates: tuple[Any, ...] = ()) -> None:
        """Report what came of an update, with its learning rates; they may be traced.

        Losses go along where it calls back.
        """
        numbers = jnp.stack([outcome, *rates]) if rates else outcome
        frame = self._used()
        if frame is not None:
            frame.flags = (*frame.flags, numbers)
            if self._moving is not None and frame.state is not None:
                frame.state = next_state(self._moving, frame.state, outcome, where=jnp.where)
            return
        self.mix()
        trace = present_trace() if is_traced(numbers) else None
        losses, self._losses = self._losses, []
        self._call_back(self._stepped, numbers, tuple(loss for its_trace, loss in losses if its_trace == trace))

    def loss(self, loss: Any) -> None:
        """Report a loss to who wants it; it may be traced.

        An observer hears of every one, by a callback where need be. For a report a loss is a hidden output, or goes
        along where its update calls back, so that no call is made for it.
        """
        if not self._run.recorder.reads_losses or not is_floating(loss):
            return
        traced = is_traced(loss)
        frame = None if not traced else self._used() if self._observed else self._direct()
        if frame is not None:
            frame.flags = (*frame.flags, {"loss": loss})
        elif not self._observed:
            trace = present_trace() if traced else None
            if not traced or trace is not None:
                self._keep(trace, loss)
        elif traced:
            self.mix()
            self._call_back(self._lost, varying.agreed(_mean(loss), jax.lax.pmean))
        else:
            self._lost(loss)

    def _keep(self, trace: Any, loss: Any) -> None:
        """Keep a loss until an update of the same trace, or outside of traces, calls back."""
        self._losses = [*self._losses[1 - _WAITING :], (trace, loss)]

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

    def mix(self) -> None:
        """From now on there are callbacks. Sync: the first time, with all steps up to now."""
        if not self.mixed:
            try:
                self.look(0)
            finally:
                self.mixed = True

    # -- callbacks ---------------------------------------------------------------------------------

    def _call_back(self, report: Callable[[Any], None], value: Any, losses: tuple[Any, ...] = ()) -> None:
        """Have compiled code call back with a value; a concrete one is passed at once where there is an observer."""
        if self._observed and not is_traced(value):
            report(value)
        else:
            self._check_callbacks()
            value, losses = _least(value), tuple(varying.agreed(_mean(loss), jax.lax.pmean) for loss in losses)
            called_back = functools.partial(self._called_back, next(self._places), report)
            jax.debug.callback(called_back, varying.place(), value, losses)

    def _check_callbacks(self) -> None:
        """Refuse a step from which JAX does not call back."""
        mapped, others = varying.axes(), varying.axes_left()
        if mapped and others:
            self._run.refuse(
                f"the script steps under shard_map over {', '.join(mapped)} and not over {', '.join(others)}, from "
                f"where JAX calls nobody back; accepted: shard_map over all axes of the mesh. Write the lines of ampx "
                f"in the script, with wrap_optimizer(tx, axis_name={mapped!r})"
            )

    def _called_back(
        self, place: int, report: Callable[[Any], None], device: Any, value: Any, losses: tuple[Any, ...]
    ) -> None:
        if self._devices.setdefault(place, int(device)) != device:  # all devices agree: one of this process counts
            return
        self._here.callback = place
        try:
            for loss in losses:
                self._lost(loss)
            report(value)
        finally:
            self._here.callback = None

    def notify(self, observer: Callable[[], None]) -> None:
        """Call what an observer hears of; not in a callback of compiled code, but when that is over.

        The observer enters regions of a thread, and may end the script, which an exception in a callback does not.
        """
        if self._observed and self._here.callback is not None:
            self._waiting.append((self._here.callback, observer))
        else:
            observer()

    def called(self) -> None:
        """Note that a compiled function was called, where there is an observer. Sync: where there are callbacks."""
        if self.mixed and threading.get_ident() == self._thread:
            jax.effects_barrier()
            waiting, self._waiting = self._waiting, []
            turns: Counter[int] = Counter()
            in_order = []
            for place, observer in waiting:  # a compiler moves callbacks about, within one turn of a loop
                in_order.append((turns[place], place, observer))
                turns[place] += 1
            for _, _, observer in sorted(in_order, key=lambda entry: entry[:2]):
                observer()

    # -- hidden outputs, while it runs -------------------------------------------------------------

    def open(self, body: _Body) -> bool:
        """Return whether this function may be called with hidden parts now."""
        return (
            not (self.mixed and body.used)
            and threading.get_ident() == self._thread
            and present_trace() == self._outside  # else it is called inside another function's trace
        )

    def trace(self, body: _Body, numbers: _Numbers, call: Callable[[], Any]) -> tuple[Any, tuple[Any, ...], Any]:
        """Trace a function; return its result, the flags of its updates, and the loss scale after them."""
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
            if self.mixed or self._observed:
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
                if not isinstance(outcome, dict):
                    self._stepped(np.asarray(outcome))
                elif self.mixed and not self._observed:
                    self._keep(None, outcome["loss"])
                else:
                    self._lost(outcome["loss"])


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
    native: Callable[..., Any], find: Callable[[], Outcomes | None], called: Callable[[], None] | None
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
            plain = _hiding(plain, native(body, **options), body, find)
        return plain if called is None else noted(plain, called)

    return managed


def _hiding(plain: Any, compiled: Any, body: _Body, find: Callable[[], Outcomes | None]) -> Any:
    """Return what the script takes for the compiled function `plain`; it has everything that this has."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        outcomes = find()
        if outcomes is None or not outcomes.open(body):
            return plain(*args, **kwargs)
        return outcomes.call(compiled, args, kwargs)

    def clear_cache() -> None:
        plain.clear_cache()
        compiled.clear_cache()

    _copy_attributes(plain, call)
    call.clear_cache = clear_cache  # type: ignore[attr-defined]
    return call


def mapping(native: Callable[..., Any], called: Callable[[], None]) -> Callable[..., Any]:
    """Return `jax.pmap` whose functions each call `called`."""
    return functools.wraps(native)(lambda *args, **options: noted(native(*args, **options), called))


def noted(plain: Any, called: Callable[[], None]) -> Any:
    """Return a compiled function, or the method that calls such, after each of whose calls `called` is called."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        called()
        return result

    _copy_attributes(plain, call)
    return call


def _copy_attributes(plain: Any, call: Any) -> None:
    for name in dir(plain):
        if not name.startswith("__"):
            setattr(call, name, getattr(plain, name))
