"""`ampx run` in JAX: what happens to the gradients and optimizers of a script that is not edited.

Functions that the script hands to `jax.grad` and `jax.value_and_grad` are cast by `ampx_jax.autocast`. Where losses are
scaled, the scale is read at run time, multiplied in before the derivative and divided out after it, so that the script
sees unscaled gradients. Every optax transformation that the script calls skips what is not finite; the state that the
script carries has the structure that the script expects.

Where the script starts a session by itself, all this ends: wrapped transformations are recorded, and nothing else.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ampx.events import ScaleChanged, StepSkipped
from ampx.formats import stride
from ampx.numerics.meter import SAMPLES, Meter, count, report
from ampx.numerics.trial import COMPILED
from ampx.protocol import Member, ScaleGroup
from ampx.run import GRADIENT_SAMPLES, Run, SampledGradient
from ampx.scale_state import is_one
from ampx.session import Amp, new_group
from ampx_jax import (
    casting,
    devices,
    interpreter,
    masters,
    modules,
    numerics,
    optimizer,
    state as states,
    transform,
    varying,
)
from ampx_jax.taps import is_floating

from . import outcomes

_OWN_SCALING: Final = ("jmp", "flax.training.dynamic_scale")
_UNTOLD: Final = 8  # losses that may wait for an update of their own
# Of what all elements of a `jax.vmap` tell: a step is finite where all are.
_least, _mean = varying.over_elements(jnp.min), varying.over_elements(jnp.mean)
NO_GRADIENTS: Final = (
    "No function went through jax.grad or jax.value_and_grad: gradients that are made in another way, with jax.vjp "
    "say, computed in float32."
)

UNCOUNTED: Final = "Steps under shard_map over some axes of its mesh are not counted: JAX calls nobody back from there."


class _Call:
    """Stands for a call of a transformation."""


class _Calls(threading.local):
    """The calls of transformations in one thread."""

    # What the script called and is not over; the reference is dead where an exception came between the end of the call
    # and its being noted.
    outermost: weakref.ref[_Call] | None = None
    place: int | None = None  # that of the callback in which compiled code calls back
    differentiating: bool = False  # a loss is being scaled and differentiated


class Automation:
    """One run: its session, and the loss scale that lives on the host."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.calls = _Calls()
        self.live = True
        self.follows = False
        self.differentiated = False
        self.member: Member | None = None
        self.outcomes: outcomes.Outcomes | None = None
        self.regions = ExitStack()
        self._lock = threading.Lock()
        self._thread = threading.get_ident()
        self._waiting: list[tuple[int, Callable[[], None]]] = []  # what callbacks told, by their place in the trace
        self._places = itertools.count()
        self._devices: dict[int, int] = {}  # by the place of a callback, the number of the device that tells
        # For a report: losses whose update has not come, each with its trace, which is None where it has a value.
        self._untold: list[tuple[Any, Any]] = []
        # Of the last update in a watched step: the class of its transformation, its number, and its gradients.
        self._watched_update: tuple[str, int, Any] | None = None
        self._positions: dict[ScaleGroup, int] = {}
        run.record_own_sessions(self.follow)

    @property
    def automates(self) -> bool:
        """Whether the script has no session of its own."""
        return self.live and not self.follows

    @property
    def casts(self) -> bool:
        """Whether the run casts functions now."""
        return self.automates and self.run.amp is not None and casting.active.value is not None

    @property
    def sees(self) -> bool:
        """Whether the run looks at what the script differentiates, in whatever dtype."""
        return self.automates and self.run.amp is not None

    @property
    def observed(self) -> bool:
        """Whether an observer gets every loss and step as soon as it is over."""
        return self.run.recorder.observer is not None

    @property
    def scales(self) -> bool:
        """Whether losses are scaled by anything but one."""
        config = None if self.member is None else self.member.group.config
        return config is not None and not is_one(config)

    def begin(self, kind: str, params: Any) -> None:
        """Start the session with the script's first optimizer, and note this one."""
        self.refuse_own_scaling()
        if self.run.amp is None:
            amp = self.run.session(**self._preferred())
            self._record(amp)
            group = new_group("jax", amp.effective.loss_scale, amp.enabled)
            self.member = group.add_member()
            with jax.ensure_compile_time_eval():  # the script may compile `init`, whose trace ends
                config = group.config if self.scales else None  # else the scale is 1 and stays so
                self.outcomes = outcomes.Outcomes(config, self.stepped, self.lost, self.observed)
            self.run.lines = _lines(self.run.init_call(), self.scales)
        low = sorted({str(jnp.result_type(leaf)) for leaf in jax.tree.leaves(params) if masters.is_low(leaf)})
        if low:
            self.run.refuse(
                f"the script keeps parameters in {', '.join(low)}, mixed precision of its own; accepted: float32 "
                f"parameters. Run it without ampx"
            )
        wide = casting.in_float64(params) if self.casts else None
        if wide is not None:
            self.run.recorder.note(f"{wide}.")
        assert self.member is not None
        self.run.recorder.add_optimizer(kind, float(self.member.group.states[0].scale), 0)

    def _record(self, amp: Amp) -> None:
        self.regions.enter_context(self.run.recorder.phase("train"))
        if amp.casting is not None:
            self.regions.enter_context(mock.patch.object(interpreter, "watch", self._count))
            self.regions.enter_context(mock.patch.object(interpreter, "note_scaled", self.run.recorder.note_scaled))

    def refuse_own_scaling(self) -> None:
        """Refuse a script with loss scaling of its own, whenever it imports that: two scales would multiply."""
        for name in _OWN_SCALING:
            if name in sys.modules:
                self.run.refuse(
                    f"the script imports {name}, mixed precision of its own; accepted: float32 scripts. Run it "
                    f"without ampx, or take it out"
                )

    def _preferred(self) -> dict[str, str]:
        """Prefer bfloat16 to float16 where nothing was asked for: it needs no loss scale, which steps must fetch."""
        settings = self.run.settings
        if settings.dtype != "auto":
            return {}
        device = devices.describe(settings.device)
        return {"dtype": "bfloat16"} if device.preferred is not None and "bfloat16" in device.native else {}

    def _count(self, name: str, dtype: str) -> None:
        if self.run.recorder.sampling:
            self.run.recorder.count_op(name, dtype)
        else:
            interpreter.watch = None  # where nobody compiles the step, what is watched is traced in every call

    def hiding(self) -> outcomes.Outcomes | None:
        """Return what takes the outcomes of compiled functions; None while there is no session."""
        return self.outcomes if self.live else None

    def read_scale(self) -> Any:
        """Return the present loss scale, at run time. Sync: none where it is a hidden input; else the host is asked."""
        assert self.outcomes is not None
        scale = self.outcomes.scale()
        if scale is not None:
            return scale
        self.outcomes.mix()
        self._check_callbacks()
        scale = jax.experimental.io_callback(self._scale_now, jax.ShapeDtypeStruct((), jnp.float32))
        return varying.of_the_first(scale)  # others may read before it has told of the last step

    def _scale_now(self) -> Any:
        assert self.member is not None
        with self._lock:
            return np.float32(self.member.group.states[0].scale)

    def look(self) -> None:
        """Have all that was computed up to now told. Sync: with that."""
        jax.effects_barrier()
        if self.outcomes is not None:
            self.outcomes.look(0)

    def report(self, outcome: Any, tell: Callable[[Any], None]) -> None:
        """Have what came of an update reach `tell`, which is that of the outcomes."""
        assert self.outcomes is not None
        if not self.outcomes.take(outcome):
            self.outcomes.mix()
            self._call_back(tell, outcome, self._untold_of(outcome))

    def look_at(self, kind: str, gradients: Any) -> None:
        """Look at the gradients of an update in a watched step, where nothing is traced. Sync: one a gradient."""
        if not (self.observed and numerics.watched()) or _is_traced(gradients):
            return
        recorder = self.run.recorder
        self._watched_update = kind, recorder.steps + 1, gradients
        if recorder.takes_gradients is not None:
            recorder.takes_gradients(
                SampledGradient(name, tuple(gradient.shape), _sampled(gradient, GRADIENT_SAMPLES))
                for name, gradient in _named(gradients).items()
            )

    def applied(self, params: Any, returned: tuple[Any, Any]) -> tuple[Any, Any]:
        """Meter the update of a watched step where the parameters are known; return what the update returned."""
        if self._watched_update is not None and params is not None and not _is_traced(returned):
            self.meter(params, optax.apply_updates(params, returned[0]))
        return returned

    def meter(self, before: Any, after: Any) -> None:
        """Meter the update of a watched step, once its updates are applied. Sync: three a parameter."""
        if self._watched_update is None or self.member is None or self.run.amp is None:
            return
        kind, step, gradients = self._watched_update
        named, old, new = _named(gradients), _named(before), _named(after)
        if _is_traced((before, after)) or named.keys() != old.keys():  # updates of something else
            return
        self._watched_update = None
        scale, compute = float(self.member.group.states[0].scale), self.run.amp.effective.dtype or "float32"
        entries = []
        for name, gradient in named.items():
            values, updated, slopes = (_sampled(array, SAMPLES) for array in (old[name], new[name], gradient))
            entries.append(count(name, str(old[name].dtype), values, updated, slopes * np.float32(scale), compute))
        if all(entry.nonfinite == 0 for entry in entries):  # else the step is skipped
            seen = Meter(step, compute, scale, tuple(entries))
            self.run.recorder.metered(hash(tuple(named)), kind, seen)
            report(self.member.group, step, seen.lost, seen.flushed, seen.headroom)

    def stepped(self, finite: Any) -> None:
        """Take one step's finiteness: count it and move the loss scale. Called at run time."""
        if not self.automates or self.member is None:  # a step that was compiled inside runs on outside
            return
        is_finite = bool(finite)  # not in the lock: what computes it may be waiting there, to read the scale
        with self._lock:
            if self.member.group.enabled:
                self.member.note_scaled(self.member.group.states[0].scale)
                self.member.finish({0: is_finite})
        self._notify(functools.partial(self.run.recorder.stepped, 0))

    def note_loss(self, loss: Any) -> None:
        """Have a loss reach who wants it; it may be traced.

        An observer is told of every one, by a callback where need be. For a report a loss is a hidden output, or goes
        along where its update calls back, so that no call is made for it.
        """
        if not self.run.recorder.reads_losses or not is_floating(loss):
            return
        traced = isinstance(loss, jax.core.Tracer)
        assert self.outcomes is not None
        if traced and self.outcomes.take_loss(loss):
            return
        if not self.observed:
            trace = outcomes.present_trace() if traced else None
            if not traced or trace is not None:
                self._keep_for_update(trace, loss)
        elif traced:
            self.outcomes.mix()
            self._call_back(self.lost, varying.agreed(_mean(loss), jax.lax.pmean))
        else:
            self.lost(loss)

    def lost(self, loss: Any) -> None:
        """Hand on a function that reads a loss. Called at run time."""
        assert self.outcomes is not None
        if not self.automates:
            return
        if self.outcomes.mixed and not self.observed and self.calls.place is None:
            self._keep_for_update(None, loss)
        elif self.run.recorder.wants_losses:
            self._notify(functools.partial(self.run.recorder.saw_loss, lambda: float(np.mean(loss))))

    def _keep_for_update(self, trace: Any, loss: Any) -> None:
        """Keep a loss until an update of the same trace, or outside of traces, calls back."""
        self._untold = [*self._untold[1 - _UNTOLD :], (trace, loss)]

    def _untold_of(self, outcome: Any) -> tuple[Any, ...]:
        """Return the losses that go along where an update calls back."""
        trace = outcomes.present_trace() if isinstance(outcome, jax.core.Tracer) else None
        losses, self._untold = self._untold, []
        return tuple(loss for its_trace, loss in losses if its_trace == trace)

    def _call_back(self, tell: Callable[[Any], None], value: Any, losses: tuple[Any, ...] = ()) -> None:
        """Have compiled code call back with a value; a concrete one is passed at once where there is an observer."""
        if self.observed and not isinstance(value, jax.core.Tracer):
            tell(value)
        else:
            self._check_callbacks()
            value, losses = _least(value), tuple(varying.agreed(_mean(loss), jax.lax.pmean) for loss in losses)
            called_back = functools.partial(self._called_back, next(self._places), tell)
            jax.debug.callback(called_back, varying.place(), value, losses)

    def _check_callbacks(self) -> None:
        """Refuse a step from which JAX does not call back."""
        mapped, others = varying.axes(), varying.axes_left()
        if mapped and others:
            self.run.refuse(
                f"the script steps under shard_map over {', '.join(mapped)} and not over {', '.join(others)}, from "
                f"where JAX calls nobody back; accepted: shard_map over all axes of the mesh. Write the lines of ampx "
                f"in the script, with wrap_optimizer(tx, axis_name={mapped!r})"
            )

    def _called_back(
        self, place: int, tell: Callable[[Any], None], device: Any, value: Any, losses: tuple[Any, ...]
    ) -> None:
        if self._devices.setdefault(place, int(device)) != device:  # all devices agree: one of this process tells
            return
        self.calls.place = place
        try:
            for loss in losses:
                self.lost(loss)
            tell(value)
        finally:
            self.calls.place = None

    def _notify(self, observer: Callable[[], None]) -> None:
        """Call what an observer hears of; not in a callback of compiled code, but when that is over.

        The observer enters regions of a thread, and may end the script, which an exception in a callback does not.
        """
        if self.observed and self.calls.place is not None:
            self._waiting.append((self.calls.place, observer))
        else:
            observer()

    def called(self, hidden: outcomes.Outcomes) -> None:
        """Note that a compiled function was called. Sync: where there are an observer and callbacks."""
        if hidden.mixed and threading.get_ident() == self._thread:
            jax.effects_barrier()
            waiting, self._waiting = self._waiting, []
            turns: Counter[int] = Counter()
            in_order = []
            for place, observer in waiting:  # a compiler moves callbacks about, within one turn of a loop
                in_order.append((turns[place], place, observer))
                turns[place] += 1
            for _, _, observer in sorted(in_order, key=lambda entry: entry[:2]):
                observer()

    # -- a session of the script's own -------------------------------------------------------------

    def follow(self) -> None:
        """Only record from now on: the script has started a session by itself."""
        amp, recorder = self.run.amp, self.run.recorder
        assert amp is not None
        remove = amp.on_event(recorder.hear)  # the events of earlier steps that are told only now
        self.look()
        remove()
        recorder.restart_sampling()
        self.regions.close()
        self.follows = True
        self.outcomes = outcomes.Outcomes(None, self.followed)
        self._record(amp)

    def meet(self, update: optimizer.Update) -> None:
        """Note what the script has wrapped."""
        if update.group not in self._positions:
            scale = float(update.group.states[0].scale)
            self._positions[update.group] = self.run.recorder.add_optimizer(_kind_of(update.inner.init), scale)

    def follow_step(self, group: ScaleGroup, state: states.AmpState) -> None:
        """Have the step that led to a state reach `followed`."""
        if self.live and group in self._positions:
            if varying.axes() and varying.axes_left():
                self.run.recorder.note(UNCOUNTED)
                return
            now = state.numbers
            numbers = (self._positions[group], now.finite, now.step_scale, now.scale)
            # An array of its own: the script may donate those of its state.
            outcome = jnp.stack([jnp.asarray(number, jnp.float32) for number in numbers])
            self.report(varying.agreed(outcome, jax.lax.pmin), self.followed)

    def followed(self, numbers: Any) -> None:
        """Take one step of the script's own session: count it. Called at run time."""
        if not self.live:
            return
        position, finite, scale, next_scale = (float(number) for number in numbers)
        self._notify(functools.partial(self._take_down, int(position), bool(finite), scale, next_scale))

    def _take_down(self, group: int, finite: bool, scale: float, next_scale: float) -> None:
        with self._lock:
            recorder = self.run.recorder
            record = recorder.optimizers[group]
            if not record.steps:  # the script may have loaded a scale
                record.initial_scale = scale
            recorder.stepped(group)
            labels = ("jax", group, 0, record.steps, scale, next_scale, 0)
            if not finite:
                recorder.hear(StepSkipped(*labels))
            if scale != next_scale:
                recorder.hear(ScaleChanged(*labels))


