"""The verbs of ampx in TensorFlow."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Final

import keras
import tensorflow as tf

import ampx
from ampx.backend import CastPlan, reject_unknown
from ampx.modules import listed
from ampx.optimizer import WrappedOptimizer
from ampx.protocol import Member
from ampx.rooms import import_part, is_there

from . import casting, devices, gradients, keras3, losses, names as module_names, oplists, rewrite, step

# What wraps optimizers of TensorFlow 1 and tf_keras, which few programs use.
_OLD: Final = "ampx_tensorflow.old"


class TensorFlowBackend(ampx.Backend):
    """TensorFlow and Keras: dtype policies for casting, Keras' own LossScaleOptimizer for loss scaling."""

    name: ClassVar[str] = "tensorflow"
    capabilities: ClassVar[ampx.Capabilities] = ampx.Capabilities(
        devices=("gpu", "cpu"),
        dtypes=frozenset({"float16", "bfloat16"}),
        levels=frozenset({"O0", "O1", "O2", "O3"}),
        gradients="explicit",
        autocast="scoped",
        op_lists=True,
        clipping=True,
        per_loss_scales=True,
        vector_losses=True,
        sees_backward=True,
    )
    prepare_finds_modules: ClassVar[bool] = True
    offers: ClassVar[Mapping[str, str]] = {
        "probe": "ampx_tensorflow.numerics.probe:TensorFlowProbe",
        "converter": "ampx_tensorflow.inference:TensorFlowConverter",
        "automation": "ampx_tensorflow.run:TensorFlowAutomation",
        "demo": "ampx_tensorflow.demo:KerasTrainer",
    }

    # Verbs that stand in modules of their own.
    device = staticmethod(devices.describe)
    cast = staticmethod(casting.cast)
    widest = staticmethod(casting.widest)
    inspect_loss = staticmethod(losses.inspect_loss)
    scale = staticmethod(losses.scale_loss)
    watch_backward = staticmethod(losses.watch_backward)

    def is_optimizer(self, candidate: object) -> bool:
        return isinstance(candidate, _optimizers()) and not isinstance(candidate, WrappedOptimizer)

    def autocast(self, plan: CastPlan, enabled: bool) -> AbstractContextManager[Any]:
        """Return a region that Keras layers follow; where graphs are cast there are none."""
        if isinstance(plan, rewrite.GraphPlan):
            return nullcontext()
        if former := _tf_keras_casting():
            return casting.both(casting.region(plan, enabled), former.region(plan, enabled))
        return casting.region(plan, enabled)

    def check_plan(self, plan: CastPlan) -> CastPlan:
        """Check a plan; where graphs are to be cast and not layers, it becomes one that says so.

        Of `allow` and `deny`, layers are those of models that `prepare` is passed, operations those of functions.
        """
        return rewrite.check_plan(oplists.resolve(plan))

    def activate(self, plan: CastPlan) -> None:
        """Switch casting on for the process; for layers made from now on, in the calling thread."""
        if isinstance(plan, rewrite.GraphPlan):
            rewrite.process.on(plan)
            return
        casting.activate(plan)
        if former := _tf_keras_casting():
            former.activate(plan)

    def deactivate(self, plan: CastPlan) -> None:
        """Undo `activate`, and what `prepare` did."""
        if isinstance(plan, rewrite.GraphPlan):
            rewrite.process.off()
            casting.restore()
            return
        casting.deactivate()
        if former := _tf_keras_casting():
            former.deactivate()

    def enter_thread(self, plan: CastPlan) -> None:
        """Let layers made in the calling thread cast, too."""
        if not isinstance(plan, rewrite.GraphPlan):
            casting.enter_thread(plan)

    def smallest(self, scales: Sequence[Any]) -> Any:
        """Return the smallest of some scales, which are tensors."""
        return tf.reduce_min(tf.stack([tf.convert_to_tensor(scale, tf.float32) for scale in scales]))

    def wrap_optimizer(self, optimizer: Any, member: Member, options: Mapping[str, Any]) -> Any:
        """Return an optimizer that is accepted wherever the raw one is."""
        reject_unknown(self.name, options, ())
        if options["plan"] is not None and options["level"].casts_params:
            from . import prepare  # needed at these levels only

            prepare.check_kind(optimizer, "wrap_optimizer", options["level"].name)
        if isinstance(optimizer, tf.compat.v1.train.Optimizer):
            return import_part(f"{_OLD}.tf1", "an optimizer of tf.compat.v1.train").wrap(
                self, optimizer, member, options
            )
        if isinstance(optimizer, keras.optimizers.Optimizer):
            return keras3.wrap(optimizer, member, options)
        return import_part(f"{_OLD}.tf_keras_step", "an optimizer of tf_keras").wrap(optimizer, member, options)

    def prepare(self, model: Any, optimizer: Any | None, plan: CastPlan) -> Any:
        """Let a model that was made before `init`, or a `tf.function`, cast; at O2 and O3 lower a model's variables."""
        accepted = "an optimizer of Keras, tf_keras or tf.compat.v1.train, wrapped or not"
        optimizers = listed(optimizer, (*_optimizers(), WrappedOptimizer), "optimizer", accepted)
        if plan.level != "O1":
            from . import prepare  # as above

            prepared = prepare.prepare(model, optimizers, plan)
        elif rewrite.is_function(model):
            prepared = rewrite.prepare(model, plan)
        elif (former := _tf_keras_casting()) and former.is_model(model):
            prepared = former.prepare(model, plan)
        else:
            prepared = casting.prepare(model, plan)
        return prepared if optimizer is None else (prepared, optimizer)

    def nonfinite_parameters(self, optimizer: Any, model: Any | None) -> list[tuple[str, int, int]]:
        """List (name, non-finite elements, elements) of variables with non-finite gradients in the last step.

        Raises:
            UnsupportedByBackendError: The step was one of a function, or of a graph of TensorFlow 1.
        """
        if not isinstance(optimizer, step.LedgerOptimizer):
            self.refuse("naming variables with non-finite gradients in graphs")
        names = {}
        if model is not None:
            names = {id(variable): name for name, variable in module_names.parameters(model)}
        rows = []
        for variable, bad in optimizer.ampx_nonfinite():
            name = names.get(id(module_names.plain(variable))) or gradients.name(variable)
            rows.append((name, bad, int(tf.TensorShape(variable.shape).num_elements())))
        return rows


def _tf_keras_casting() -> Any:
    """Return what casts layers of tf_keras; None where tf_keras was not imported, or its room was taken out."""
    if "tf_keras" not in sys.modules or not is_there(_OLD):
        return None
    return import_part(f"{_OLD}.tf_keras_casting", "tf_keras")


def _optimizers() -> tuple[type, ...]:
    """Return the classes of optimizers, those of tf_keras where it was imported."""
    former = sys.modules["tf_keras"].optimizers if "tf_keras" in sys.modules else None
    old = () if former is None else (former.Optimizer, former.legacy.Optimizer)
    return (keras.optimizers.Optimizer, tf.compat.v1.train.Optimizer, *old)
