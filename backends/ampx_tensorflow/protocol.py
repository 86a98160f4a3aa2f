"""What the optimizers of Keras 3 and of tf_keras share: the protocol over a loss scale in variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NoReturn

import tensorflow as tf

from ampx.errors import ProtocolError
from ampx.events import UNCHECKED, StepResult
from ampx.optimizer import WrappedOptimizer
from ampx.protocol import Member
from ampx.scale_state import LossScale

from . import gradients, replicas
from .contexts import on_host
from .device_scale import Slots, VariableLedger, is_one
from .losses import scale_loss


class LedgerOptimizer(WrappedOptimizer):
    """An optimizer whose loss scale lives in a `VariableLedger`."""

    _ledger: VariableLedger
    _place: int
    # One backward of optimizers with several scales takes the smallest, which need not be this one's.
    _shared_loss: bool = False

    @cached_property
    def _true(self) -> dict[int, Any]:
        """The gradients that `get_unscaled_gradients` gave since the last step, by id."""
        return {}

    @cached_property
    def _divided(self) -> dict[int, Any]:
        """The gradients that `get_unscaled_gradients` got since the last step, by id."""
        return {}

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
        return self._ledger.contexts.member(self._place)

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

    @property
    def ampx_pending(self) -> bool:
        """Whether gradients of `scale_loss` wait for the step, as far as the caller's place can tell."""
        return self._pends_here() or (bool(self._ledger.contexts.elsewhere(self._place)) and self._waits())

    def ampx_assert_idle(self) -> list[Any]:
        """Return an operation that fails in a function where gradients wait when it runs."""
        if replicas.several():
            return []
        message = "RawStepError: a raw optimizer was stepped while gradients of scale_loss are pending"
        return [tf.debugging.Assert(tf.convert_to_tensor(self._slots.pending) <= 0, [message])]

    def _pends_here(self) -> bool:
        member = self.ampx_member
        stepped = on_host() and member.stage in ("scaled", "unscaled") and not self._waits()
        return member.pending and not stepped

    def _waits(self) -> bool:
        """Return whether the variable says that gradients wait; functions write it, too."""
        with tf.init_scope():  # a function that is traced now runs next
            return not replicas.several() and float(self._slots.pending.numpy()) > 0

    def ampx_catch_up(self) -> None:
        """Note that a function has made the step, or that one was interrupted, which a new loss makes good.

        Gradients are values: those of an interrupted step are gone, and nothing adds to them.
        """
        member = self._caught_up()
        if member.stage == "interrupted":
            self._start_over(member)

    def _caught_up(self) -> Member:
        """Return the member, after noting that a function has made the step."""
        member = self.ampx_member
        if member.pending and not self._pends_here():
            self._start_over(member)
        return member

    def zero_grad(self) -> None:
        """Forget the losses that were scaled since the last step: their gradients will not be applied."""
        self._start_over(self.ampx_member)

    def _start_over(self, member: Member, result: StepResult | None = None) -> None:
        self._true.clear()
        self._divided.clear()
        self._slots.pending.assign(0.0)
        member.forget(result)

    def ampx_after_backward(self, loss_id: int) -> None:
        """Keep the scale that gradients now carry in a variable: another function may step."""
        member = self.ampx_member
        self._keep_factor(member.factor)
        if not on_host():
            member.drop_factors()  # a tensor of this trace; the variable tells it everywhere

    def _keep_factor(self, factor: Any) -> None:
        if factor is not self._ledger.given:
            self._shared_loss = True
            self._ledger.pin()
        self._slots.pending.assign(tf.convert_to_tensor(factor, tf.float32))

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def get_scaled_loss(self, loss: Any) -> Any:
        """Return the loss in float32 times the loss scale, as in Keras 2.

        Native defect: the product is computed in the dtype of the loss, and overflows in float16.

        Args:
            loss: Floating scalar tensor, or a function that gives one.

        Raises:
            NestedScaleError: A `scale_loss` body for this optimizer is running.
        """
        return (lambda: self._scaled(loss())) if callable(loss) else self._scaled(loss)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def get_unscaled_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Return true gradients, as in Keras 2; `apply_gradients` then takes them as they are.

        Several calls may come before a step, each with other gradients of scaled losses.

        Args:
            grads: Tensors, `IndexedSlices` or None.

        Raises:
            NotScaledError: The loss was not scaled.
            ProtocolError: They came out of this method already.
        """
        grads, member = list(grads), self._caught_up()
        if not member.group.enabled:
            return grads
        factor = self._check_step(member)
        self._check_scaled("get_unscaled_gradients", grads)
        true = gradients.unscale(grads, factor)
        self._divided.update((id(one), one) for one in grads if one is not None)
        self._true.update((id(one), one) for one in true if one is not None)
        member.mixes = True  # the caller adds up true gradients, if any
        member.note_unscaled(factor if member.stage == "idle" else None)  # idle: scaled in another function
        return true

    def _check_scaled(self, call: str, grads: Sequence[Any]) -> None:
        """Raise for gradients that came out of `get_unscaled_gradients`.

        Raises:
            ProtocolError: They would be divided by the loss scale twice.
        """
        if any(id(one) in self._true for one in grads if one is not None):
            raise ProtocolError(
                f"{call} got gradients that came out of get_unscaled_gradients already, and would be divided by the "
                f"loss scale twice; accepted: gradients of the scaled loss. Call get_unscaled_gradients once for each, "
                f"then apply_gradients."
            )

    def _check_unscaled(self, grads: Sequence[Any]) -> None:
        """Raise for gradients that went into `get_unscaled_gradients`.

        Raises:
            ProtocolError: They carry the loss scale, and the step expects true ones.
        """
        if any(id(one) in self._divided and id(one) not in self._true for one in grads if one is not None):
            raise ProtocolError(
                "apply_gradients got gradients that carry the loss scale, after get_unscaled_gradients had made true "
                "ones of them; accepted: what it returned. Pass that."
            )

    def _take_true(self) -> None:
        """Expect true gradients in this step, of a loss that did not go through `scale_loss`."""
        member = self.ampx_member
        if not member.group.enabled:
            return
        factor = self._ledger.factor(member.group, 0)
        self._slots.pending.assign(factor)
        member.note_unscaled(factor)

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
        if member.stage != "idle":
            self.ampx_catch_up()
        member.check_enter()
        factor = self._ledger.factor(member.group, 0) if member.factor is None else member.factor
        scaled = scale_loss(loss, factor)
        member.begin_change()
        self._keep_factor(factor)
        member.note_scaled(factor)
        if not on_host():
            member.drop_factors()  # a tensor of this trace; the variable tells it everywhere
        return scaled

    def _check_step(self, member: Member) -> Any:
        """Return the scale that the gradients carry.

        Raises:
            NotScaledError: They carry none.
            ProtocolError: They belong to a group and were scaled in another function, or functions left both kinds.
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
        stages = {one.stage for one in elsewhere}
        if len(stages) > 1:
            raise ProtocolError(
                "one function left scaled gradients and another true ones of get_unscaled_gradients, and a third "
                "steps, which cannot tell them apart; accepted: one way. Call get_unscaled_gradients in every function "
                "that scales, or in none."
            )
        if on_host():
            if not float(pending.numpy()) > 0:
                member.check_step()
            factor = tf.convert_to_tensor(pending)
        else:
            factor = tf.convert_to_tensor(pending)
            message = "NotScaledError: step was called on gradients whose loss did not go through scale_loss"
            with tf.control_dependencies([tf.debugging.Assert(factor > 0, [message])]):
                factor = tf.identity(factor)
        if "unscaled" in stages:
            member.note_unscaled(factor)
        return factor

    def _check_replicas(self) -> None:
        """Raise where replicas would not each have the loss scale.

        Raises:
            ProtocolError: The caller is no replica of the strategy, or the loss scale was made outside of its scope.
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

        member.begin_change()  # nobody can tell how far an update came that raised; nothing may apply it again
        self._slots.pending.assign(0.0)
        # Native defect: a skipped step of tf_keras advances `iterations`, and schedules with it.
        replicas.conditionally(finite, apply, *args, otherwise=skip)
        self._true.clear()
        self._divided.clear()
        member.finish({0: finite}, norm, factor)

    def _nothing_to_do(self, member: Member) -> None:
        """Close a step without gradients: it is not counted."""
        if not on_host():
            self._start_over(member)
            return
        self._ledger.resolve(member.group)
        state = member.group.states[0]
        self._start_over(member, StepResult(False, True, state.scale, state.scale, state.consecutive_skips))

    def _divides(self, config: LossScale) -> bool:
        """Return whether the gradients carry a scale at all."""
        return self._shared_loss or not is_one(config)

    def _shrinks(self, config: LossScale) -> bool:
        """Return whether dividing by any scale that may come keeps finite gradients finite."""
        now = self._ledger.contexts.host.states[0].scale
        lowest = min(config.min_scale if config.dynamic else config.init_scale, now)
        return lowest >= 1 and not self._shared_loss


class Keras2Optimizer(LedgerOptimizer):
    """What Keras 2's `LossScaleOptimizer` says of its loss scale, truthfully."""

    @property
    def loss_scale(self) -> Any:
        """The current loss scale as a float32 scalar tensor. Sync: one, unless traced."""
        return tf.convert_to_tensor(super().loss_scale, tf.float32)

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves."""
        return self._ledger.contexts.host.config.dynamic

    @property
    def initial_scale(self) -> float:
        """The first loss scale."""
        return self._ledger.contexts.host.config.init_scale

    @property
    def dynamic_growth_steps(self) -> int | None:
        """Finite steps in a row before growth; None for a static scale."""
        config = self._ledger.contexts.host.config
        return config.growth_interval if config.dynamic else None

    @property
    def dynamic_counter(self) -> Any:
        """Finite steps since the scale changed last, as an int64 scalar tensor; None for a static scale."""
        return tf.convert_to_tensor(self._ledger.counters)[0] if self.dynamic else None


def _plain(variable: Any) -> Any:
    return getattr(variable, "value", variable) if not isinstance(variable, tf.Variable) else variable


def make_slots() -> Slots:
    """Make what one optimizer keeps in variables, tracked by nothing, so that nothing saves them."""
    with tf.init_scope():
        return Slots(tf.Variable(0.0, trainable=False), tf.Variable([0.0, 0.0, 0.0], trainable=False))
