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
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
from ampx.run import GRADIENT_SAMPLES, Managed, Manager, Run, SampledGradient, patched
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
from ampx_jax.casting import is_traced
from ampx_jax.gradients import all_finite, unscale
from ampx_jax.taps import is_floating

from .outcomes import Outcomes, jit, mapping, noted

_OWN_SCALING: Final = ("jmp", "flax.training.dynamic_scale")
_RATE: Final = "learning_rate"  # of optax's hyperparameters
NO_GRADIENTS: Final = (
    "No function went through jax.grad or jax.value_and_grad: gradients that are made in another way, with jax.vjp "
    "say, computed in float32."
)

UNCOUNTED: Final = "Steps under shard_map over some axes of its mesh are not counted: JAX calls nobody back from there."


class _Call:
    """Stands for a call of a transformation."""


class _Thread(threading.local):
    """State of one thread."""

    # The transformation that the script called; the reference is dead where an exception came between the end of the
    # call and its being noted.
    outermost: weakref.ref[_Call] | None = None
    differentiating: bool = False  # a loss is being scaled and differentiated


class JaxManager(Manager[Managed]):
    """What is managed in one run: a loss scale that lives on the host, for all optimizers.

    Attributes:
        live: The script has not ended: what was compiled inside runs on outside.
        follows: The script has started a session by itself.
        differentiated: A function of the script was cast.
        here: What goes on in the calling thread.
        member: Of the loss scale, and `outcomes`, how steps reach the host; None before there is a session.
        regions: Entered for as long as a session goes on.
    """

    def __init__(self, run: Run) -> None:
        self.live, self.follows, self.differentiated = True, False, False
        self.here = _Thread()
        self.member: Member | None = None
        self.outcomes: Outcomes | None = None
        self.regions = ExitStack()
        self._lock = threading.Lock()
        # Of the last update in a watched step: the class of its transformation, its number, and its gradients.
        self._watched_update: tuple[str, int, Any] | None = None
        self._positions: dict[ScaleGroup, int] = {}
        self._rates: tuple[float, ...] = ()  # of the last step
        super().__init__(run)

    @property
    def automates(self) -> bool:
        """Whether the script has no session of its own."""
        return self.live and not self.follows

    @property
    def casts(self) -> bool:
        """Whether the run casts functions now."""
        return self.sees and casting.active.value is not None

    @property
    def sees(self) -> bool:
        """Whether the run looks at what the script differentiates, in whatever dtype."""
        return self.automates and self.run.amp is not None

    @property
    def observed(self) -> bool:
        """Whether an observer gets every loss and step as soon as it is over."""
        return self.run.recorder.observer is not None

    def adopt(self, kind: str, params: Any) -> None:
        """Note an optimizer whose state the script makes; the session starts with the first."""
        self.refuse_own_scaling()
        if self.run.amp is None:
            amp = self.run.session(**self._preferred())
            self._record(amp)
            group = new_group("jax", amp.effective.loss_scale, amp.enabled)
            self.member = group.add_member()
            config = group.config if self.scales else None  # else the scale is 1 and stays so
            with jax.ensure_compile_time_eval():  # the script may compile `init`, whose trace ends
                self.outcomes = Outcomes(self.run, config, self.count_step, self.lost, self._scale_now)
            self.run.lines = _lines(self.run.init_call(), self.scales)
        low = sorted({str(jnp.result_type(leaf)) for leaf in jax.tree.leaves(params) if masters.is_low(leaf)})
        if low:
            self.run.refuse(
                f"the script keeps parameters in {', '.join(low)}, mixed precision of its own: updates smaller than "
                f"their precision are lost; accepted: float32 parameters. Keep them in float32, or run it without ampx"
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

    def hiding(self) -> Outcomes | None:
        """Return what takes the hidden outputs of compiled functions; None while there is no session."""
        return self.outcomes if self.live else None

    def _scale_now(self) -> Any:
        assert self.member is not None
        with self._lock:
            return np.float32(self.member.group.states[0].scale)

    def scale(self) -> Any:
        """Return the loss scale for what is differentiated now; None where there is none. Sync: as `Outcomes`."""
        # A gradient inside of a loss is one of its values, and the loss itself is scaled.
        scales = self.sees and self.scales and not self.here.differentiating
        return self.outcomes.scale() if scales and self.outcomes is not None else None

    def note_loss(self, loss: Any) -> None:
        """Have a loss reach who wants it; it may be traced."""
        if self.outcomes is not None:
            self.outcomes.loss(loss)

    def look(self) -> None:
        """Have all reported that was computed up to now. Sync: with that."""
        jax.effects_barrier()
        if self.outcomes is not None:
            self.outcomes.look(0)

    def called(self) -> None:
        """Note that a compiled function was called, where there is an observer. Sync: where there are callbacks."""
        outcomes = self.hiding()
        if outcomes is not None:
            outcomes.called()

    # -- updates -----------------------------------------------------------------------------------

    def look_at(self, kind: str, gradients: Any, params: Any) -> None:
        """Look at an update in a watched step, where nothing is traced: at gradients, and parameters if not None.

        Sync: two a gradient.
        """
        if not (self.observed and numerics.watched()) or is_traced(gradients):
            return
        recorder = self.run.recorder
        self._watched_update = kind, recorder.steps + 1, gradients
        if recorder.takes_gradients is not None:
            stored = _named(params)
            recorder.takes_gradients(
                SampledGradient(
                    *(name, tuple(gradient.shape), _sampled(gradient, GRADIENT_SAMPLES)),
                    _weights(stored.get(name)),
                )
                for name, gradient in _named(gradients).items()
            )

    def sample_differentiated(self, inputs: Sequence[Any], argnums: int | Sequence[int]) -> None:
        """Sample what is differentiated by in a watched step: weights, as far as an update has others of their names.

        Sync: one an array.
        """
        takes = self.run.recorder.takes_gradients
        chosen = [inputs[argnums]] if isinstance(argnums, int) else [inputs[position] for position in argnums]
        if takes is None or not numerics.watched() or is_traced(chosen):
            return
        arrays = [(name, array) for tree in chosen for name, array in _named(tree).items()]
        takes(SampledGradient(name, tuple(array.shape), None, _weights(array)) for name, array in arrays)

    def applied(self, params: Any, returned: tuple[Any, Any]) -> tuple[Any, Any]:
        """Meter the update of a watched step where the parameters are known; return what the update returned."""
        if self._watched_update is not None and params is not None and not is_traced(returned):
            self.meter(params, optax.apply_updates(params, returned[0]))
        return returned

    def meter(self, before: Any, after: Any) -> None:
        """Meter the update of a watched step, once its updates are applied. Sync: three a parameter."""
        if self._watched_update is None or self.member is None or self.run.amp is None:
            return
        kind, step, gradients = self._watched_update
        named, old, new = _named(gradients), _named(before), _named(after)
        if is_traced((before, after)) or named.keys() != old.keys():  # updates of something else
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

    def rates(self, state: Any) -> tuple[Any, ...]:
        """Return the learning rates that a script sets in a state, where there is an observer; they may be traced.

        A schedule's are none: with `optax.inject_hyperparams`, too, the state has that of the step before.
        """
        kind = optax.InjectStatefulHyperparamsState
        states = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, kind)) if self.observed else ()
        injected = [part for part in states if isinstance(part, kind) and _RATE not in part.hyperparams_states]
        return tuple(part.hyperparams[_RATE] for part in injected if _RATE in part.hyperparams)

    def learning_rates(self, group: int) -> tuple[float, ...]:
        """Return those of the last step."""
        return self._rates

    def count_step(self, numbers: Any) -> None:
        """Take one step's finiteness, and its learning rates: count it and move the loss scale. Called at run time."""
        if not self.automates or self.member is None or self.outcomes is None:
            return  # a step that was compiled inside runs on outside
        finite, *rates = np.ravel(numbers).tolist()  # not in the lock: what computes it may wait there, for the scale
        with self._lock:
            if self.member.group.enabled:
                self.member.note_scaled(self.member.group.states[0].scale)
                self.member.finish({0: bool(finite)})
        self.outcomes.notify(functools.partial(self._step_over, tuple(rates)))

    def _step_over(self, rates: tuple[float, ...]) -> None:
        self._rates = rates
        self.run.recorder.stepped(0)

    def lost(self, loss: Any) -> None:
        """Take a function's loss. Called at run time."""
        if self.automates and self.outcomes is not None and self.run.recorder.wants_losses:
            saw = functools.partial(self.run.recorder.saw_loss, lambda: float(np.mean(loss)))
            self.outcomes.notify(saw)

    # -- a session of the script's own -------------------------------------------------------------

    def follow(self) -> None:
        """Only record from now on: the script has started a session by itself."""
        amp, recorder = self.run.amp, self.run.recorder
        assert amp is not None
        remove = amp.on_event(recorder.hear)  # the events of earlier steps that are reported only now
        self.look()
        remove()
        recorder.restart_sampling()
        self.regions.close()
        self.follows = True
        self.outcomes = Outcomes(self.run, None, self.followed, self.lost, self._scale_now)
        self._record(amp)

    def meet(self, update: optimizer.Update) -> None:
        """Note what the script has wrapped."""
        if update.group not in self._positions:
            scale = float(update.group.states[0].scale)
            self._positions[update.group] = self.run.recorder.add_optimizer(_kind_of(update.inner.init), scale)

    def follow_step(self, group: ScaleGroup, state: states.AmpState) -> None:
        """Have the step that led to a state reach `followed`."""
        if self.live and group in self._positions and self.outcomes is not None:
            if varying.axes() and varying.axes_left():
                self.run.recorder.note(UNCOUNTED)
                return
            now = state.numbers
            numbers = (self._positions[group], now.finite, now.step_scale, now.scale)
            # An array of its own: the script may donate those of its state.
            outcome = jnp.stack([jnp.asarray(number, jnp.float32) for number in numbers])
            self.outcomes.update(varying.agreed(outcome, jax.lax.pmin))

    def followed(self, numbers: Any) -> None:
        """Take one step of the script's own session: count it. Called at run time."""
        if self.live and self.outcomes is not None:
            position, finite, scale, next_scale = (float(number) for number in numbers)
            self.outcomes.notify(functools.partial(self._take_down, int(position), bool(finite), scale, next_scale))

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

    # -- the region --------------------------------------------------------------------------------

    def release(self) -> None:
        """Leave what was compiled inside to the script."""
        if self.casts and not self.differentiated:
            self.run.recorder.notes.append(NO_GRADIENTS)
            self.run.lines = ()
        self.live = False
        self.regions.close()


