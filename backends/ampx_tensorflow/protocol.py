"""What the optimizers of Keras 3 and of tf_keras share: the protocol over a loss scale in variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import tensorflow as tf

from ampx.errors import ProtocolError
from ampx.events import UNCHECKED, StepResult
from ampx.group import Member
from ampx.optimizer import WrappedOptimizer
from ampx.scale_state import LossScale

from . import replicas
from .contexts import on_host
from .ledger import Slots, VariableLedger, is_one
from .losses import scale_loss


class LedgerOptimizer(WrappedOptimizer):
    """An optimizer whose loss scale lives in a `VariableLedger`."""

    _ledger: VariableLedger
    _place: int
    # One backward of optimizers with several scales takes the smallest, which need not be this one's.
    _shared_loss: bool = False

    @property
    def _slots(self) -> Slots:
        return self._ledger.slots[self._place]

    @property
    def _measures(self) -> bool:
        """Whether steps tell the norm of the gradients."""
        raise NotImplementedError

    @property
    def ampx_member(self) -> Member:  # type: ignore[override]
        """The optimizer's place in the protocol, where the caller runs."""
        member = self._ledger.contexts.member(self._place)
        if member.stage == "scaled" and on_host() and not float(self._slots.pending.numpy()) > 0:
            member.forget()  # a function has made the step
        return member

    @property
    def loss_scale(self) -> Any:
        """The current loss scale; a tensor in traced code. Sync: one, unless traced."""
        return super().loss_scale if on_host() else tf.convert_to_tensor(self._ledger.scale)

    @property
    def last_step(self) -> StepResult | None:
        """What the last step did; None before the first. In traced code tensors, 0 before. Sync: one, unless traced."""
        if on_host():
            return super().last_step
        enabled = self._ledger.contexts.host.enabled
        return self._ledger.result(self._place, self._measures) if enabled else UNCHECKED

    def ampx_after_backward(self, loss_id: int) -> None:
        """Keep the scale that gradients now carry in a variable: another function may step."""
        member = self._ledger.contexts.member(self._place)
        if member.factor is not self._ledger.given:
            self._shared_loss = True
            self._ledger.pin()
        self._slots.pending.assign(tf.convert_to_tensor(member.factor, tf.float32))
        if not on_host():
            member.factors = {}  # a tensor of this trace; the variable tells it everywhere

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

    def _scaled(self, loss: Any) -> Any:
        """Scale a loss without a body around its backward, as Keras does in `fit`."""
        member = self.ampx_member
        if not member.group.enabled:
            return loss
        member.check_enter()
        factor = self._ledger.factor(member.group, 0) if member.factor is None else member.factor
        member.enter(factor, 0)
        member.leave(True)
        self.ampx_after_backward(0)
        return scale_loss(loss, factor)

    def _check_step(self, member: Member) -> Any:
        """Give the scale that the gradients carry.

        Raises:
            NotScaledError: They carry none.
            ProtocolError: They belong to a group and were scaled in another function.
        """
        pending = self._slots.pending
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
        if on_host():
            if not float(pending.numpy()) > 0:
                member.check_step()
            return tf.convert_to_tensor(pending)
        factor = tf.convert_to_tensor(pending)
        message = "NotScaledError: step was called on gradients whose loss did not go through scale_loss"
        with tf.control_dependencies([tf.debugging.Assert(factor > 0, [message])]):
            return tf.identity(factor)

    def _check_replicas(self) -> None:
        """Raise where replicas would not each have the loss scale.

        Raises:
            ProtocolError: The caller is no replica of the strategy, or the loss scale was made outside of its scope.

        Sync: none.
        """
        if tf.distribute.in_cross_replica_context():
            raise ProtocolError(
                "gradients were applied outside the replicas of a strategy; accepted: inside the function that "
                "strategy.run gets. Apply them there."
            )
        if replicas.several() and not isinstance(_plain(self._ledger.scale), tf.distribute.DistributedValues):
            raise ProtocolError(
                "the optimizer was wrapped outside the scope of a strategy with several replicas, so that they would "
                "share one loss scale and each move it; accepted: wrapping inside `with strategy.scope():`. Call "
                "wrap_optimizer there."
            )

    def _conclude(
        self, member: Member, factor: Any, finite: Any, norm: Any, update: Callable[..., None], *args: Any
    ) -> None:
        """Update if the gradients are finite, close the step, move the scale."""
        alone = self._ledger.moves_alone(member.group)

        def apply(*args: Any) -> None:
            update(*args)
            if alone:
                self._ledger.move(member.group, True, factor, norm)

        def skip() -> None:
            if alone:
                self._ledger.move(member.group, False, factor, norm)

        # Native defect: a skipped step of tf_keras advances `iterations`, and schedules with it.
        replicas.conditionally(finite, apply, *args, otherwise=skip)
        self._slots.pending.assign(0.0)
        member.factors = {0: factor}
        member.finish({0: finite}, norm)

    def _nothing_to_do(self, member: Member) -> None:
        """Close a step without gradients: it is not counted."""
        self._slots.pending.assign(0.0)
        if not on_host():
            member.forget()
            return
        self._ledger.resolve(member.group)
        state = member.group.states[0]
        member.forget(StepResult(False, True, state.scale, state.scale, state.consecutive_skips))

    def _divides(self, config: LossScale) -> bool:
        """Tell whether the gradients carry a scale at all."""
        return self._shared_loss or not is_one(config)

    def _shrinks(self, config: LossScale) -> bool:
        """Tell whether dividing by any scale that may come keeps finite gradients finite."""
        now = self._ledger.contexts.host.states[0].scale
        lowest = min(config.min_scale if config.dynamic else config.init_scale, now)
        return lowest >= 1 and not self._shared_loss


def _plain(variable: Any) -> Any:
    return getattr(variable, "value", variable) if not isinstance(variable, tf.Variable) else variable


def make_slots() -> Slots:
    """Make what one optimizer keeps in variables, tracked by nothing, so that nothing saves them. Sync: none."""
    with tf.init_scope():
        return Slots(tf.Variable(0.0, trainable=False), tf.Variable([0.0, 0.0, 0.0], trainable=False))
