"""The step, with the loss scale in variables: what all optimizers share but those of graphs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

import tensorflow as tf

from ampx.errors import ProtocolError, UnsupportedByBackendError
from ampx.events import UNCHECKED, StepResult
from ampx.optimizer import WrappedOptimizer
from ampx.protocol import Member, refuse_values
from ampx.rooms import make_meter
from ampx.scale_state import is_one

from . import casting, gradients, losses_by_id, masters, meter, oplists, replicas
from .contexts import on_host
from .device_scale import Slots, VariableLedger
from .losses import check_not_scaled, scale_loss, watch_backward, watch_derivative

if TYPE_CHECKING:
    from ampx.numerics.host_meter import HostMeter, Sampled
    from ampx.numerics.meter import Meter

# Stages before a step.
_WRITTEN: Final = (
    "Inside the tape write `with ampx.scale_loss(loss, opt) as scaled: pass`, or in a train_step of yours `scaled = "
    "self.optimizer.scale_loss(loss)`, and differentiate that: tape.gradient(scaled, variables)."
)


class LedgerOptimizer(WrappedOptimizer):
    """An optimizer whose loss scale lives in a `VariableLedger`."""

    max_grad_norm: float | None  # the bound of the global norm, or None
    max_grad_value: float | None  # the bound of each element, or None
    _ledger: VariableLedger
    _place: int
    # One backward of optimizers with several scales takes the smallest, which need not be this one's.
    _shared_loss: bool = False
    # The compute dtype of the session that wrapped it; None of an optimizer that Keras loaded.
    _compute: str | None = None
    # It updates float32 masters of low-precision variables: level O2.
    keeps_masters: bool = False
    # The plan of its session, whose entries of allow and deny may wait for a model.
    _lists: oplists.ListsPlan | None = None
    # Low-precision variables are what it is to update: level O2 or O3.
    _must_be_prepared: bool = False
    # The gradients of the step that is being made outside of functions, and their variables.
    _received: tuple[Sequence[Any], Sequence[Any]] = ((), ())
    # Of the last such step: its number, and what `ampx_nonfinite` returns.
    _nonfinite: tuple[int, list[tuple[Any, int]]] = (0, [])

    # -- the step -------------------------------------------------------------------------------------

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
        factor = self._check_step(member)
        self._check_gradients(member, grads)
        self._check_replicas()
        self._check_metered(member)
        self._build(variables)
        self._check_prepared(variables)
        if not on_host():
            self._run_step(member, factor, grads, variables, aggregate)
            return
        updated = self._updated(variables)
        # Past Keras's attributes, whose variables it saves as the optimizer's own.
        vars(self)["_received"] = grads, updated
        try:
            alike = len(updated) == len(grads)  # else the raw optimizer complains
            member.observers = (self._meter,) if alike and not self._accumulates else ()
            member.begin_step(self)
            self._run_step(member, factor, grads, variables, aggregate)
        finally:
            vars(self)["_received"] = (), ()

    def _run_step(self, member: Member, factor: Any, grads: Sequence[Any], variables: Any, aggregate: bool) -> None:
        received, stage = grads, member.stage
        grads = self._sum(self._unscale(member, factor, grads), variables, aggregate)
        leaves = self._leaves(stage, variables, received, grads)
        by_loss, scale = self._losses.finite(member, self._check(grads), factor)
        finite = next(iter(by_loss.values())) if len(by_loss) == 1 else tf.reduce_all(tf.stack(list(by_loss.values())))
        if on_host():
            rows = [] if bool(finite) else self._list_nonfinite(member)
            vars(self)["_nonfinite"] = member.group.steps + 1, rows
        grads, norm = self._clip(grads)
        self._apply_or_skip(member, finite, norm, factor, grads, variables, leaves)
        self._close(member, by_loss, norm, scale)

    def _unscale(self, member: Member, factor: Any, grads: Sequence[Any]) -> Sequence[Any]:
        """Unscale gradients, unless `get_unscaled_gradients` did, or the scale is always 1."""
        grads = self._widened(grads)
        if member.stage == "unscaled" or not self._divides(member):
            return grads
        return gradients.unscale(grads, factor)

    def _divides(self, member: Member) -> bool:
        """Return whether gradients carry a scale that is not always 1."""
        return self._shared_loss or not is_one(member.group.config)

    def _widened(self, grads: Sequence[Any]) -> Sequence[Any]:
        """Return the gradients as masters take them: in float32."""
        return gradients.widen(grads) if self.keeps_masters else grads

    def _sum(self, grads: Sequence[Any], variables: Any, aggregate: bool) -> Sequence[Any]:
        """Add up the gradients of all replicas, where that is not left to the raw optimizer."""
        raise NotImplementedError

    def _check(self, grads: Sequence[Any]) -> Any:
        """Return whether the gradients of all replicas are finite."""
        return replicas.everywhere(gradients.finite(grads))

    def _clip(self, grads: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        """Clip as `wrap_optimizer` was asked to; gives the norm too, where it is measured."""
        if not self._clips:
            return grads, None
        return gradients.clip(grads, self.max_grad_norm, self.max_grad_value)

    @property
    def _clips(self) -> bool:
        return self.max_grad_norm is not None or self.max_grad_value is not None

    def _apply_or_skip(
        self,
        member: Member,
        finite: Any,
        norm: Any,
        factor: Any,
        grads: Sequence[Any],
        variables: Any,
        leaves: Sequence[meter.Leaf],
    ) -> None:
        """Update where the gradients are finite; in a trace of one device this moves the loss scale, too."""
        ledger, group = self._ledger, member.group
        alone = ledger.moves_alone(group)

        def apply(grads: Sequence[Any]) -> None:
            self._apply(grads, variables)
            if alone:
                ledger.move(group, True, factor, norm)

        def skip() -> None:
            if alone:
                ledger.move(group, False, factor, norm)

        member.begin_change()  # nobody can tell how far an update came that raised; nothing may apply it again
        self._slots.pending.assign(0.0)
        # Native defect: a skipped step of tf_keras advances `iterations`, and schedules with it.
        if leaves:
            step, every = ledger.next_step(), ledger.contexts.host.meter_every
            self._traced_meter.choose(finite, step, every, factor, leaves, skip, partial(apply, grads))
        else:
            replicas.conditionally(finite, apply, grads, otherwise=skip)

    def _updated(self, variables: Any) -> Sequence[Any]:
        """Return the variables that a step updates."""
        return list(variables)

    @property
    def _accumulates(self) -> bool:
        """Whether not every step updates."""
        return False

    def ampx_culprits(self) -> tuple[str, ...]:
        """Return the names of variables with non-finite gradients, in a step that is made outside of functions."""
        return tuple(gradients.name(variable) for variable, _ in self._nonfinite[1]) if self._received[1] else ()

    def ampx_nonfinite(self) -> list[tuple[Any, int]]:
        """List the variables with non-finite gradients in the last step, and how many elements of these are.

        Raises:
            UnsupportedByBackendError: A function made it, after which the gradients are gone.
        """
        group = self._ledger.contexts.host
        group.resolve()
        step, rows = self._nonfinite
        if group.steps and step not in (group.steps, group.steps + 1):
            raise UnsupportedByBackendError(
                "nonfinite_parameters was called after a step in a function of TensorFlow, after which its gradients "
                "are gone; accepted: steps outside of functions. Call tf.config.run_functions_eagerly(True) before it, "
                "or compile the model with run_eagerly=True."
            )
        return rows

    def _list_nonfinite(self, member: Member) -> list[tuple[Any, int]]:
        """List each variable with non-finite gradients once, in a step that is made outside of functions."""
        rows = [*gradients.nonfinite(*self._received), *self._losses.nonfinite(member)]
        return list({id(variable): (variable, bad) for variable, bad in reversed(rows)}.values())[::-1]

    def _leaves(self, stage: str, variables: Any, received: Sequence[Any], true: Sequence[Any]) -> Sequence[meter.Leaf]:
        """List what the meter looks at in a trace, with gradients that the step holds anyway; () where it does not."""
        group = self._ledger.contexts.host
        if not group.meter_every or not self._ledger.moves_alone(group) or self._accumulates:
            return ()
        updated = [masters.of(variable) for variable in self._updated(variables)]
        # A third branch makes every small step some 1 % slower: only where it was asked for, or updates are lost.
        low = any(tf.as_dtype(variable.dtype).base_dtype in gradients.LOW for variable in updated)
        if not (group.meter_asked or low):
            return ()
        if len(updated) != len(true):  # of which the raw optimizer complains
            return ()
        scaled = stage != "unscaled"
        return meter.leaves(updated, received, true, scaled, divided=not scaled or self._divides(self.ampx_member))

    @cached_property
    def _meter(self) -> HostMeter:
        """The meter of steps outside of functions, which keeps what that of functions read, too."""
        return make_meter(self._compute or casting.compute_dtype(), _meter_samples)

    @cached_property
    def _traced_meter(self) -> meter.TracedMeter:
        """The meter of functions."""
        traced = meter.TracedMeter(self._compute or casting.compute_dtype(), self._meter)
        self._ledger.meters.append(traced)
        return traced

    def ampx_meter(self) -> Meter | None:
        """Return what the last metered update did. Sync: as `last_step`."""
        self._ledger.contexts.host.resolve()
        return self._meter.last()

    def _apply(self, grads: Sequence[Any], variables: Any) -> None:
        """Update with unscaled, finite gradients, casting off."""
        raise NotImplementedError

    def _build(self, variables: Any) -> None:
        """Make the raw optimizer's variables, outside of any trace."""
        raise NotImplementedError

    def _close(self, member: Member, finite: dict[int, Any], norm: Any, scale: Any) -> None:
        """Note the outcome by loss id and move the loss scales."""
        self._true.clear()
        self._divided.clear()
        self._losses.forget(member)
        member.finish(finite, norm, scale)

    def _close_empty(self, member: Member) -> None:
        """End a step without gradients: it counts for nothing."""
        self._clear()
        if on_host():
            member.finish_empty()
        else:
            member.forget()

    # -- the protocol ---------------------------------------------------------------------------------

    @cached_property
    def _true(self) -> dict[int, Any]:
        """The gradients that `get_unscaled_gradients` gave since the last step, by id."""
        return {}

    @cached_property
    def _divided(self) -> dict[int, Any]:
        """The gradients that `get_unscaled_gradients` got since the last step, by id."""
        return {}

    @cached_property
    def _losses(self) -> losses_by_id.LossesByPlace:
        """What keeps losses of several ids apart."""
        return losses_by_id.LossesByPlace(self._ledger, self._place)

    @property
    def _slots(self) -> Slots:
        return self._ledger.slots[self._place]

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
        elsewhere = self._ledger.contexts.elsewhere(self._place)
        return self._pends_here(self.ampx_member) or (bool(elsewhere) and self._ledger.waits(self._place))

    def ampx_assert_idle(self) -> list[Any]:
        """Return an operation that fails in a function where gradients wait when it runs."""
        if replicas.several():
            return []
        message = (
            "RawStepError: a raw optimizer was stepped while gradients of scale_loss are pending; they would be "
            "applied scaled or unchecked. Step what ampx.wrap_optimizer returned, or call its zero_grad to forget them."
        )
        return [tf.debugging.Assert(tf.convert_to_tensor(self._slots.pending) <= 0, [message])]

    def _pends_here(self, member: Member) -> bool:
        if not member.pending:
            return False
        return member.stage not in ("scaled", "unscaled") or not on_host() or self._ledger.waits(self._place)

    def ampx_catch_up(self) -> None:
        """Note that a function has made the step, or that one was interrupted, which a new loss makes good.

        Gradients are values: those of an interrupted step are gone, and nothing adds to them.
        """
        if self._caught_up().stage in ("changing", "interrupted"):
            self.zero_grad()

    def _caught_up(self) -> Member:
        """Return the member, after noting that a function has made the step."""
        member = self.ampx_member
        if member.pending and not self._pends_here(member):
            self._clear()
            member.forget()
        return member

    def zero_grad(self) -> None:
        """Forget the losses that were scaled since the last step: their gradients will not be applied."""
        self._clear()
        self.ampx_member.forget()

    def _clear(self) -> None:
        self._true.clear()
        self._divided.clear()
        self._losses.forget(self.ampx_member)
        self._slots.pending.assign(0.0)

    def ampx_before_backward(self, loss_id: int, scale: Any) -> None:
        """Have it seen whether the scaled loss is differentiated, until it was once.

        Raises:
            UnsupportedByBackendError: Losses of several ids are scaled on several replicas.
            ProtocolError: They are scaled in several functions.
        """
        member = self.ampx_member
        self._losses.begin(self, member, loss_id, scale)
        self._watch_derivative(member, scale)

    def _watch_derivative(self, member: Member, scale: Any) -> None:
        if self._divides(member) and not member.sees_backward:
            watch_derivative(scale)

    def ampx_after_backward(self, loss_id: int) -> None:
        """Keep the scale that gradients now carry in a variable: another function may step."""
        member = self.ampx_member
        if self._losses.end(member, loss_id):
            self._keep_factor(member.factor)
        if not on_host():
            member.drop_factors()  # a tensor of this trace; the variable tells it everywhere

    def ampx_abandon_backward(self, loss_id: int) -> None:
        """Forget what the gradients of a body were that raised."""
        self._losses.abandon(self.ampx_member)

    def _keep_factor(self, factor: Any) -> None:
        if factor is not self._ledger.given:
            self._shared_loss = True
            self._ledger.pin()
        self._slots.pending.assign(tf.convert_to_tensor(factor, tf.float32))

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
        self._losses.begin_without_body(member)
        factor = self._ledger.factor(member.group, 0) if member.factor is None else member.factor
        if watched:
            self._watch_derivative(member, factor)
        scaled = scale_loss(loss, factor)
        member.begin_change()
        self._keep_factor(factor)
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
            loss: Floating scalar tensor, or a function that gives one.

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
        factor = self._check_step(member)
        self._check_scaled("get_unscaled_gradients", grads)
        self._check_derivative(member, grads)
        true = gradients.unscale(self._widened(grads), factor)
        self._divided.update((id(gradient), gradient) for gradient in grads if gradient is not None)
        self._true.update((id(gradient), gradient) for gradient in true if gradient is not None)
        member.mixes = True  # the caller adds up unscaled gradients, if any
        member.note_unscaled(factor if member.stage == "idle" else None)  # idle: scaled in another function
        return true

    def _take_true(self) -> None:
        """Expect unscaled gradients in this step, of a loss that did not go through `scale_loss`."""
        member = self.ampx_member
        if not member.group.enabled:
            return
        factor = self._ledger.factor(member.group, 0)
        self._slots.pending.assign(factor)
        member.note_unscaled(factor)

    def ampx_carried(self) -> Any:
        """Return the scale that the gradients of this step carry."""
        return tf.convert_to_tensor(self._slots.pending)

    def ampx_owns(self, variable: Any) -> bool | None:
        """Return whether the optimizer updates a variable; None where it was not built yet."""
        return None

    def ampx_unscale(self) -> NoReturn:
        """Refuse: only `apply` sees the gradients."""
        refuse_values("unscale", "tensorflow", "apply")

    def ampx_clip_grad_norm(self, max_norm: float) -> NoReturn:
        """Refuse: only `apply` sees the gradients."""
        refuse_values("clip_grad_norm", "tensorflow", "apply")

    # -- saving ---------------------------------------------------------------------------------------

    def _find_other(self, name: str) -> Any:
        """Return the variable of a loss of another id than 0 that is saved under a name; None where it is not one's."""
        match = re.fullmatch(r"loss_(\d+)_(scale|counters)", name)
        return None if match is None else getattr(self._ledger.other(int(match[1])), match[2])

    # By these two, checkpoints of TensorFlow hold the scales of losses of other ids than 0.

    def _trackable_children(self, save_type: str = "checkpoint", **options: Any) -> dict[str, Any]:
        native: Any = super()
        children: dict[str, Any] = native._trackable_children(save_type, **options)
        if save_type == "checkpoint":
            for loss_id, (scale, counters) in self._ledger.others.items():
                children.update({f"loss_{loss_id}_scale": scale, f"loss_{loss_id}_counters": counters})
        return children

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        native: Any = super()
        variable = self._find_other(name)
        return native._lookup_dependency(name, cached_dependencies) if variable is None else variable

    # -- checks ---------------------------------------------------------------------------------------

    def _check_gradients(self, member: Member, grads: Sequence[Any]) -> None:
        """Raise for gradients that are true where they should carry the scale, or the other way round."""
        if member.stage != "unscaled":
            self._check_scaled("apply_gradients", grads)
            self._check_derivative(member, grads)
        elif any(id(gradient) in self._divided and id(gradient) not in self._true for gradient in grads):
            raise ProtocolError(
                "apply_gradients got gradients that carry the loss scale, after get_unscaled_gradients had made true "
                "ones of them; accepted: what it returned. Pass that."
            )

    def _check_derivative(self, member: Member, grads: Sequence[Any]) -> None:
        """Raise for gradients that come although nothing differentiated a scaled loss."""
        if self._divides(member) and any(gradient is not None for gradient in grads):
            member.check_backward(
                "`with ampx.scale_loss(loss, opt) as scaled: pass`, then tape.gradient(scaled, variables)"
            )

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

    def _check_scaled(self, call: str, grads: Sequence[Any]) -> None:
        """Raise for gradients that came out of `get_unscaled_gradients`: they would be divided twice."""
        if self._true and any(id(gradient) in self._true for gradient in grads):
            raise ProtocolError(
                f"{call} got gradients that came out of get_unscaled_gradients already, and would be divided by the "
                f"loss scale twice; accepted: gradients of the scaled loss. Call get_unscaled_gradients once for each, "
                f"then apply_gradients."
            )

    def _check_step(self, member: Member) -> Any:
        """Return the scale that the gradients carry; raise where they carry none, or it is not known which."""
        if member.stage != "idle" or not (elsewhere := self._ledger.contexts.elsewhere(self._place)):
            member.check_step(_WRITTEN)
            return tf.convert_to_tensor(self._slots.pending) if member.factor is None else member.factor
        # Another function scaled the loss: only the variable shows whether it ran.
        self._losses.check_step_here()
        if len(member.group.members) > 1:
            raise ProtocolError(
                "a loss of optimizers that share a loss scale was scaled in one function and stepped in another; "
                "accepted: both in one. Move them together, or wrap the optimizers one by one."
            )
        stages = {other.stage for other in elsewhere}
        if len(stages) > 1:
            raise ProtocolError(
                "one function left scaled gradients and another true ones of get_unscaled_gradients, and a third "
                "steps, which cannot tell them apart; accepted: one way. Call get_unscaled_gradients in every function "
                "that scales, or in none."
            )
        factor = tf.convert_to_tensor(self._slots.pending)
        if on_host():
            if not float(factor) > 0:
                member.check_step(_WRITTEN)
        else:
            message = (
                "NotScaledError: the gradients did not go through scale_loss since the last step; dividing them by the "
                "loss scale would shrink the update. Enter scale_loss in the function that computes the loss, and call "
                "that function before each step."
            )
            with tf.control_dependencies([tf.debugging.Assert(factor > 0, [message])]):
                factor = tf.identity(factor)
        if "unscaled" in stages:
            member.note_unscaled(factor)
        return factor

    def _check_metered(self, member: Member) -> None:
        """Raise where the meter was asked for, and it cannot look."""
        group = self._ledger.contexts.host
        if not (group.meter_asked and group.meter_every):
            return
        reasons = {
            "on several replicas, none of which has the sum of their gradients": replicas.several(),
            "and accumulates gradients, of which ampx sees only micro-batches": self._accumulates,
            "in a function with others that share its loss scale": not on_host() and len(member.group.members) > 1,
            "in a function with losses of several loss_ids": not on_host() and bool(self._ledger.others),
        }
        for reason, applies in reasons.items():
            if applies:
                raise UnsupportedByBackendError(
                    f"amp.meter_every is {group.meter_every}, and the optimizer steps {reason}; accepted: one replica, "
                    f"one optimizer with one loss scale of its own, and no gradient_accumulation_steps. Set "
                    f"amp.meter_every = 0 before wrap_optimizer."
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
        scale = self._ledger.scale
        variable = scale if isinstance(scale, tf.Variable) else getattr(scale, "value", scale)
        if not isinstance(variable, tf.distribute.DistributedValues):
            raise ProtocolError(
                "the optimizer was wrapped outside the scope of a strategy with several replicas, so that they would "
                "share one loss scale and each move it; accepted: wrapping inside `with strategy.scope():`. Call "
                "wrap_optimizer there."
            )


def _meter_samples(optimizer: LedgerOptimizer, slopes: bool) -> list[Sampled]:
    """Sample what the running step updates, and its gradients if `slopes`. Sync: one for each of them."""
    grads, updated = optimizer._received
    return gradients.meter_samples(grads, [masters.of(variable) for variable in updated], slopes)
