"""`ampx run` in JAX: what happens to the gradients and optimizers of a script that is not edited.

Functions that the script hands to `jax.grad` and `jax.value_and_grad` are cast by `ampx_jax.autocast`. Where losses are
scaled, the scale is read at run time, multiplied in before the derivative and divided out after it, so that the script
sees true gradients. Every optax transformation that the script calls skips what is not finite; the state that the
script carries has the structure that the script expects.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ampx.protocol import Member
from ampx.run import Run
from ampx.session import new_group
from ampx_jax import casting, devices, interpreter, optimizer
from ampx_jax.transform import autocast

from . import outcomes

_OWN_SCALING: Final = ("jmp", "flax.training.dynamic_scale")
NO_GRADIENTS: Final = (
    "No function went through jax.grad or jax.value_and_grad: gradients that are made in another way, with jax.vjp "
    "say, computed in float32."
)


class _Call:
    """Stands for a call of a transformation."""


class _Calls(threading.local):
    """The calls of transformations in one thread.

    Attributes:
        outermost: What the script called and is not over; the reference is dead where an exception came between the end
            of the call and its being noted.
    """

    outermost: weakref.ref[_Call] | None = None


class Automation:
    """One run: its session, and the loss scale that lives on the host."""

    def __init__(self, run: Run) -> None:
        """Start without a session."""
        self.run = run
        self.calls = _Calls()
        self.live = True
        self.differentiated = False
        self.member: Member | None = None
        self.outcomes: outcomes.Outcomes | None = None
        self.regions = ExitStack()
        self._lock = threading.Lock()

    @property
    def casts(self) -> bool:
        """Whether functions are cast now."""
        return self.live and self.run.amp is not None and casting.active.value is not None

    @property
    def scales(self) -> bool:
        """Whether losses are scaled by anything but one."""
        config = None if self.member is None else self.member.group.config
        return config is not None and (config.dynamic or config.init_scale != 1.0)

    def begin(self, kind: str, params: Any) -> None:
        """Start the session with the script's first optimizer, and note this one.

        Raises:
            RunRefusedError: The script has mixed precision of its own.
            InvalidOptionError: The settings cannot be honoured.
        """
        self.refuse_own_scaling()
        if self.run.amp is None:
            amp = self.run.session(**self._preferred())
            self.regions.enter_context(self.run.recorder.phase("train"))
            if amp.casting is not None:
                self.regions.enter_context(mock.patch.object(interpreter, "watch", self._count))
            group = new_group("jax", amp.effective.loss_scale, amp.enabled)
            self.member = group.add_member()
            with jax.ensure_compile_time_eval():  # the script may compile `init`, whose trace ends
                self.outcomes = outcomes.Outcomes(group.config, self._tell)
            self.run.lines = _lines(amp.effective.dtype, self.scales)
        low = sorted({str(jnp.result_type(leaf)) for leaf in jax.tree.leaves(params) if optimizer.is_low(leaf)})
        if low:
            self.run.refuse(
                f"the script keeps parameters in {', '.join(low)}, mixed precision of its own; accepted: float32 "
                f"parameters. Run it without ampx"
            )
        assert self.member is not None
        self.run.recorder.add_optimizer(kind, float(self.member.group.states[0].scale), 0)

    def refuse_own_scaling(self) -> None:
        """Refuse a script with loss scaling of its own, whenever it imports that: two scales would multiply.

        Raises:
            RunRefusedError: It has.
        """
        for name in _OWN_SCALING:
            if name in sys.modules:
                self.run.refuse(
                    f"the script imports {name}, mixed precision of its own; accepted: float32 scripts. Run it "
                    f"without ampx, or take it out"
                )

    def _preferred(self) -> dict[str, str]:
        """Prefer bfloat16 where nothing was asked for: it needs no loss scale, which a compiled step must fetch."""
        settings = self.run.settings
        if settings.dtype == "auto" and "bfloat16" in devices.describe(settings.device).native:
            return {"dtype": "bfloat16"}
        return {}

    def _count(self, name: str, dtype: str) -> None:
        if self.run.recorder.sampling:
            self.run.recorder.count_op(name, dtype)

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
        return jax.experimental.io_callback(self._scale_now, jax.ShapeDtypeStruct((), jnp.float32))

    def _scale_now(self) -> Any:
        assert self.member is not None
        with self._lock:
            return np.float32(self.member.group.states[0].scale)

    def report(self, finite: Any) -> None:
        """Have an update's finiteness reach `stepped`."""
        assert self.outcomes is not None
        if not self.outcomes.take(finite):
            self.outcomes.mix()
            jax.debug.callback(self.stepped, finite)

    def _tell(self, flags: list[bool]) -> None:
        for finite in flags:
            self.stepped(finite)

    def stepped(self, finite: Any) -> None:
        """Take one step's finiteness: count it and move the loss scale. Called at run time."""
        if not self.live or self.member is None:  # a step that was compiled inside runs on outside
            return
        with self._lock:
            self.member.note_scaled(self.member.group.states[0].scale)
            self.run.recorder.stepped(0)
            self.member.finish({0: bool(finite)})


