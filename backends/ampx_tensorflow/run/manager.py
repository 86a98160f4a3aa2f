"""`ampx run` in TensorFlow: what happens to optimizers, models, tapes and sessions of a script that is not edited.

A model that Keras compiles and trains by itself is cast by its layers' policies, as by hand: all but those that give
the outputs. Everything else is cast by the graph rewriter, and outside of graphs product by product, so that the script
sees float32 everywhere: loops over `GradientTape`, models with a training step of their own, graphs of TensorFlow 1.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final, TypeVar
from unittest import mock

import keras
import tensorflow as tf
from keras.src.trainers.trainer import Trainer

from ampx.errors import AmpxError, RunRefusedError
from ampx.events import Event
from ampx.optimizer import WrappedOptimizer
from ampx.policy import Effective, Policy, normalise_dtype
from ampx.run import Run
from ampx_tensorflow import devices, gradients, graph_rewrite, guard, keras2, old_names, replicas, rewrite
from ampx_tensorflow.contexts import on_host
from ampx_tensorflow.device_scale import is_one
from ampx_tensorflow.optimizer import AmpOptimizer

from . import models, tf1
from .operations import Operations

# NVIDIA's containers: graphs are cast, and (the first only) losses scaled, for every script.
_BOTH: Final = "TF_ENABLE_AUTO_MIXED_PRECISION"
_GRAPHS: Final = "TF_ENABLE_AUTO_MIXED_PRECISION_GRAPH_REWRITE"
_RECIPE: Final = "keras.mixed_precision.LossScaleOptimizer"
Function = TypeVar("Function", bound=Callable[..., Any])


class _Depth(threading.local):
    """How deep the calling thread is inside an update of a wrapped optimizer."""

    value = 0


class Automation:
    """One run: which optimizers are managed, and how the session started."""

    def __init__(self, run: Run) -> None:
        """Start with nothing managed."""
        self.run = run
        self.made: weakref.WeakSet[Any] = weakref.WeakSet()
        self.managed: dict[int, tuple[Any, Any]] = {}  # by the id of the raw optimizer, which is held
        self.wrapped: list[Any] = []
        self.held: set[Any] = set()
        self.counted: dict[int, int] = {}
        self.depth = _Depth()
        self.operations = Operations(run.recorder)
        run.record_own_sessions(self.stand_down, _kind_of)

    # -- the session -------------------------------------------------------------------------------

    def session(self, graphs: bool) -> Any:
        """Return the session, casting graphs and what is outside of them from now on where asked for.

        Layers cast only where prepared. Outside of graphs a rewriter that casts nothing here is not missed.

        Raises:
            InvalidOptionError: The settings cannot be honoured here.
        """
        new = self.run.amp is None
        if new and (policy := graph_rewrite.mixed_policy()):
            self.refuse(f"the global policy of {policy}")
        before = keras.config.dtype_policy()
        only_graphs = os.environ.get(_GRAPHS) == "1" and os.environ.get(_BOTH) != "1"
        amp = self.run.session(**({"loss_scale": 1.0} if new and only_graphs else {}))
        if new:
            keras.config.set_dtype_policy(before)  # what is not prepared computes in float32
        if not graphs:
            return amp
        plan = amp.casting
        self.depth.value += 1  # the rewriter is tried in a session, which is none of the script's
        try:
            if plan is not None and not rewrite.process.is_on and (not on_host() or rewrite.casts(plan)):
                self.guarded(rewrite.process.on)(plan)
        finally:
            self.depth.value -= 1
        self.operations.start()
        return amp

    def manage(self, raw: Any, graphs: bool) -> Any:
        """Return what `wrap_optimizer` made of a raw optimizer."""
        known = self.managed.get(id(raw))
        if known is None:
            if replicas.several():
                self.run.refuse(
                    "the script applies gradients itself on several replicas of a strategy, where a loss scale can no "
                    "longer be made; accepted: one device, or compile and fit. Wrap the optimizer by hand, inside the "
                    "strategy's scope"
                )
            amp = self.session(graphs)
            with tf.init_scope() if tf.inside_function() else nullcontext():
                wrapped = self.guarded(amp.wrap_optimizer)(raw)
            guard.leave(raw)  # the script has nothing but the raw one
            known = self.managed[id(raw)] = raw, wrapped
            self.add(wrapped, type(raw).__name__)
        return known[1]

    def add(self, wrapped: WrappedOptimizer, kind: str) -> None:
        """Make a wrapped optimizer known to the recorder."""
        group = wrapped.ampx_member.group
        self.run.recorder.add_optimizer(kind, group.config.init_scale, group.index)
        self.counted.setdefault(group.index, 0)
        self.wrapped.append(wrapped)

    # -- mixed precision of the script's own -------------------------------------------------------

    @property
    def stood_down(self) -> bool:
        """Whether the script has mixed precision of its own, which is recorded."""
        return bool(self.run.stood_down)

    def stand_down(self) -> None:
        """Leave casting and scaling to the script, and go on to count."""
        rewrite.process.off()
        graph_rewrite.stand_alone()
        self.operations.start(casts=False)

    def keep(self, wrapped: Any) -> None:
        """Record an optimizer of the script's own that scales the loss and belongs to no session."""
        if not self.stood_down:
            if self.run.amp is not None:
                self.refuse(f"{_RECIPE}, beside optimizers that do not scale the loss")
            self.run.stand_down(_RECIPE)
            self.run.recorder.restart_sampling()
            self.stand_down()
        recorder, group = self.run.recorder, wrapped.ampx_member.group
        group.index, send = len(recorder.optimizers), group.emit

        def emit(framework: str, event: Event) -> None:
            recorder.hear(event)
            send(framework, event)

        group.emit = emit
        self.add(wrapped, type(wrapped.inner_optimizer).__name__)

    def look(self, wrapped: Any) -> None:
        """Record what an optimizer of the script's own did. Sync: one, outside of functions."""
        self.run.look()
        if not on_host():
            return
        if wrapped in self.wrapped:
            self.count(wrapped)
        elif isinstance(wrapped, WrappedOptimizer):
            wrapped.ampx_member.group.resolve()
            self.run.look()
        if not self.run.recorder.sampling:
            self.operations.take_down()

    def in_effect(self) -> Effective | None:
        """Return what was in effect where no session says it, or it says something else; otherwise None.

        Operations in low precision show it; without any, Keras's policy tells.
        """
        low = {dtype for _, dtype in self.run.recorder.ops} & {"float16", "bfloat16"}
        if self.run.amp is not None:
            said = self.run.amp.effective
            if said.dtype is None or low or not self.run.recorder.ops:
                return None
            reason = f"the session is for {said.dtype}, in which no operation computed"
            return replace(said, dtype=None, reason=reason)
        if not self.wrapped:
            return None
        dtype = normalise_dtype(min(low, default=keras.config.dtype_policy().compute_dtype))
        device = devices.describe("auto")
        return Effective(
            framework="tensorflow",
            device=device.name,
            dtype=None if dtype == "float32" else dtype,
            level="O0" if dtype == "float32" else "O1",
            policy=Policy(compute_dtype=dtype),
            loss_scale=self.wrapped[0].ampx_member.group.config,
            native=dtype in device.native,
            process_wide=True,
            enabled=True,
            reason="as Keras's dtype policies of the script say",
        )

    def count(self, wrapped: Any) -> None:
        """Count in the recorder what an optimizer has stepped since the last time. Sync: one."""
        group = wrapped.ampx_member.group
        group.resolve()
        missed = group.steps - self.counted[group.index]
        self.counted[group.index] += missed
        self.run.recorder.stepped(group.index, missed)

    def refuse(self, why: str) -> None:
        """Refuse a script that uses mixed precision already."""
        self.run.refuse(
            f"the script uses mixed precision of its own ({why}); accepted: scripts in float32, and those with the "
            f"functions of TensorFlow 1. Run it without ampx run"
        )

    def guarded(self, function: Function) -> Function:
        """Return a function whose errors of ampx are refusals."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except RunRefusedError:
                raise
            except AmpxError as error:
                self.run.refuse_for(error)

        return call  # type: ignore[return-value]

    def note(self, sentence: str) -> None:
        """Add a sentence to the summary, once."""
        if sentence not in self.run.recorder.notes:
            self.run.recorder.notes.append(sentence)

    # -- loops over tapes --------------------------------------------------------------------------

    def manage_all(self) -> None:
        """Manage every optimizer that the script has made: a tape does not say which it is for."""
        for raw in list(self.made):
            self.manage(raw, True)

    def scale(self) -> Any:
        """Return the scale for a backward that may belong to any optimizer; None where there is nothing to scale.

        Gradients are true again before the script sees them, so that any scale is right.
        """
        if self.stood_down:
            return None
        self.manage_all()
        wrapped = [one for _, one in self.managed.values() if isinstance(one, AmpOptimizer)]
        scales = [
            one._ledger.factor(one.ampx_member.group, 0) for one in wrapped if not is_one(one.ampx_member.group.config)
        ]
        return tf.reduce_min(tf.stack(scales)) if scales else None


@contextmanager
def automate(run: Run) -> Iterator[None]:
    """Manage what a script makes inside."""
    this = Automation(run)
    old = run.settings
    with ExitStack() as undo:
        undo.callback(run.close)
        undo.callback(rewrite.process.off)
        undo.callback(_finish, this)
        old_names.install(old.dtype, old.device)
        undo.callback(old_names.uninstall)
        undo.enter_context(graph_rewrite.started_by(lambda: this.session(True), this.add))
        for patch in (*_patches(this), *this.operations.patches(), *tf1.patches(this)):
            undo.enter_context(patch)
        yield


def _finish(this: Automation) -> None:
    this.operations.stop()
    this.run.effective = this.in_effect()
    for wrapped in this.wrapped:
        if isinstance(wrapped, AmpOptimizer):
            this.count(wrapped)
    if "tf_keras" in sys.modules:
        this.note("tf_keras was imported: what its optimizers trained was not automated")


def _patches(this: Automation) -> Iterator[Any]:
    base = keras.optimizers.Optimizer
    make, apply, update = base.__init__, base.apply, AmpOptimizer._update
    compile_, fit, batch = Trainer.compile, keras.Model.fit, keras.Model.train_on_batch
    enter, gradient = tf.GradientTape.__enter__, tf.GradientTape.gradient

    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if this.stood_down:
            return
        if not isinstance(self, keras.optimizers.LossScaleOptimizer):
            this.made.add(self)

    @functools.wraps(update)
    def updated(self: Any, *args: Any, **kwargs: Any) -> None:
        this.depth.value += 1
        try:
            update(self, *args, **kwargs)
        finally:
            this.depth.value -= 1

    @functools.wraps(apply)
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def applied(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if this.stood_down:
            return apply(self, grads, trainable_variables)
        known = this.managed.get(id(self))
        if isinstance(self, keras.optimizers.LossScaleOptimizer):
            if not isinstance(self, WrappedOptimizer):
                this.refuse("keras.optimizers.LossScaleOptimizer")
            return apply(self, grads, trainable_variables)
        if this.depth.value or (known is None and self not in this.made):
            return apply(self, grads, trainable_variables)
        wrapped = this.manage(self, True)
        step = this.guarded(wrapped.ampx_apply_true)
        if not on_host():
            return step(grads, trainable_variables)
        with this.run.recorder.phase("step"):
            step(grads, trainable_variables)
        this.count(wrapped)
        if not this.run.recorder.sampling:
            this.operations.take_down()
        return None

    own_apply = AmpOptimizer.apply

    @functools.wraps(own_apply)
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def applied_by_itself(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not this.stood_down:
            return own_apply(self, *args, **kwargs)
        this.run.look()
        if not on_host():
            return own_apply(self, *args, **kwargs)
        with this.run.recorder.phase("step"):
            result = own_apply(self, *args, **kwargs)
        this.look(self)
        return result

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        if on_host() and not this.stood_down:  # the first forward is to be cast, too
            this.manage_all()
        return enter(self)

    @functools.wraps(gradient)
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def differentiated(
        self: Any, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        native = functools.partial(gradient, self, target, sources)
        scale = None
        if output_gradients is None and _is_loss(target) and all(map(_is_variable, tf.nest.flatten(sources))):
            scale = this.scale()
        if scale is not None:
            output_gradients = tf.fill(tf.shape(target), tf.cast(scale, target.dtype))
        if not on_host():
            found = native(output_gradients, *args, **kwargs)
        else:
            with this.run.recorder.phase("backward"):
                found = native(output_gradients, *args, **kwargs)
        if scale is None:
            return found
        true = gradients.unscale(_flat(found), scale)
        return tf.nest.pack_sequence_as(sources, true) if tf.nest.is_nested(sources) else true[0]

    @functools.wraps(compile_)
    def compiled(self: Any, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> Any:
        optimizer = None if optimizer is None else keras.optimizers.get(optimizer)
        this.run.look()
        if this.stood_down or optimizer is None or isinstance(optimizer, WrappedOptimizer):
            return compile_(self, optimizer, *args, **kwargs)
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            this.refuse("keras.optimizers.LossScaleOptimizer")
        kept = models.outputs(self)
        if kept is None or "1" in (os.environ.get(_BOTH), os.environ.get(_GRAPHS)):
            this.session(True)
        else:
            optimizer = this.manage(optimizer, False)
            plan = this.session(False).casting
            if plan is not None:
                models.prepare(self, plan, kept)
                models.count_layers(this.run, self)
        this.run.lines = models.lines(this.run)
        return compile_(self, optimizer, *args, **kwargs)

    def training(native: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(native)
        def trained(self: Any, *args: Any, **kwargs: Any) -> Any:
            with this.run.recorder.phase("train"):
                found = native(self, *args, **kwargs)
            if this.stood_down:
                this.look(self.optimizer)
            elif isinstance(self.optimizer, AmpOptimizer):
                raw = self.optimizer.inner_optimizer
                if id(raw) in this.managed and native is fit:
                    this.count(self.optimizer)
            return found

        return trained

    make_own = keras2.LossScaleOptimizer.__init__

    @functools.wraps(make_own)
    def made_own(self: Any, *args: Any, **kwargs: Any) -> None:
        make_own(self, *args, **kwargs)
        this.keep(self)

    yield mock.patch.object(base, "__init__", made)
    yield mock.patch.object(keras2.LossScaleOptimizer, "__init__", made_own)
    yield mock.patch.object(base, "apply", applied)
    yield mock.patch.object(AmpOptimizer, "apply", applied_by_itself)
    yield mock.patch.object(AmpOptimizer, "_update", updated)
    yield mock.patch.object(tf.GradientTape, "__enter__", entered)
    yield mock.patch.object(tf.GradientTape, "gradient", differentiated)
    yield mock.patch.object(Trainer, "compile", compiled)
    yield mock.patch.object(keras.Model, "fit", training(fit))
    yield mock.patch.object(keras.Model, "train_on_batch", training(batch))


# -- tapes --------------------------------------------------------------------------------------------------


def _is_variable(source: Any) -> bool:
    return isinstance(source, (tf.Variable, keras.Variable))


def _is_loss(target: Any) -> bool:
    """Return whether this is a loss that was not scaled: what `scale_loss` gave has a `gradient`."""
    known = isinstance(target, tf.Tensor) and not hasattr(target, "gradient")
    return bool(known and target.dtype.is_floating and target.dtype != tf.float16)


def _flat(found: Any) -> list[Any]:
    return list(tf.nest.flatten(found)) if tf.nest.is_nested(found) else [found]


def _kind_of(wrapped: Any) -> str:
    """Return the class of what a wrapper of Keras or of TensorFlow 1 holds."""
    return type(getattr(wrapped, "inner_optimizer", None) or getattr(wrapped, "_optimizer", wrapped)).__name__