def _named(tree: Any) -> dict[str, Any]:
    """Return the floating arrays of a tree by name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {states.path_name(path): leaf for path, leaf in leaves if is_floating(leaf)}


def _weights(array: Any | None) -> Any:
    """Sample weights in float32; None for others. Sync: one."""
    return None if array is None or array.dtype != jnp.float32 else _sampled(array, GRADIENT_SAMPLES)


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
    if COMPILED in os.environ:
        _keep_compiled(os.environ[COMPILED])
    manager = JaxManager(run)
    with manager.region(_patched):
        try:
            yield
        finally:
            manager.look()


def _patched(manager: JaxManager) -> AbstractContextManager[None]:
    called = manager.called if manager.observed else None
    points = [
        (jax, "jit", functools.partial(jit, find=manager.hiding, called=called)),
        (jax, "grad", functools.partial(_differentiating, manager, values=False)),
        (jax, "value_and_grad", functools.partial(_differentiating, manager, values=True)),
        # Named tuples: every transformation, of optax and of the script, is made here.
        (optax.GradientTransformation, "__new__", functools.partial(_making, manager)),
        (optimizer.Update, "__call__", functools.partial(_followed, manager)),
    ]
    if called is not None:  # compiled functions that are none of `jax.jit` call back, too
        points += [
            (jax, "pmap", functools.partial(mapping, called=called)),
            (jax.stages.Compiled, "__call__", functools.partial(noted, called=called)),
            (optax, "apply_updates", functools.partial(_metered, manager)),
        ]
    return patched(*points)


def _keep_compiled(folder: str) -> None:
    """Keep what is compiled for the next trial: a watched step has hundreds of operations, each compiled alone."""
    if not jax.config.jax_compilation_cache_dir:  # else the user keeps it
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


# -- gradients ------------------------------------------------------------------------------------------------


def _differentiating(manager: JaxManager, native: Callable[..., Any], values: bool) -> Callable[..., Any]:
    """Return `jax.grad` or `jax.value_and_grad` that casts the function, once there is an optimizer."""
    signature = inspect.signature(native)
    value_and_grad = jax.value_and_grad

    @functools.wraps(native)
    def managed(*args: Any, **kwargs: Any) -> Any:
        if manager.casts:
            manager.refuse_own_scaling()
        plain = native(*args, **kwargs)
        options = signature.bind(*args, **kwargs).arguments
        function = options.pop("fun", None)
        if not callable(function):
            return plain
        cast, aux = transform.autocast(function), options.get("has_aux", False)
        cast_derivative = native(cast, **options)

        @functools.wraps(plain)
        def derivative(*inputs: Any, **named: Any) -> Any:
            if not manager.sees:
                return plain(*inputs, **named)
            manager.differentiated = True
            with _explained(manager, inputs, named):
                scale = None if options.get("holomorphic") else manager.scale()
                if scale is None and not (manager.run.recorder.reads_losses or numerics.watched()):
                    return cast_derivative(*inputs, **named)
                if manager.run.recorder.takes_gradients is not None:
                    manager.sample_differentiated(inputs, options.get("argnums", 0))
                outputs, grads = _read(differentiate)(scale, inputs, named)
            manager.note_loss(outputs[0] if aux else outputs)
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

            manager.here.differentiating = True
            try:
                (_, outputs), grads = value_and_grad(scaled, **{**options, "has_aux": True})(*inputs, **named)
            finally:
                manager.here.differentiating = False
            return outputs, unscale(grads, scale)[0]

        return derivative

    return managed


def _read(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose values are read where they are watched; what other code traces is not."""

    def call(*args: Any) -> Any:
        if not numerics.watched() or is_traced(args):
            return function(*args)
        return modules.call(functools.partial(transform.traced_by, numerics.read), function, args, {})

    return call