def _lines(dtype: str | None, scales: bool) -> tuple[str, ...]:
    scaling = "with ampx.scale_loss(loss, opt_state) as scaled: return scaled  # at the end of what is differentiated"
    return (
        f'amp = ampx.init("jax", dtype="{dtype}")',
        "loss_of = ampx_jax.autocast(loss_of)",
        "tx = ampx.wrap_optimizer(tx)",
        *((scaling,) if scales else ()),
    )


@contextmanager
def automate(run: Run) -> Iterator[None]:
    """Cast what is differentiated inside, and let optimizers skip what is not finite."""
    this = Automation(run)
    # Named tuples: every transformation, of optax and of the script, is made here.
    patches = (
        mock.patch.object(jax, "jit", outcomes.jit(jax.jit, this.hiding)),
        mock.patch.object(jax, "grad", _differentiating(this, jax.grad, False)),
        mock.patch.object(jax, "value_and_grad", _differentiating(this, jax.value_and_grad, True)),
        mock.patch.object(optax.GradientTransformation, "__new__", _making(this, optax.GradientTransformation.__new__)),
    )
    try:
        with patches[0], patches[1], patches[2], patches[3]:
            yield
    finally:
        try:
            jax.effects_barrier()  # what was computed is told
            if this.outcomes is not None:
                this.outcomes.look(0)
        finally:
            if this.casts and not this.differentiated:
                run.recorder.notes.append(NO_GRADIENTS)
                run.lines = ()
            this.live = False
            this.regions.close()
            run.close()


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
        cast, aux = autocast(function), options.get("has_aux", False)
        cast_derivative = native(cast, **options)

        @functools.wraps(plain)
        def derivative(*inputs: Any, **named: Any) -> Any:
            if not this.casts:
                return plain(*inputs, **named)
            this.differentiated = True
            with _explained(this, inputs, named):
                if not this.scales or options.get("holomorphic"):
                    return cast_derivative(*inputs, **named)
                return scaled_derivative(*inputs, **named)

        def scaled_derivative(*inputs: Any, **named: Any) -> Any:
            scale = this.read_scale()

            def scaled(*inputs: Any, **named: Any) -> Any:
                outputs = cast(*inputs, **named)
                loss = outputs[0] if aux else outputs
                return loss.astype(jnp.float32) * scale, outputs

            (_, outputs), grads = value_and_grad(scaled, **{**options, "has_aux": True})(*inputs, **named)
            grads, _ = optimizer.unscale(grads, scale)
            if values:
                return outputs, grads
            return (grads, outputs[1]) if aux else grads

        return derivative

    return managed


@contextmanager
def _explained(this: Automation, inputs: Any, named: Any) -> Iterator[None]:
    """Refuse functions that look at values: they can be differentiated without a trace, but not cast."""
    try:
        yield
    except jax.errors.ConcretizationTypeError:
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((inputs, named))):
            raise  # the script's own trace has the same trouble
        this.run.refuse(
            "the script differentiates a function whose Python code depends on the values of arrays, which cannot be "
            "cast; accepted: functions that jax.jit accepts. Use jax.numpy.where or jax.lax.cond there"
        )


# -- optimizers -----------------------------------------------------------------------------------------------


def _making(this: Automation, native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def make(cls: Any, init: Any, update: Any) -> Any:
        kind = str(getattr(init, "__qualname__", "optimizer")).partition(".")[0]
        return native(cls, _initialising(this, init, kind), _updating(this, update))

    return make


@contextmanager
def _inside(this: Automation) -> Iterator[bool]:
    """Go into a transformation; tells whether the script called it, and no other transformation."""
    calls, call = this.calls, _Call()
    if calls.outermost is not None and calls.outermost() is not None:
        yield False
        return
    try:
        calls.outermost = weakref.ref(call)
        yield this.live
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


def _updating(this: Automation, native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        with _inside(this) as outermost:
            enabled = outermost and this.member is not None and this.member.group.enabled
            if not enabled or not jax.tree.leaves(updates):
                return native(updates, state, params, **extra)
            this.refuse_own_scaling()
            _, finite = optimizer.unscale(updates, jnp.float32(1.0))
            this.report(finite)
            return optimizer.apply_or_skip(finite, lambda: native(updates, state, params, **extra), state)

    return update
