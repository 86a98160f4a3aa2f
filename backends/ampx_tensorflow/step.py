"""The step, with the loss scale in variables: what all optimizers share but those of graphs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn

import tensorflow as tf

from ampx.errors import ProtocolError
from ampx.events import UNCHECKED, StepResult
from ampx.optimizer import WrappedOptimizer
from ampx.protocol import Member, refuse_values

from . import casting, gradients, masters, meter, oplists, replicas
from .contexts import on_host
from .device_scale import VariableLedger
from .losses import check_not_scaled, scale_loss, watch_backward, watch_derivative
from .names import plain
from .pending import PendingGradients, ReceivedGradients

if TYPE_CHECKING:
    from ampx.numerics.meter import Meter


class LedgerOptimizer(WrappedOptimizer):
    """An optimizer whose loss scale lives in a `VariableLedger`."""

    max_grad_norm: float | None  # the bound of the global norm, or None
    max_grad_value: float | None  # the bound of each element, or None
    _ledger: VariableLedger
    _place: int  # its own in the ledger
    # The compute dtype of the session that wrapped it; None of an optimizer that Keras loaded.
    _compute: str | None = None
    # It updates float32 masters of low-precision variables: level O2.
    keeps_masters: bool = False
    # The plan of its session, whose entries of allow and deny may wait for a model.
    _lists: oplists.ListsPlan | None = None
    # Low-precision variables are what it is to update: level O2 or O3.
    _must_be_prepared: bool = False

    # -- the step: outside of functions, in traces, and on replicas -------------------------------------

    def _step(self, grads: Sequence[Any], variables: Sequence[Any] | None, aggregate: bool = True) -> None:
        """Unscale if not done, check, clip, apply or skip, move the loss scale. Sync: one outside of traces."""
        member = self._caught_up()
        if not member.group.enabled:
            self._build(variables)
            grads, _ = self._clip(self._sum(grads, variables, aggregate))
            self._apply(grads, variables)
            member.note_result(UNCHECKED)
            return
        if not grads:
            self._close_empty(member)
            return
        scale, eager = self._collect(member, grads, variables), on_host()
        try:
            if eager:
                self._begin_observed(member, grads, self._updated(variables))
            unscaled = self._sum(self._unscale(member, grads, scale), variables, aggregate)
            finite, by_loss, lowest = self._check(member, unscaled, scale)
            leaves = () if eager else self._leaves(member, grads, unscaled, variables)
            clipped, norm = self._clip(unscaled)
            self._apply_or_skip(member, finite, clipped, variables, scale, norm, leaves)
            member.finish(by_loss, norm, lowest)
        finally:
            self._received.release()

    def _collect(self, member: Member, grads: Sequence[Any], variables: Any) -> Any:
        """Return the scale that the gradients carry; raise where they cannot be stepped with."""
        scale = self._pending.check_step(member)
        self._check_gradients(member, grads)
        self._check_replicas()
        self._meter.check()
        self._build(variables)
        self._check_prepared(variables)
        return scale

    def _unscale(self, member: Member, grads: Sequence[Any], scale: Any) -> Sequence[Any]:
        """Unscale gradients, unless `get_unscaled_gradients` did, or the scale is always 1."""
        grads = gradients.widen(grads) if self.keeps_masters else grads
        divides = member.stage != "unscaled" and self._pending.divides(member)
        return gradients.unscale(grads, scale) if divides else grads

    def _check(self, member: Member, grads: Sequence[Any], scale: Any) -> tuple[Any, dict[int, Any], Any]:
        """Return whether gradients are finite on all replicas; the same by loss id, and the scale of the lowest."""
        losses, received = self._pending.losses, self._received
        by_loss, lowest = losses.finite(member, self._are_finite(grads), scale)
        flags = list(by_loss.values())
        finite = flags[0] if len(flags) == 1 else tf.reduce_all(tf.stack(flags))
        if received.grads:  # outside of functions
            rows = [] if bool(finite) else [*received.list_nonfinite(), *losses.nonfinite(member)]
            received.note_nonfinite(member.group.steps + 1, rows)
        return finite, by_loss, lowest

    def _clip(self, grads: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        """Clip as `wrap_optimizer` was asked to; return the norm too, where it is measured."""
        if not self._clips:
            return grads, None
        return gradients.clip(grads, self.max_grad_norm, self.max_grad_value)

    def _apply_or_skip(
        self,
        member: Member,
        finite: Any,
        grads: Sequence[Any],
        variables: Any,
        scale: Any,
        norm: Any,
        leaves: Sequence[meter.Leaf],
    ) -> None:
        """Update where the gradients are finite; in a trace of one device this moves the loss scale, too."""
        move = self._ledger.mover(member.group, scale, norm)
        skip = partial(move, False)

        def apply(grads: Sequence[Any]) -> None:
            self._apply(grads, variables)
            move(True)

        member.begin_change()  # nobody can tell how far an update came that raised; nothing may apply it again
        self._pending.forget(member)
        # Native defect: a skipped step of tf_keras advances `iterations`, and schedules with it.
        if leaves:
            self._meter.choose(finite, scale, leaves, skip, partial(apply, grads))
        else:
            replicas.conditionally(finite, apply, grads, otherwise=skip)

    def _close_empty(self, member: Member) -> None:
        """End a step without gradients: it counts for nothing."""
        self._pending.forget(member)
        if on_host():
            member.finish_empty()
        else:
            member.forget()

    # -- its parts ------------------------------------------------------------------------------------

    @cached_property
    def _pending(self) -> PendingGradients:
        return PendingGradients(self._ledger, self._place)

    @cached_property
    def _received(self) -> ReceivedGradients:
        return ReceivedGradients()

    @cached_property
    def _meter(self) -> meter.OptimizerMeter:
        compute = self._compute or casting.compute_dtype()
        return meter.OptimizerMeter(self._ledger, compute, self._received, self._accumulates)

    def _begin_observed(self, member: Member, grads: Sequence[Any], updated: Sequence[Any]) -> None:
        """Begin a step that is made outside of functions: observers see its gradients."""
        self._received.grads, self._received.variables = grads, updated
        alike = len(updated) == len(grads)  # else the raw optimizer complains
        member.observers = self._meter.observers if alike else ()
        member.begin_step(self)

    def _leaves(
        self, member: Member, received: Sequence[Any], unscaled: Sequence[Any], variables: Any
    ) -> Sequence[meter.Leaf]:
        """List what the meter looks at in a trace, with gradients that the step holds anyway; () where it does not."""
        updated = [masters.of(variable) for variable in self._updated(variables)]
        scaled = member.stage != "unscaled"
        return self._meter.leaves(updated, received, unscaled, scaled, not scaled or self._pending.divides(member))

    def _sum(self, grads: Sequence[Any], variables: Any, aggregate: bool) -> Sequence[Any]:
        """Add up the gradients of all replicas, where that is not left to the raw optimizer."""
        raise NotImplementedError

    def _are_finite(self, grads: Sequence[Any]) -> Any:
        """Return whether the gradients of all replicas are finite."""
        return replicas.everywhere(gradients.finite(grads))

    @property
    def _clips(self) -> bool:
        return self.max_grad_norm is not None or self.max_grad_value is not None

    def _updated(self, variables: Any) -> Sequence[Any]:
        """Return the variables that a step updates."""
        return list(variables)

    @property
    def _accumulates(self) -> bool:
        """Whether not every step updates."""
        return False

    def _build(self, variables: Any) -> None:
        """Make the raw optimizer's variables, outside of any trace."""
        raise NotImplementedError

    def _apply(self, grads: Sequence[Any], variables: Any) -> None:
        """Update with unscaled, finite gradients, casting off."""
        raise NotImplementedError

    def _check_gradients(self, member: Member, grads: Sequence[Any]) -> None:
        """Raise for gradients that are unscaled where they should carry the scale, or the other way round."""
        self._pending.check(member, grads)

    def _check_prepared(self, variables: Any) -> None:
        """Raise where the session asks for something that `prepare` does, and it was never called."""
        if self._lists is not None:
            self._lists.check_resolved()
        if not self._must_be_prepared:
            return
        if not any(tf.as_dtype(variable.dtype).base_dtype in gradients.LOW for variable in self._updated(variables)):
            raise ProtocolError(
                "the level asks for low-precision variables, but the optimizer was given none: the model would train "
                "in float32. Call model, opt = ampx.prepare(model, opt) first, or use level='O1'."
            )

    def _check_replicas(self) -> None:
        """Raise where replicas would not each have the loss scale."""
        if tf.distribute.in_cross_replica_context():
            raise ProtocolError(
                "gradients were applied outside the replicas of a strategy; accepted: inside the function that "
                "strategy.run gets. Apply them there."
            )
        if not replicas.several():
            return
        if not isinstance(plain(self._ledger.scale), tf.distribute.DistributedValues):
            raise ProtocolError(
                "the optimizer was wrapped outside the scope of a strategy with several replicas, so that they would "
                "share one loss scale and each move it; accepted: wrapping inside `with strategy.scope():`. Call "
                "wrap_optimizer there."
            )

    # -- the protocol ---------------------------------------------------------------------------------

    @property
    def ampx_member(self) -> Member:  # type: ignore[override]
        """The optimizer's place in the protocol, where the caller runs."""
        return self._ledger.contexts.here().members[self._place]

    @property
    def loss_scale(self) -> Any:
        """The current loss scale; a tensor in traced code. Sync: one, unless traced."""
        if on_host() or not self._ledger.contexts.host.enabled:
            return super().loss_scale
        return tf.convert_to_tensor(self._ledger.scale)

    @property
    def last_step(self) -> StepResult | None:
        """What the last step did; None before the first. In traced code tensors, 0 before. Sync: one, unless traced."""
        if on_host():
            return super().last_step
        enabled = self._ledger.contexts.host.enabled
        return self._ledger.result(self._place, self.max_grad_norm is not None) if enabled else UNCHECKED

    @property
    def ampx_pending(self) -> bool:
        """Whether gradients of `scale_loss` wait for the step, as far as the caller's place can tell."""
        return self._pending.wait(self.ampx_member)

    def ampx_assert_idle(self) -> list[Any]:
        """Return an operation that fails in a function where gradients wait when it runs."""
        return self._pending.assert_none()

    def ampx_culprits(self) -> tuple[str, ...]:
        """Return the names of variables with non-finite gradients, in a step that is made outside of functions."""
        return self._received.culprits()

    def ampx_nonfinite(self) -> list[tuple[Any, int]]:
        """List the variables with non-finite gradients in the last step, and how many elements of these are.

        Raises:
            UnsupportedByBackendError: A function made it, after which the gradients are gone.
        """
        group = self._ledger.contexts.host
        group.resolve()
        return self._received.nonfinite(group.steps)

    def ampx_meter(self) -> Meter | None:
        """Return what the last metered update did. Sync: as `last_step`."""
        self._ledger.contexts.host.resolve()
        return self._meter.host.last()

    def ampx_catch_up(self) -> None:
        """Note that a function has made the step, or that one was interrupted, which a new loss makes good.

        Gradients are values: those of an interrupted step are gone, and nothing adds to them.
        """
        if self._caught_up().stage in ("changing", "interrupted"):
            self.zero_grad()

    def _caught_up(self) -> Member:
        """Return the member, after noting that a function has made the step."""
        member = self.ampx_member
        if member.pending and not self._pending.wait_here(member):
            self._pending.forget(member)
            member.forget()
        return member

    def zero_grad(self) -> None:
        """Forget the losses that were scaled since the last step: their gradients will not be applied."""
        member = self.ampx_member
        self._pending.forget(member)
        member.forget()

    def ampx_before_backward(self, loss_id: int, scale: Any) -> None:
        """Have it seen whether the scaled loss is differentiated, until it was once.

        Raises:
            UnsupportedByBackendError: Losses of several ids are scaled on several replicas.
            ProtocolError: They are scaled in several functions.
        """
        member = self.ampx_member
        self._pending.losses.begin(self, member, loss_id, scale)
        self._watch_derivative(member, scale)

    def _watch_derivative(self, member: Member, scale: Any) -> None:
        if self._pending.divides(member) and not member.sees_backward:
            watch_derivative(scale)

    def ampx_after_backward(self, loss_id: int) -> None:
        """Keep the scale that gradients now carry in a variable: another function may step."""
        member = self.ampx_member
        if self._pending.losses.end(member, loss_id):
            self._pending.carry(member.factor)
        if not on_host():
            member.drop_factors()  # a tensor of this trace; the variable tells it everywhere

    def ampx_abandon_backward(self, loss_id: int) -> None:
        """Forget what the gradients of a body were that raised."""
        self._pending.losses.abandon(self.ampx_member)

    def _scaled(self, loss: Any, watched: bool = False) -> Any:
        """Scale a loss without a body around its backward, as Keras does in `fit`.

        Args:
            loss: Floating tensor.
            watched: A step is refused where nothing differentiates the scaled loss.
        """
        check_not_scaled(loss, "the optimizer")
        member = self.ampx_member
        if not member.group.enabled:
            return loss
        if member.stage != "idle":
            self.ampx_catch_up()
        member.check_enter()
        self._pending.losses.begin_without_body(member)
        factor = self._ledger.factor(member.group, 0) if member.factor is None else member.factor
        if watched:
            self._watch_derivative(member, factor)
        scaled = scale_loss(loss, factor)
        member.begin_change()
        self._pending.carry(factor)
        if watched and not member.sees_backward:
            member.watch_backward([watch_backward(loss, scaled)])
        member.note_scaled(factor)
        if not on_host():
            member.drop_factors()  # a tensor of this trace; the variable tells it everywhere
        return scaled

    @tf.autograph.experimental.do_not_convert
    def get_scaled_loss(self, loss: Any) -> Any:
        """Return the loss in float32 times the loss scale, as in Keras 2.

        Native defect: the product is computed in the dtype of the loss, and overflows in float16.

        Args:
            loss: Floating scalar tensor, or a function that returns one.

        Raises:
            NestedScaleError: A `scale_loss` body for this optimizer is running.
        """
        return (lambda: self._scaled(loss(), watched=True)) if callable(loss) else self._scaled(loss, watched=True)

    @tf.autograph.experimental.do_not_convert
    def get_unscaled_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Return unscaled gradients, as in Keras 2; `apply_gradients` then takes them as they are.

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
        factor = self._pending.check_step(member)
        self._pending.check_scaled(member, "get_unscaled_gradients", grads)
        unscaled = gradients.unscale(gradients.widen(grads) if self.keeps_masters else grads, factor)
        self._pending.note_unscaled(grads, unscaled)
        member.mixes = True  # the caller adds up unscaled gradients, if any
        member.note_unscaled(factor if member.stage == "idle" else None)  # idle: scaled in another function
        return unscaled

    def ampx_owns(self, variable: Any) -> bool | None:
        """Return whether the optimizer updates a variable; None where it was not built yet."""
        return None

    def ampx_unscale(self) -> NoReturn:
        """Refuse: only `apply` sees the gradients."""
        refuse_values("unscale", "tensorflow", "apply")

    def ampx_clip_grad_norm(self, max_norm: float) -> NoReturn:
        """Refuse: only `apply` sees the gradients."""
        refuse_values("clip_grad_norm", "tensorflow", "apply")

    # -- saving: by these two, checkpoints of TensorFlow hold the scales of losses of other ids than 0 ----

    def _trackable_children(self, save_type: str = "checkpoint", **options: Any) -> dict[str, Any]:
        native: Any = super()
        children: dict[str, Any] = native._trackable_children(save_type, **options)
        return {**children, **self._ledger.saved_others()} if save_type == "checkpoint" else children

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        native: Any = super()
        variable = self._ledger.find_other(name) if name.startswith("loss_") else None  # there is no ledger at first
        return native._lookup_dependency(name, cached_dependencies) if variable is None else variable