@contextmanager
def _explained(manager: JaxManager, inputs: Any, named: Any) -> Iterator[None]:
    """Refuse functions that look at values: they can be differentiated without a trace, but not cast."""
    try:
        yield
    except jax.errors.ConcretizationTypeError:
        if is_traced((inputs, named)):
            raise  # the script's own trace has the same trouble
        manager.run.refuse(
            "the script differentiates a function whose Python code depends on the values of arrays, which cannot be "
            "cast; accepted: functions that jax.jit accepts. Use jax.numpy.where or jax.lax.cond there"
        )


# -- optimizers -----------------------------------------------------------------------------------------------


def _making(manager: JaxManager, native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def make(cls: Any, init: Any, update: Any) -> Any:
        if isinstance(update, optimizer.Update):
            manager.meet(update)
            return native(cls, init, update)
        kind = _kind_of(init)
        return native(cls, _initialising(manager, init, kind), _updating(manager, update, kind))

    return make


def _followed(manager: JaxManager, native: Callable[..., Any]) -> Callable[..., Any]:
    """Return the update of wrapped transformations that is recorded."""

    @functools.wraps(native)
    def update(wrapped: optimizer.Update, updates: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        returned = native(wrapped, updates, state, *args, **kwargs)
        if wrapped.group.enabled and jax.tree.leaves(updates):
            manager.follow_step(wrapped.group, returned[1])
        return returned

    return update


def _metered(manager: JaxManager, native: Callable[..., Any]) -> Callable[..., Any]:
    """Return `optax.apply_updates`, which knows what became of parameters."""

    @functools.wraps(native)
    def apply_updates(params: Any, updates: Any) -> Any:
        applied = native(params, updates)
        manager.meter(params, applied)
        return applied

    return apply_updates


@contextmanager
def _inside(manager: JaxManager) -> Iterator[bool]:
    """Go into a transformation; yield whether the script called it, and no other transformation."""
    here, call = manager.here, _Call()
    if here.outermost is not None and here.outermost() is not None:
        yield False
        return
    try:
        here.outermost = weakref.ref(call)
        yield manager.automates
    finally:
        here.outermost = None


def _initialising(manager: JaxManager, native: Callable[..., Any], kind: str) -> Callable[..., Any]:
    @functools.wraps(native)
    def init(params: Any, *args: Any, **kwargs: Any) -> Any:
        with _inside(manager) as outermost:
            if outermost:
                manager.adopt(kind, params)
            return native(params, *args, **kwargs)

    return init


def _updating(manager: JaxManager, native: Callable[..., Any], kind: str) -> Callable[..., Any]:
    @functools.wraps(native)
    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        with _inside(manager) as outermost:
            if not outermost or manager.member is None or manager.outcomes is None or not jax.tree.leaves(updates):
                return native(updates, state, params, **extra)
            manager.look_at(kind, updates, params)
            if not manager.member.group.enabled:  # float32: the step counts, and is the script's own
                manager.outcomes.update(jnp.array(True), manager.rates(state))
                return manager.applied(params, native(updates, state, params, **extra))
            manager.refuse_own_scaling()
            finite = all_finite(updates)
            finite = varying.agreed(finite.astype(jnp.int32), jax.lax.pmin) > 0
            manager.outcomes.update(finite, manager.rates(state))
            returned = optimizer.apply_or_skip(finite, lambda: native(updates, state, params, **extra), lambda: state)
            return manager.applied(params, returned)

    return update
