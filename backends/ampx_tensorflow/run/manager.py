"""Every optimizer that a script makes: it stays as it is, and has a wrapper of ampx once it trains."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final

import keras
import tensorflow as tf

from ampx.backend import CastPlan
from ampx.events import Event
from ampx.modules import distinct_names
from ampx.optimizer import WrappedOptimizer
from ampx.policy import Effective, Policy, normalise_dtype
from ampx.run import GRADIENT_SAMPLES, Managed, Manager, Run, SampledGradient, patched
from ampx.session import Amp
from ampx_tensorflow import casting, devices, gradients, guard, oplists, replicas, rewrite
from ampx_tensorflow.contexts import on_host
from ampx_tensorflow.keras3 import AmpOptimizer
from ampx_tensorflow.numerics import stats

from .debugging import Debuggers
from .observing import Depth, Observing
from .operations import Operations
from .own_gradients import OwnGradients

# NVIDIA's containers: graphs are cast, and (the first only) losses scaled, for every script.
_BOTH: Final = "TF_ENABLE_AUTO_MIXED_PRECISION"
_GRAPHS: Final = "TF_ENABLE_AUTO_MIXED_PRECISION_GRAPH_REWRITE"
_UNCOMPILED: Final = (
    "Watched steps ran outside of graphs, where products are cast one by one, and their results are float32 again. "
    "`ampx run` has TensorFlow's graph rewriter cast them, which computes operations between products in low "
    "precision, too."
)
_RECIPE: Final = "keras.mixed_precision.LossScaleOptimizer"


def environment_wants_graphs() -> bool:
    """Return whether one of NVIDIA's variables asks for casting of graphs."""
    return "1" in (os.environ.get(_BOTH), os.environ.get(_GRAPHS))


