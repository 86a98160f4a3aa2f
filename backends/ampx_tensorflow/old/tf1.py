"""Optimizers of `tf.compat.v1.train`: the loss scale is part of the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from ampx.backend import Backend
from ampx.errors import AlreadyWrappedError, UnsupportedByBackendError
from ampx.events import UNCHECKED, StepResult
from ampx.optimizer import WrappedOptimizer
from ampx.protocol import Member
from ampx.scale_state import LossScale, LossScaleState
from ampx_tensorflow import casting, gradients, guard, history
from ampx_tensorflow.losses import ScaledGradient

from .tf1_scale import NamedLedger, ScaleVariables

_v1 = tf.compat.v1


def wrap(backend: Backend, optimizer: Any, member: Member, options: Mapping[str, Any]) -> GraphOptimizer:
    """Wrap a raw optimizer, making the loss scale's variables in the present graph."""
    if isinstance(optimizer, _v1.mixed_precision.MixedPrecisionLossScaleOptimizer):
        raise AlreadyWrappedError(
            f"wrap_optimizer got {type(optimizer).__name__}, which scales the loss itself; its gradients would be "
            f"unscaled twice. Pass the optimizer that was given to it, and loss_scale=… to wrap_optimizer."
        )
    if len(member.group.members) > 1:
        raise UnsupportedByBackendError(
            "wrap_optimizer got several optimizers of tf.compat.v1.train; accepted: one. Wrap them one by one."
        )
    return GraphOptimizer(backend, optimizer, member, options)


class SpecifiedLossScale(_v1.mixed_precision.DynamicLossScale):  # type: ignore[name-defined]
    """TensorFlow's own loss scale of graphs, moved as the specification says."""

    def __init__(self, config: LossScale, first: LossScaleState) -> None:
        super(_v1.mixed_precision.DynamicLossScale, self).__init__()
        self.numbers = ScaleVariables(config, first, self._add_weight)
        # Gradients, and whether they were finite when they were computed: clipping by value would hide an overflow.
        self.computed: list[tuple[Sequence[Any], Any]] = []

    def __call__(self) -> Any:
        """Return the current scale as a float32 scalar tensor."""
        return tf.convert_to_tensor(self.numbers.variables["scale"])

    def update(self, grads: Any) -> tuple[Any, Any]:
        """Return the operation that moves the scale, and whether to apply unscaled gradients."""
        distribution = tf.distribute.get_strategy()
        flags = distribution.extended.call_for_each_replica(
            lambda grads: tf.cast(gradients.finite(tf.nest.flatten(grads)), tf.float32), args=(grads,)
        )
        total = distribution.reduce(tf.distribute.ReduceOp.SUM, flags, axis=None)
        applied = {id(gradient) for gradient in tf.nest.flatten(grads)}
        unchanged = [flag for computed, flag in self.computed if any(id(gradient) in applied for gradient in computed)]
        # Changed ones may come of any. Of an interrupted step nothing is applied.
        before = unchanged or [flag for _, flag in self.computed]
        self.computed = []
        finite = tf.reduce_all([tf.equal(total, float(distribution.num_replicas_in_sync)), *before])
        done = self.numbers.move(finite)
        return (None if tf.executing_eagerly() else tf.group(*done)), finite

    def get_config(self) -> dict[str, Any]:
        """Return what the native class would take."""
        config = self.numbers.config
        return {
            "initial_loss_scale": config.init_scale,
            "increment_period": config.growth_interval,
            "multiplier": config.growth_factor,
        }

    def __repr__(self) -> str:
        return f"SpecifiedLossScale({self.numbers.config!r})"


