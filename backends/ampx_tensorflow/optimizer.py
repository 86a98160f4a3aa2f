"""The Keras optimizer that `wrap_optimizer` gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NoReturn

import keras
import tensorflow as tf

from ampx import sessions
from ampx.errors import ProtocolError
from ampx.events import UNCHECKED, StepResult
from ampx.group import Member, ScaleGroup
from ampx.optimizer import WrappedOptimizer
from ampx.scale_state import LossScale

from . import casting, gradients, replicas
from .contexts import on_host
from .ledger import Slots, VariableLedger, is_one
from .losses import scale_loss


@keras.saving.register_keras_serializable("ampx")
class AmpOptimizer(keras.optimizers.LossScaleOptimizer, WrappedOptimizer):  # type: ignore[misc]
    """A Keras optimizer with its own loss scale.

    It is Keras' own `LossScaleOptimizer` with the loss scale of the specification, in variables that are there from
    the beginning: natively, a function traced before the first step holds the first scale for ever.

    Attributes:
        inner_optimizer: The raw optimizer.
        dynamic_scale: The variable of the current loss scale.
        counters: The variable of the loss scale's counters: see `VariableLedger`.
    """

    def __init__(
        self,
        inner_optimizer: Any,
        loss_scale: LossScale | None = None,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        enabled: bool = True,
        member: Member | None = None,
        name: str | None = None,
    ) -> None:
        """Made by `ampx.wrap_optimizer`, and by Keras when it loads a model."""
        if member is None:
            member = ScaleGroup("tensorflow", loss_scale or LossScale(), enabled, emit=sessions.emit).add_member()
        group = member.group
        super().__init__(inner_optimizer, group.config.init_scale, group.config.growth_interval, name)
        self.max_grad_norm = max_grad_norm
        self.max_grad_value = max_grad_value
        if not isinstance(group.ledger, VariableLedger):
            group.ledger = VariableLedger(group, *self._make_scale(group))
        self._ledger: VariableLedger = group.ledger
        # Tracked under these names: models and checkpoints save them.
        self.dynamic_scale, self.counters = group.ledger.scale, group.ledger.counters
        self._place = group.ledger.join(_make_slots())
        self._shared_loss = False

    def _make_scale(self, group: ScaleGroup) -> tuple[Any, Any, Any]:
        state = group.states[0]
        first = [state.growth_tracker, state.hysteresis_tracker, state.consecutive_skips, 0]
        scale = self.add_variable((), keras.initializers.Constant(state.scale), "float32", name="dynamic_scale")
        counters = self.add_variable((len(first),), "zeros", "int64", name="counters")
        counters.assign(first)
        with tf.init_scope():  # no attribute of the optimizer, so that nothing saves it
            return scale, counters, tf.Variable([0, 0], trainable=False, dtype=tf.int64)

    def build(self, var_list: Sequence[Any]) -> None:
        """Make the raw optimizer's variables; the loss scale's are there already."""
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(var_list)
        super(keras.optimizers.LossScaleOptimizer, self).build(var_list)

    # -- the protocol ---------------------------------------------------------------------------------

    @property
    def ampx_member(self) -> Member:  # type: ignore[override]
        """The optimizer's place in the protocol, where the caller runs."""
        return self._ledger.contexts.member(self._place)

    @property
    def loss_scale(self) -> Any:
        """The current loss scale; a tensor in traced code. Sync: one, unless traced."""
        return super().loss_scale if on_host() else tf.convert_to_tensor(self.dynamic_scale)

    @property
    def last_step(self) -> StepResult | None:
        """What the last step did; None before the first. In traced code tensors, 0 before. Sync: one, unless traced."""
        if on_host():
            return super().last_step
        if not self.ampx_member.group.enabled:
            return UNCHECKED
        return self._ledger.result(self._place, self.max_grad_norm is not None)

    def ampx_after_backward(self, loss_id: int) -> None:
        """Keep the scale that gradients now carry in a variable: another function may step."""
        member = self.ampx_member
        # One backward of optimizers with several scales takes the smallest, which need not be this one's.
        self._shared_loss = self._shared_loss or member.factor is not self._ledger.given
        self._ledger.slots[self._place].pending.assign(tf.convert_to_tensor(member.factor, tf.float32))
        if not on_host():
            member.factors = {}  # a tensor of this trace; the variable tells it everywhere

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def scale_loss(self, loss: Any) -> Any:
        """Scale a loss inside the tape, as Keras does in `fit`: `ampx.scale_loss` without its checks of the loss.

        Args:
            loss: Floating scalar tensor of any dtype.

        Returns:
            The loss in float32 times the loss scale.

        Raises:
            NestedScaleError: A `scale_loss` body for this optimizer is running.

        Sync: none.
        """
        member = self.ampx_member
        if not member.group.enabled:
            return loss
        member.check_enter()
        factor = self._ledger.factor(member.group, 0) if member.factor is None else member.factor
        member.enter(factor, 0)
        member.leave(True)
        self.ampx_after_backward(0)
        return scale_loss(loss, factor)

    # -- stepping -------------------------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Unscale, check, clip, apply or skip, move the loss scale.

        Args:
            grads: The scaled gradients: tensors, `IndexedSlices`, None where there is none.
            trainable_variables: The variables they belong to; those the optimizer was built with by default.

        Raises:
            NotScaledError: No `scale_loss` came since the last step.
            ProtocolError: Every gradient is None.

        Sync: as Keras: one outside of traced code, else none.
        """
        grads = list(grads)
        variables = None if trainable_variables is None else list(trainable_variables)
        member = self.ampx_member
        if not member.group.enabled:
            self._build(variables)
            self._update(grads, variables, None)
            member.result = UNCHECKED
            return
        if not grads:
            self._nothing_to_do(member)
            return
        factor = self._check_step(member)
        if not gradients.present(grads):
            raise ProtocolError(
                f"apply got {len(grads)} gradients, all None: the loss was scaled outside the tape, or does not depend "
                f"on the variables; accepted: gradients of the scaled loss. Enter scale_loss inside the tape, or call "
                f"scaled.gradient(tape, variables)."
            )
        self._build(variables)
        norm, divisor = None, factor if self._divides(member.group.config) else None
        if self.max_grad_norm is not None or self.max_grad_value is not None or not self._shrinks(member.group.config):
            grads, divisor = gradients.unscale(grads, divisor), None
        finite = replicas.everywhere(gradients.finite(grads))
        if self.max_grad_norm is not None or self.max_grad_value is not None:
            grads, norm = gradients.clip(grads, self.max_grad_norm, self.max_grad_value)
        replicas.conditionally(finite, self._update, grads, variables, divisor)
        self._ledger.slots[self._place].pending.assign(0.0)
        member.factors = {0: factor}
        member.finish({0: finite}, norm)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """Call `apply` with pairs of gradients and variables; gives `iterations`."""
        pairs = list(grads_and_vars)
        self.apply([grad for grad, _ in pairs], [variable for _, variable in pairs])
        return self.iterations

    def _update(self, grads: Sequence[Any], variables: Sequence[Any] | None, divisor: Any) -> None:
        with casting.off():
            self.inner_optimizer.apply(gradients.unscale(grads, divisor), trainable_variables=variables)

    def _divides(self, config: LossScale) -> bool:
        return self._shared_loss or not is_one(config)

    def _shrinks(self, config: LossScale) -> bool:
        """Tell whether dividing by any scale that may come keeps finite gradients finite."""
        lowest = min(
            config.min_scale if config.dynamic else config.init_scale, self._ledger.contexts.host.states[0].scale
        )
        return lowest >= 1 and not self._shared_loss

    def _build(self, variables: Sequence[Any] | None) -> None:
        if not self.built and variables is None and self.inner_optimizer.built:
            variables = self.inner_optimizer._trainable_variables
        if not self.built and variables is not None:
            # Natively, variables that are made in a function first called on several replicas break it.
            with tf.init_scope(), keras.name_scope(self.name, caller=self):
                self.build(variables)

    def _check_step(self, member: Member) -> Any:
        """Give the scale that the gradients carry.

        Raises:
            NotScaledError: They carry none.
        """
        pending = self._ledger.slots[self._place].pending
        elsewhere = self._ledger.contexts.elsewhere(self._place)
        if member.stage != "idle" or not elsewhere:
            member.check_step()
            return tf.convert_to_tensor(pending) if member.factor is None else member.factor
        # Another function scaled the loss: only the variable tells whether it ran.
        if len(member.group.members) > 1:
            raise ProtocolError(
                "a loss of optimizers that share a loss scale was scaled in one function and stepped in another; "
                "accepted: both in one. Move them together, or wrap the optimizers one by one."
            )
        if on_host() and not float(pending.numpy()) > 0:
            member.check_step()
        factor = tf.convert_to_tensor(pending)
        message = "NotScaledError: step was called on gradients whose loss did not go through scale_loss"
        with tf.control_dependencies([tf.debugging.Assert(factor > 0, [message])] if not on_host() else []):
            return tf.identity(factor)

    def _nothing_to_do(self, member: Member) -> None:
        if not on_host():
            member.forget()
            return
        self._ledger.resolve(member.group)
        self._ledger.slots[self._place].pending.assign(0.0)
        state = member.group.states[0]
        member.forget(StepResult(False, True, state.scale, state.scale, state.consecutive_skips))

    def ampx_unscale(self) -> NoReturn:
        """Refuse: only `apply` sees the gradients."""
        self._refuse("unscale")

    def ampx_clip_grad_norm(self, max_norm: float) -> NoReturn:
        """Refuse: only `apply` sees the gradients."""
        self._refuse("clip_grad_norm")

    def _refuse(self, call: str) -> NoReturn:
        raise ProtocolError(
            f"{call} was called, but backend 'tensorflow' has gradients as values, which only apply sees; accepted: "
            f"wrap_optimizer(opt, max_grad_norm=…). Pass it there."
        )

    # -- saving ---------------------------------------------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        """Give what Keras saves to make the optimizer again."""
        group = self._ledger.contexts.host
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "loss_scale": asdict(group.config),
            "max_grad_norm": self.max_grad_norm,
            "max_grad_value": self.max_grad_value,
            "enabled": group.enabled,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> AmpOptimizer:
        """Make an optimizer from what `get_config` gave."""
        inner = keras.saving.deserialize_keras_object(config["inner_optimizer"], custom_objects=custom_objects)
        return cls(**{**config, "inner_optimizer": inner, "loss_scale": LossScale(**config["loss_scale"])})


def _make_slots() -> Slots:
    # Not attributes of the optimizer, so that nothing saves them. Each replica writes its own copy.
    with tf.init_scope():
        return Slots(tf.Variable(0.0, trainable=False), tf.Variable([0.0, 0.0, 0.0], trainable=False))