class KerasManager(Manager[Managed]):
    """What is managed in one run."""

    def __init__(self, run: Run) -> None:
        self.wrapped: list[Any] = []  # all wrapped optimizers that the recorder knows, the script's own included
        self.held: set[Any] = set()  # optimizers of TensorFlow 1 whose graphs go on after the script has forgotten them
        self.at_work = Depth()  # where a wrapped optimizer, or ampx itself, is at work
        self.unscaled = Depth()  # where tapes are left alone
        self.operations = Operations(run.recorder)  # casts products outside of graphs, and counts
        self.observing = Observing(run.recorder)
        self.own_gradients = OwnGradients(self)
        self.debuggers = Debuggers(self)
        self.stand_alone: Callable[[], None] = lambda: None  # lets recipes of TensorFlow 1 start sessions of their own
        self.forces = False  # whether modules have dtypes of their own, which the graph rewriter does not know
        self.forced: dict[str, str] = {}  # by pattern of names of modules, those that the settings give them
        self._counted: dict[int, int] = {}
        super().__init__(run, self.operations, _kind_of)

    # -- the session -------------------------------------------------------------------------------

    def session(self, graphs: bool) -> Amp:
        """Return the session, casting graphs and what is outside of them from now on where asked for.

        Layers cast only where prepared. Where the rewriter casts nothing to the dtype on the device, which is tried,
        products are cast one by one in graphs, too, as outside of them.
        """
        new = self.run.amp is None
        if new and (policy := rewrite.mixed_policy()):
            self.refuse_own(f"the global policy of {policy}")
        before = keras.config.dtype_policy()
        only_graphs = os.environ.get(_GRAPHS) == "1" and os.environ.get(_BOTH) != "1"
        amp = self.run.session(**({"loss_scale": 1.0} if new and only_graphs else {}))
        if new:
            keras.config.set_dtype_policy(before)  # what is not prepared computes in float32
            if isinstance(amp.plan, oplists.ListsPlan):
                amp.plan.waiting.clear()  # a region around the run sees to them
        self.debuggers.check()
        if graphs:
            self._cast_graphs(amp)
            self.operations.start()
        return amp

    def _cast_graphs(self, amp: Amp) -> None:
        plan = amp.casting
        with self.at_work:  # the rewriter is tried in a session, which is none of the script's
            if self.forces or (plan is not None and _only_products_cast(plan)):
                self.operations.cast_in_graphs()
            elif plan is not None and not rewrite.process.is_on:
                with self.working():
                    rewrite.process.on(plan)

    # -- optimizers --------------------------------------------------------------------------------

    def wrapper(self, raw: Any) -> Any:
        """Return the wrapper of an optimizer of the script; None where there is none so far."""
        managed = self.find(raw)
        return None if managed is None else managed.wrapped

    def manage(self, raw: Any, graphs: bool) -> Any:
        """Return the wrapper of an optimizer of the script, made now where there is none."""
        managed = self.find(raw)
        if managed is None:
            managed = Managed(raw)
            self.keep(managed)
        if managed.wrapped is None:
            if replicas.several():
                self.run.refuse(
                    "the script applies gradients itself on several replicas of a strategy, where a loss scale can no "
                    "longer be made; accepted: one device, or compile and fit. Wrap the optimizer by hand, inside the "
                    "strategy's scope"
                )
            self.session(graphs)
            self.wrap(managed)
        return managed.wrapped

    def wrap(self, managed: Managed, **options: Any) -> None:
        """Make the wrapper of an optimizer, outside of any trace, and have the recorder count its steps."""
        with tf.init_scope() if tf.inside_function() else nullcontext(), self.working():
            managed.wrapped = self.run.session().wrap_optimizer(managed.raw, **options)
        # The run says how often; functions, in which the meter costs every step, it leaves as they are.
        managed.wrapped.ampx_member.group.meter_asked = False
        guard.leave(managed.raw)  # the script has nothing but the raw one
        managed.group = managed.wrapped.ampx_member.group.index
        self.record(managed.wrapped, type(managed.raw).__name__)

    def all(self) -> list[Managed]:
        """List what is managed, each with its wrapper: a tape does not say which optimizer it is for."""
        for managed in self.managed():
            if managed.wrapped is None:
                self.manage(managed.raw, True)
        return super().all()

    def rates_of(self, raw: Any) -> Iterable[float]:
        """Return its only one; none of TensorFlow 1, nor of a function of the script, which may count its calls."""
        if not isinstance(raw, keras.optimizers.Optimizer):
            return ()
        with stats.unwatched():
            rate = raw._learning_rate
            if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
                wrapped = self.wrapper(raw)
                later = self._missed(wrapped)  # of one call of a function, whose steps are counted one by one
                rate = rate(raw._iterations - later - int(wrapped.last_step.applied))
            return () if callable(rate) else (float(rate),)

    def record(self, wrapped: WrappedOptimizer, kind: str) -> None:
        """Make a wrapped optimizer known to the recorder."""
        group = wrapped.ampx_member.group
        self.run.recorder.add_optimizer(kind, group.config.init_scale, group.index)
        self._counted.setdefault(group.index, 0)
        self.wrapped.append(wrapped)

    def sample(self, optimizer: AmpOptimizer, grads: Any, trainable_variables: Any = None) -> None:
        """Hand on the gradients of a step outside of functions, where they are wanted. Sync: one a gradient."""
        takes = self.run.recorder.takes_gradients
        if takes is not None:
            variables = optimizer.inner_optimizer._trainable_variables
            variables = variables if trainable_variables is None else trainable_variables
            others = [own.inner_optimizer for own in self.wrapped if isinstance(own, AmpOptimizer)]
            every = [*(variable for own in others for variable in own._trainable_variables), *variables]
            names = distinct_names((gradients.name(variable), variable) for variable in every)
            rows = gradients.sample(list(grads), list(variables), GRADIENT_SAMPLES, names)
            takes([SampledGradient(*row) for row in rows])

    def count(self, wrapped: Any) -> None:
        """Count in the recorder what an optimizer has stepped since the last time. Sync: one."""
        missed, index = self._missed(wrapped), wrapped.ampx_member.group.index
        self._counted[index] += missed
        if missed:
            self.run.recorder.stepped(index, missed)

    def _missed(self, wrapped: Any) -> int:
        """Return how many steps, but those that a checkpoint wrote, are not counted yet. Sync: one."""
        group = wrapped.ampx_member.group
        group.resolve()
        written = wrapped._ledger.written if isinstance(wrapped, AmpOptimizer) else 0
        return int(group.steps - written - self._counted[group.index])

    def counters(self) -> list[Any]:
        """Return variables with the steps of each optimizer up to now, in their last element."""
        return [wrapped._ledger.counters for wrapped in self.wrapped if isinstance(wrapped, AmpOptimizer)]

    def count_one_by_one(self, losses: Any) -> None:
        """Report every step to the observer that a compiled function has made. Sync: one an optimizer.

        Args:
            losses: A variable with the sum of its losses, of which each step gets its share; it is cleared.
        """
        observer, missed = self.run.recorder.observer, {}
        if observer is not None and rewrite.process.is_on and tf.config.functions_run_eagerly():
            observer.note(_UNCOMPILED)
        for wrapped in self.wrapped:
            if isinstance(wrapped, AmpOptimizer):
                missed[wrapped.ampx_member.group.index] = self._missed(wrapped)
        steps = sum(missed.values())
        if not steps or observer is None:
            return
        total = None
        if losses is not None:
            total = losses.read_value()
            losses.assign(0.0)
        for index, count in missed.items():
            for _ in range(count):
                if total is not None:
                    observer.loss(lambda: float(total) / steps)
                self._counted[index] += 1
                self.run.recorder.stepped(index)

    def note_dataset(self) -> None:
        """Note where a function trains in the body of a loop over a `tf.data.Dataset`, which no rewriter casts."""
        graph, inside = tf.compat.v1.get_default_graph(), False
        while isinstance(graph, tf.__internal__.FuncGraph) and not inside:
            graph, inside = graph.outer_graph, graph.name.startswith("Dataset_")
        if inside and rewrite.process.is_on:
            self.run.recorder.note(
                "a tf.function trains inside of `for … in dataset`, whose body TensorFlow's graph rewriter does not "
                "cast: products there are float32, unless a layer casts them. Write the loop outside of the function, "
                "and call the function for each batch"
            )

    # -- mixed precision of the script's own -------------------------------------------------------

    def follow(self) -> None:
        """Leave casting and scaling to the script, and go on to count."""
        rewrite.process.off()
        self.stand_alone()
        self.operations.start(casts=False)

    def record_without_session(self, wrapped: Any) -> None:
        """Record an optimizer of the script's own that scales the loss and belongs to no session."""
        if not self.stood_down:
            if self.run.amp is not None:
                self.refuse_own(f"{_RECIPE}, beside optimizers that do not scale the loss")
            self.run.stand_down(_RECIPE)
            self.run.recorder.restart_sampling()
            self.follow()
        self.adopt(wrapped)

    def adopt(self, wrapped: Any) -> None:
        """Record an optimizer that belongs to no session, with its events."""
        recorder, group = self.run.recorder, wrapped.ampx_member.group
        group.index, send = len(recorder.optimizers), group.emit

        def emit(framework: str, event: Event) -> None:
            recorder.hear(event)
            send(framework, event)

        group.emit = emit
        self.record(wrapped, type(wrapped.inner_optimizer).__name__)

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
        self.operations.after_step()

    def refuse_own(self, why: str) -> None:
        """Refuse a script that uses mixed precision already."""
        self.run.refuse(
            f"the script uses mixed precision of its own ({why}); accepted: scripts in float32, and those with the "
            f"functions of TensorFlow 1. Run it without ampx run"
        )

    # -- the end -----------------------------------------------------------------------------------

    def release(self) -> None:
        """Take down what was counted and was in effect, and leave TensorFlow as it was."""
        super().release()
        self.debuggers.report()
        self.run.effective = self._in_effect()
        for wrapped in self.wrapped:
            if isinstance(wrapped, AmpOptimizer):
                self.count(wrapped)
        if "tf_keras" in sys.modules:
            self.run.recorder.note("tf_keras was imported: what its optimizers trained was not automated")
        rewrite.process.off()

    def _in_effect(self) -> Effective | None:
        """Return what was in effect where no session says it, or it says something else; otherwise None.

        Operations in low precision show it; without any, Keras's policy tells.
        """
        low = {dtype for _, dtype in self.run.recorder.ops} & set(casting.LOW)
        if self.run.amp is not None:
            effective = self.run.amp.effective
            if effective.dtype is None or low or not self.run.recorder.ops:
                return None
            reason = f"the session is for {effective.dtype}, in which no operation computed"
            return replace(effective, dtype=None, reason=reason)
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