def _is_traced(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def _named(tree: Any) -> dict[str, Any]:
    """Return the floating arrays of a tree by name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {states.path_name(path): leaf for path, leaf in leaves if is_floating(leaf)}


def _sampled(array: Any, samples: int) -> Any:
    values = np.ravel(np.asarray(array))
    return values[:: stride(values.size, samples)].astype(np.float32)


def _kind_of(init: Callable[..., Any]) -> str:
    return str(getattr(init, "__qualname__", "optimizer")).partition(".")[0]


def _lines(init: str, scales: bool) -> tuple[str, ...]:
    scaling = "with ampx.scale_loss(loss, opt_state) as scaled: return scaled  # at the end of what is differentiated"
    return (
        init,
        "loss_of = ampx_jax.autocast(loss_of)",
        "tx = ampx.wrap_optimizer(tx)",
        *((scaling,) if scales else ()),
    )


@contextmanager
def automate(run: Run) -> Iterator[None]:
    """Cast what is differentiated inside, and let optimizers skip what is not finite."""
    run.refuse_preparation()
    this = Automation(run)
    if COMPILED in os.environ:
        _keep_compiled(os.environ[COMPILED])
    # Named tuples: every transformation, of optax and of the script, is made here.
    patches = (
        mock.patch.object(jax, "jit", outcomes.jit(jax.jit, this.hiding, this.called if this.observed else None)),
        *_calls_to_note(this),
        mock.patch.object(jax, "grad", _differentiating(this, jax.grad, False)),
        mock.patch.object(jax, "value_and_grad", _differentiating(this, jax.value_and_grad, True)),
        mock.patch.object(optax.GradientTransformation, "__new__", _making(this, optax.GradientTransformation.__new__)),
        mock.patch.object(optimizer.Update, "__call__", _followed(this, optimizer.Update.__call__)),
        *((mock.patch.object(optax, "apply_updates", _metered(this, optax.apply_updates)),) if this.observed else ()),
    )
    try:
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            yield
    finally:
        try:
            this.look()
        finally:
            if this.casts and not this.differentiated:
                run.recorder.notes.append(NO_GRADIENTS)
                run.lines = ()
            this.live = False
            this.regions.close()
            run.close()


def _calls_to_note(this: Automation) -> tuple[Any, ...]:
    """Return patches for compiled functions that are none of `jax.jit`, where there is an observer."""
    if not this.observed:
        return ()
    compiled = jax.stages.Compiled
    return (
        mock.patch.object(jax, "pmap", outcomes.mapping(jax.pmap, this.hiding, this.called)),
        mock.patch.object(compiled, "__call__", outcomes.noted(compiled.__call__, this.hiding, this.called)),
    )


def _keep_compiled(folder: str) -> None:
    """Keep what is compiled for the next trial: a watched step has hundreds of operations, each compiled alone."""
    if not jax.config.jax_compilation_cache_dir:  # else the user keeps it
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


# -- gradients ------------------------------------------------------------------------------------------------


def _differentiating(this: Automation, native: Callable[..., Any], values: bool) -> Callable[..., Any]:
    """Return `jax.grad` or `jax.value_and_grad` that casts the function, once there is an optimizer."""
    signature = inspect.signature(native)
    value_and_grad = jax.value_and_grad

    @functools.wraps(native)
    def managed(*args: Any, **kwargs: Any) -> Any:
        if this.casts:
            this.refuse_own_scaling()
        plain = native(*args, **kwargs)
        options = signature.bind(*args, **kwargs).arguments
        function = options.pop("fun", None)
        if not callable(function):
            return plain
        cast, aux = transform.autocast(function), options.get("has_aux", False)
        cast_derivative = native(cast, **options)

        @functools.wraps(plain)
        def derivative(*inputs: Any, **named: Any) -> Any:
            if not this.sees:
                return plain(*inputs, **named)
            this.differentiated = True
            with _explained(this, inputs, named):
                # A gradient inside of a loss is one of its values, and the loss itself is scaled.
                scales = this.casts and this.scales and not this.calls.differentiating
                scale = this.read_scale() if scales and not options.get("holomorphic") else None
                if scale is None and not (this.run.recorder.reads_losses or numerics.watched()):
                    return cast_derivative(*inputs, **named)
                outputs, grads = _read(differentiate)(scale, inputs, named)
            this.note_loss(outputs[0] if aux else outputs)
            if values:
                return outputs, grads
            return (grads, outputs[1]) if aux else grads

        def differentiate(scale: Any, inputs: Any, named: Any) -> tuple[Any, Any]:
            if scale is None:
                return value_and_grad(cast, **options)(*inputs, **named)

            def scaled(*inputs: Any, **named: Any) -> Any:
                outputs = transform.call(function, inputs, named, scale)
                loss = outputs[0] if aux else outputs
                return loss.astype(jnp.float32) * scale, outputs

            this.calls.differentiating = True
            try:
                (_, outputs), grads = value_and_grad(scaled, **{**options, "has_aux": True})(*inputs, **named)
            finally:
                this.calls.differentiating = False
            return outputs, optimizer.unscale(grads, scale)[0]

        return derivative

    return managed


def _read(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose values are read where they are watched; what other code traces is not."""

    def call(*args: Any) -> Any:
        if not numerics.watched() or _is_traced(args):
            return function(*args)
        return modules.call(functools.partial(transform.traced_by, numerics.read), function, args, {})

    return call


@contextmanager
def _explained(this: Automation, inputs: Any, named: Any) -> Iterator[None]:
    """Refuse functions that look at values: they can be differentiated without a trace, but not cast."""
    try:
        yield
    except jax.errors.ConcretizationTypeError:
        if _is_traced((inputs, named)):
            raise  # the script's own trace has the same trouble
        this.run.refuse(
            "the script differentiates a function whose Python code depends on the values of arrays, which cannot be "
            "cast; accepted: functions that jax.jit accepts. Use jax.numpy.where or jax.lax.cond there"
        )


# -- optimizers -----------------------------------------------------------------------------------------------


def _making(this: Automation, native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def make(cls: Any, init: Any, update: Any) -> Any:
        if isinstance(update, optimizer.Update):
            this.meet(update)
            return native(cls, init, update)
        kind = _kind_of(init)
        return native(cls, _initialising(this, init, kind), _updating(this, update, kind))

    return make


def _followed(this: Automation, native: Callable[..., Any]) -> Callable[..., Any]:
    """Return the update of wrapped transformations that is recorded."""

    @functools.wraps(native)
    def update(wrapped: optimizer.Update, updates: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        returned = native(wrapped, updates, state, *args, **kwargs)
        if wrapped.group.enabled and jax.tree.leaves(updates):
            this.follow_step(wrapped.group, returned[1])
        return returned

    return update


def _metered(this: Automation, native: Callable[..., Any]) -> Callable[..., Any]:
    """Return `optax.apply_updates`, which knows what became of parameters."""

    @functools.wraps(native)
    def apply_updates(params: Any, updates: Any) -> Any:
        applied = native(params, updates)
        this.meter(params, applied)
        return applied

    return apply_updates


@contextmanager
def _inside(this: Automation) -> Iterator[bool]:
    """Go into a transformation; yield whether the script called it, and no other transformation."""
    calls, call = this.calls, _Call()
    if calls.outermost is not None and calls.outermost() is not None:
        yield False
        return
    try:
        calls.outermost = weakref.ref(call)
        yield this.automates
    finally:
        calls.outermost = None


def _initialising(this: Automation, native: Callable[..., Any], kind: str) -> Callable[..., Any]:
    @functools.wraps(native)
    def init(params: Any, *args: Any, **kwargs: Any) -> Any:
        with _inside(this) as outermost:
            if outermost:
                this.begin(kind, params)
            return native(params, *args, **kwargs)

    return init


def _updating(this: Automation, native: Callable[..., Any], kind: str) -> Callable[..., Any]:
    @functools.wraps(native)
    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        with _inside(this) as outermost:
            if not outermost or this.member is None or not jax.tree.leaves(updates):
                return native(updates, state, params, **extra)
            this.look_at(kind, updates)
            if not this.member.group.enabled:  # float32: the step counts, and is the script's own
                this.report(jnp.array(True), this.stepped)
                return this.applied(params, native(updates, state, params, **extra))
            this.refuse_own_scaling()
            finite = optimizer.all_finite(updates)
            finite = varying.agreed(finite.astype(jnp.int32), jax.lax.pmin) > 0
            this.report(finite, this.stepped)
            returned = optimizer.apply_or_skip(finite, lambda: native(updates, state, params, **extra), lambda: state)
            return this.applied(params, returned)

    return update