class GraphOptimizer(WrappedOptimizer, _v1.mixed_precision.MixedPrecisionLossScaleOptimizer):  # type: ignore[name-defined]
    """An optimizer of `tf.compat.v1.train` with its own loss scale.

    `minimize(loss)` and `compute_gradients(loss)` scale the loss themselves and give unscaled gradients; gradients of a
    loss that came out of `scale_loss` are unscaled by `apply_gradients`, which applies them only if all are finite.
    """

    def __init__(self, backend: Backend, optimizer: Any, member: Member, options: Mapping[str, Any]) -> None:
        group = member.group
        if group.enabled:
            scale: Any = SpecifiedLossScale(group.config, group.state_of(0))
            group.ledger = NamedLedger(scale.numbers)
            history.watch(group)
        else:  # adds nothing to the graph
            scale = _v1.mixed_precision.FixedLossScale(1.0)
        _v1.mixed_precision.MixedPrecisionLossScaleOptimizer.__init__(self, optimizer, scale)
        self.ampx_member = member
        self._backend = backend
        self._clips: tuple[float | None, float | None] = options["max_grad_norm"], options["max_grad_value"]
        self._computed = False
        if group.enabled:
            guard.watch(optimizer, self, "apply_gradients")

    @property
    def ampx_pending(self) -> bool:
        """Whether gradients wait for the step, as far as building the graph tells."""
        return self.ampx_member.pending

    def ampx_assert_idle(self) -> list[Any]:
        """Return nothing: what a session runs is no part of the protocol."""
        return []

    def ampx_unwrap(self) -> None:
        """Leave the raw optimizer as if it had never been wrapped."""
        guard.leave(self._optimizer)

    @property
    def last_step(self) -> StepResult | None:
        """What the last run did, in a session or in eager mode; while a graph is built its fields are tensors.

        Sync: one on an accelerator.
        """
        group = self.ampx_member.group
        if not group.enabled:
            return UNCHECKED if self._computed else None
        group.ledger.close(group)
        return self._numbers.result(self._clips[0] is not None)

    @property
    def loss_scale(self) -> Any:
        """The current loss scale: a number in a session or in eager mode, a tensor while a graph is built.

        Sync: one on an accelerator.
        """
        if not self.ampx_member.group.enabled:
            return 1.0
        self.ampx_member.group.ledger.close(self.ampx_member.group)
        numbers = self._numbers.numbers()
        return self._loss_scale() if numbers is None else numbers["scale"]

    @property
    def _numbers(self) -> ScaleVariables:
        numbers: ScaleVariables = self._loss_scale.numbers
        return numbers

    @tf.autograph.experimental.do_not_convert
    def compute_gradients(self, loss: Any, var_list: Any = None, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return pairs of unscaled gradients and variables.

        The loss is a float scalar tensor (in eager mode a function that returns it), as the loss function or
        `scale_loss` did; the other arguments are TensorFlow's.
        """
        member = self.ampx_member
        if not member.group.enabled:
            return self._optimizer.compute_gradients(loss, var_list, *args, **kwargs)
        self.ampx_catch_up()
        if not member.pending:
            self._loss_scale.computed = []  # nobody applied them
        if isinstance(getattr(loss, "gradient", None), ScaledGradient):  # it came out of `scale_loss`
            pairs = self._optimizer.compute_gradients(loss, var_list, *args, **kwargs)
            grads = self._unscale_grads([gradient for gradient, _ in pairs])
            pairs = list(zip(grads, [variable for _, variable in pairs], strict=True))
        else:
            pairs = super().compute_gradients(loss, var_list, *args, **kwargs)
        computed = [gradient for gradient, _ in pairs if gradient is not None]
        self._loss_scale.computed.append((computed, gradients.finite(computed)))
        if member.stage == "inside":
            self._computed = True  # leaving the body would call the gradients scaled
        else:
            member.note_unscaled()
        return pairs

    def zero_grad(self) -> None:
        """Forget the gradients computed since the last step: they will not be applied."""
        self._loss_scale.computed, self._computed = [], False
        self.ampx_member.forget()

    def ampx_catch_up(self) -> None:
        """Note that a step was interrupted, which a new loss makes good: gradients are values."""
        if self.ampx_member.stage in ("changing", "interrupted"):
            self.zero_grad()

    def ampx_before_backward(self, loss_id: int, scale: Any) -> None:
        """Forget gradients that were computed in a body which raised.

        Raises:
            UnsupportedByBackendError: The loss has another id than 0.
        """
        if loss_id:
            self._backend.refuse(f"loss_id={loss_id} for an optimizer of tf.compat.v1.train")
        self._computed = False

    def ampx_after_backward(self, loss_id: int) -> None:
        """Remember that gradients computed inside the body are true already."""
        if self._computed:
            self._computed = False
            self.ampx_member.note_unscaled()

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Return an operation that applies unscaled gradients if all are finite, and moves the loss scale.

        Args:
            grads_and_vars: Pairs as `compute_gradients` returned them (clipped, perhaps), or gradients of what
                `scale_loss` returned.
            global_step: Incremented by one when the gradients were applied.
            name: Of the operation.

        Raises:
            NotScaledError: Neither `compute_gradients` nor `scale_loss` came before.
            LowPrecisionParametersError: A variable is float16 or bfloat16.

        Sync: none in a graph; in eager mode one on an accelerator.
        """
        member, pairs = self.ampx_member, tuple(grads_and_vars)
        if not member.group.enabled:
            self._computed = True
            return self._optimizer.apply_gradients(self._clip(pairs)[0], global_step, name)
        member.check_step()
        guard.refuse_low_precision(variable for _, variable in pairs)
        if member.stage == "scaled":
            member.check_backward(
                "`with ampx.scale_loss(loss, opt) as scaled: pass`, then tf.gradients(scaled, variables)"
            )
            grads = self._unscale_grads([gradient for gradient, _ in pairs])
            pairs = tuple(zip(grads, [variable for _, variable in pairs], strict=True))
        if tf.executing_eagerly():
            member.begin_change()  # nobody can tell how far an update came that raised
        with casting.off():
            done = super().apply_gradients(pairs, global_step, name)
        member.forget()
        member.group.ledger.close(member.group)
        return done

    def ampx_unscale(self) -> None:
        """Refuse: gradients are values."""
        self._backend.refuse("unscale (compute_gradients gives unscaled gradients)")

    def ampx_clip_grad_norm(self, max_norm: float) -> Any:
        """Refuse: pass `max_grad_norm` to `wrap_optimizer`."""
        self._backend.refuse("clip_grad_norm (gradients are values; wrap_optimizer takes max_grad_norm)")

    # -- what the native class asks for ------------------------------------------------------------------

    def _doing_dynamic_loss_scaling(self) -> bool:
        # Native defect: a fixed loss scale applies gradients that are not finite.
        return True

    def _scale_loss(self, loss: Any) -> Any:
        # Native defect: the product is computed in the dtype of the loss, and overflows in float16.
        if callable(loss):
            return lambda: self._scale_loss(loss())
        return tf.cast(loss, tf.float32) * self._loss_scale()

    def _unscale_grads(self, grads: Sequence[Any]) -> list[Any]:
        factor = self.ampx_member.factor
        return gradients.unscale(grads, self._loss_scale() if factor is None else tf.convert_to_tensor(factor))

    def _apply_gradients(self, distribution: Any, grads_and_vars: Any, global_step: Any, name: Any) -> Any:
        step = guard.native(self._optimizer, "apply_gradients")
        pairs, norm = self._clip(grads_and_vars)
        noted = [] if norm is None else [self._numbers.variables["grad_norm"].assign(norm)]
        with tf.control_dependencies([] if tf.executing_eagerly() else noted):
            updates = distribution.extended.call_for_each_replica(step, args=(pairs, global_step, name))
            return distribution.group(updates)

    def _clip(self, pairs: Any) -> tuple[Any, Any]:
        """Return pairs clipped as `wrap_optimizer` was asked to, and the norm where it is measured."""
        if self._clips == (None, None):
            return pairs, None
        grads, norm = gradients.clip([gradient for gradient, _ in pairs], *self._clips)
        return tuple(zip(grads, [variable for _, variable in pairs], strict=True)), norm