def _only_products_cast(plan: CastPlan) -> bool:
    """Return whether the rewriter casts nothing, but products can be; it is tried. Sync: one, the first time.

    A graph of TensorFlow 1 is made before its optimizer, with which casting begins: only the rewriter could cast it.
    """
    return not rewrite.casts(plan) and bool(tf.compat.v1.executing_eagerly_outside_functions())


# -- patches ------------------------------------------------------------------------------------------------


@contextmanager
def optimizers_managed(manager: KerasManager) -> Iterator[None]:
    """Patch how optimizers are made and applied."""
    base = keras.optimizers.Optimizer
    with patched(
        (base, "__init__", partial(_making, manager)),
        (base, "apply", partial(_applying, manager)),
        (AmpOptimizer, "apply", partial(_applying_own, manager)),
        (AmpOptimizer, "_apply", partial(_updating, manager)),
    ):
        yield


def _making(manager: KerasManager, native: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(native)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        native(self, *args, **kwargs)
        if not manager.stood_down and not isinstance(self, keras.optimizers.LossScaleOptimizer):
            manager.keep(Managed(self))

    return make


def _updating(manager: KerasManager, native: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(native)
    def update(self: Any, *args: Any, **kwargs: Any) -> None:
        with manager.at_work:
            native(self, *args, **kwargs)

    return update


def _applying(manager: KerasManager, native: Callable[..., Any]) -> Callable[..., Any]:
    """Return `apply` of an optimizer of the script, which unscales, checks and counts."""

    @functools.wraps(native)
    @tf.autograph.experimental.do_not_convert
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if not manager.stood_down and isinstance(self, keras.optimizers.LossScaleOptimizer):
            if not isinstance(self, WrappedOptimizer):
                manager.refuse_own("keras.optimizers.LossScaleOptimizer")
            return native(self, grads, trainable_variables)
        if manager.stood_down or manager.at_work.depth or manager.find(self) is None:
            return native(self, grads, trainable_variables)
        wrapped = manager.manage(self, True)
        if not on_host():
            manager.note_dataset()
            with manager.working():
                return wrapped.ampx_apply_true(grads, trainable_variables)
        with stats.unwatched():  # an update is no part of the model
            with manager.run.recorder.phase("step"), manager.working():
                wrapped.ampx_apply_true(grads, trainable_variables)
            manager.count(wrapped)
        manager.operations.after_step()
        return None

    return apply


def _applying_own(manager: KerasManager, native: Callable[..., Any]) -> Callable[..., Any]:
    """Return `apply` of a wrapper, which is recorded where the script wrapped it."""

    @functools.wraps(native)
    @tf.autograph.experimental.do_not_convert
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        if manager.stood_down:
            manager.run.look()
        eager = on_host()
        recorded = eager and self in manager.wrapped
        with stats.unwatched():  # as above
            if recorded and not manager.at_work.depth:
                manager.sample(self, *args, **kwargs)
            if eager and manager.stood_down:
                with manager.run.recorder.phase("step"):
                    result = native(self, *args, **kwargs)
                manager.look(self)
            else:
                result = native(self, *args, **kwargs)
                if recorded and manager.observing.wanted:
                    manager.count(self)
            return result

    return apply


def _kind_of(wrapped: Any) -> str:
    """Return the class of what a wrapper of Keras or of TensorFlow 1 holds."""
    return type(getattr(wrapped, "inner_optimizer", None) or getattr(wrapped, "_optimizer", wrapped)).__name__
