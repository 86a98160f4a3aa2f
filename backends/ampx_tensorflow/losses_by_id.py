"""Several losses with loss scales of their own on one optimizer.

Gradients are values here, and the step gets the sum of all, which carries one loss scale: that of the first loss of the
step. So `scaled.gradient` brings the gradients of every other loss to it, and keeps whether they were finite until the
step; those that were not come as zeros, so that the sum tells about the first loss alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import tensorflow as tf

from ampx.errors import ProtocolError, UnsupportedByBackendError
from ampx.protocol import Member

from . import gradients, replicas
from .contexts import on_host
from .device_scale import VariableLedger

_SEVERAL_FUNCTIONS: Final = (
    "losses of several loss_ids of one step are scaled or stepped in several functions (here: {}), and only the one "
    "that scaled a loss knows whether its gradients are finite; accepted: all of a step in one function, or outside of "
    "functions. Move them together."
)


class Owner(Protocol):
    """What is asked of an optimizer."""

    def ampx_owns(self, variable: Any) -> bool | None:
        """Return whether it updates a variable; None where it was not built yet."""


class LossesByPlace:
    """The losses of one optimizer, kept apart in each place: the host, and every trace.

    There is nothing to keep until there is another id than 0.
    """

    def __init__(self, ledger: VariableLedger, place: int) -> None:
        self._ledger = ledger
        self._place = place  # the optimizer's in the ledger
        self._mixers: weakref.WeakKeyDictionary[Member, LossMixer] = weakref.WeakKeyDictionary()

    def begin(self, optimizer: Owner, member: Member, loss_id: int, scale: Any) -> None:
        """Have a loss that is not the first of its step brought to the scale of the first.

        Raises:
            UnsupportedByBackendError: Another id than 0 on several replicas.
            ProtocolError: The step began in another function.
        """
        if not (loss_id or self._mixers):
            return
        if loss_id and replicas.several():
            raise UnsupportedByBackendError(
                f"scale_loss got loss_id={loss_id} on several replicas of a strategy, whose variables for another loss "
                f"scale TensorFlow does not make there; accepted: 0. Leave loss_id out, or train on one replica."
            )
        mixer = self._mixers.get(member)
        if mixer is None:  # until now, all losses were of id 0
            mixer = self._mixers[member] = LossMixer(None if member.stage == "idle" else 0)
        if mixer.first is None:
            self._check_nothing_waits(loss_id)
        mixer.begin(loss_id)
        attach(scale, Bringer(optimizer, self._ledger.slots[self._place].pending, mixer, loss_id))

    def begin_without_body(self, member: Member) -> None:
        """Note a loss of id 0 whose gradients are not rescaled.

        Raises:
            ProtocolError: It is not the first loss of its step.
        """
        mixer = self._mixers.get(member)
        if mixer is None:
            return
        if mixer.first is None:
            mixer.first = 0
        if mixer.first:
            raise ProtocolError(
                f"optimizer.scale_loss was called after scale_loss with loss_id={mixer.first}, whose loss scale the "
                f"gradients of this step carry; accepted: a loss of id 0 first. Call ampx.scale_loss and "
                f"scaled.gradient instead, or change the order."
            )

    def end(self, member: Member, loss_id: int) -> bool:
        """Note that a body ended; return whether the step's gradients carry the scale of its loss."""
        mixer = self._mixers.get(member)
        if mixer is None:
            return True
        if mixer.first is None:
            mixer.first = loss_id
            if loss_id:
                self._ledger.foreign.add(member)
        return not mixer.others

    def abandon(self, member: Member) -> None:
        """Forget what the body found, because it raised."""
        mixer = self._mixers.get(member)
        if mixer is not None:
            mixer.abandon()

    def forget(self, member: Member) -> None:
        """Begin the next step."""
        mixer = self._mixers.get(member)
        if mixer is not None:
            mixer.reset()
            self._ledger.foreign.discard(member)

    def finite(self, member: Member, finite: Any, factor: Any) -> tuple[dict[int, Any], Any]:
        """Return by loss id whether its gradients are finite, and the scale of the lowest id.

        Args:
            member: The optimizer's place in the protocol.
            finite: Whether the sum of all gradients is, where those of other losses than the first are zeros if they
                are not finite.
            factor: The loss scale that they carry.
        """
        mixer = self._mixers.get(member)
        if mixer is None:
            return {0: finite}, factor
        first = mixer.first or 0  # None: scaled in another function, where all were of id 0
        by_loss = {first: finite, **mixer.finite()}
        lowest = min(by_loss)
        return by_loss, factor if lowest == first else mixer.others[lowest].scale

    def nonfinite(self, member: Member) -> list[tuple[Any, int]]:
        """List, on the host, the variables with non-finite gradients of other losses than the first."""
        mixer = self._mixers.get(member)
        return [] if mixer is None else [row for other in mixer.others.values() for row in other.rows]

    def check_step_here(self) -> None:
        """Raise where a step ends in another function than those that scaled losses with scales of their own."""
        if self._left_elsewhere():
            raise ProtocolError(_SEVERAL_FUNCTIONS.format("a step"))

    def _check_nothing_waits(self, loss_id: int) -> None:
        """Raise where a step begins while gradients of another function wait, which carry another scale, perhaps."""
        if not (loss_id and self._ledger.contexts.elsewhere(self._place)) and not self._left_elsewhere():
            return
        message = _SEVERAL_FUNCTIONS.format(f"loss_id={loss_id}")
        if not on_host():
            nothing = tf.convert_to_tensor(self._ledger.slots[self._place].pending) <= 0
            tf.debugging.Assert(nothing, [f"ProtocolError: {message}"])
        elif self._ledger.waits(self._place):
            raise ProtocolError(message)

    def _left_elsewhere(self) -> bool:
        """Return whether a function left gradients of losses of several ids, or of another id than 0."""
        if not self._mixers:
            return False
        elsewhere = self._ledger.contexts.elsewhere(self._place)
        mixers = [self._mixers[other] for other in elsewhere if other in self._mixers]
        return any(mixer.first or mixer.others for mixer in mixers)


class LossMixer:
    """What the losses of a step found, for one optimizer in one place: the host, or a trace."""

    def __init__(self, first: int | None) -> None:
        """Begin in a step whose first loss had this id; None before its first."""
        self.first = first
        self.steps = 0  # how many were closed
        self.others: dict[int, _Other] = {}  # what is known of the losses after the first, by id
        self._kept = dict(self.others)

    def begin(self, loss_id: int) -> None:
        """Note that a body begins."""
        self._kept = dict(self.others)
        if self.first not in (None, loss_id):
            self.others.setdefault(loss_id, _Other())

    def abandon(self) -> None:
        """Forget what the body found, because it raised."""
        self.others = self._kept

    def note(self, loss_id: int, scale: Any, finite: Any, rows: Sequence[tuple[Any, int]]) -> None:
        """Note what the gradients of another loss than the first were; `rows` as `gradients.nonfinite` lists them."""
        before = self.others[loss_id]
        both = finite if before.finite is None else tf.logical_and(before.finite, finite)
        self.others[loss_id] = _Other(scale, both, (*before.rows, *rows))

    def finite(self) -> dict[int, Any]:
        """Return by id whether the gradients of the other losses are finite, of those that were differentiated."""
        return {loss_id: other.finite for loss_id, other in self.others.items() if other.finite is not None}

    def reset(self) -> None:
        """Begin the next step."""
        self.first, self.steps, self.others = None, self.steps + 1, {}


class _Other(NamedTuple):
    scale: Any = None  # the loss scale that its gradients carried
    finite: Any = None  # whether they are finite; None while there are none
    rows: tuple[tuple[Any, int], ...] = ()  # on the host: variables, and how many elements of their gradients are not


class Bringer:
    """Brings the gradients of one scaled loss to the loss scale that an optimizer's gradients carry."""

    def __init__(self, optimizer: Owner, carried: Any, mixer: LossMixer, loss_id: int) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._carried = carried  # the variable of the scale that its gradients carry
        self._mixer = mixer
        self._step = mixer.steps
        self._loss_id = loss_id
        # The first loss of a step brings its scale with it.
        self.changes = mixer.first not in (None, loss_id)

    @property
    def optimizer(self) -> Owner | None:
        """The optimizer of these gradients; None once it is gone."""
        return self._optimizer()

    def owns(self, variable: Any) -> bool | None:
        """Return whether the optimizer updates a variable; None where that is not known."""
        return False if self.optimizer is None else self.optimizer.ampx_owns(variable)

    def bring(self, grads: Sequence[Any], variables: Sequence[Any], scale: Any) -> Sequence[Any]:
        """Return gradients that carry the optimizer's scale and not this one; zeros where one is not finite.

        Raises:
            ProtocolError: The step came since the loss was scaled.
            UnsupportedByBackendError: Gradients are float16, which cannot be brought to another scale exactly.
        """
        if not self.changes:
            return grads
        mixer = self._mixer
        if self.optimizer is None or mixer.steps != self._step:
            raise ProtocolError(
                f"scaled.gradient was called for a loss of loss_id={self._loss_id} after the step that it was scaled "
                f"for (or after zero_grad); accepted: before it. Call scale_loss again."
            )
        if any(gradient is not None and gradient.dtype == tf.float16 for gradient in grads):
            raise UnsupportedByBackendError(
                f"scaled.gradient got float16 variables for a loss of loss_id={self._loss_id}, whose gradients would "
                f"lose digits when they are brought to the loss scale of the step's first loss; accepted: float32 or "
                f"bfloat16 variables. Leave loss_id out, or use level='O1'."
            )
        true = gradients.unscale(grads, scale)
        finite = gradients.finite(true)
        rows = gradients.nonfinite(true, variables) if on_host() and not bool(finite) else ()
        mixer.note(self._loss_id, scale, finite, rows)
        # Not multiplied: see `gradients.unscale`.
        brought = gradients.unscale(true, 1.0 / tf.convert_to_tensor(self._carried))
        return gradients.each(lambda values: tf.where(finite, values, tf.zeros_like(values)), brought)


_ATTRIBUTE: Final = "ampx_bringers"  # of the tensor of a loss scale


def attach(scale: Any, bringer: Bringer) -> None:
    """Have the gradients of losses that are multiplied by a scale's tensor brought to another."""
    others = [other for other in attached(scale) if other.optimizer is not bringer.optimizer]
    setattr(scale, _ATTRIBUTE, [*others, bringer])


def attached(scale: Any) -> list[Bringer]:
    """List what was attached to a scale's tensor."""
    bringers: list[Bringer] = getattr(scale, _ATTRIBUTE, [])
    return bringers


def bring(bringers: Sequence[Bringer], result: Any, variables: Any, scale: Any) -> Any:
    """Bring gradients to the scales that those of their optimizers carry.

    Args:
        bringers: One for each optimizer that the loss was scaled for.
        result: The gradients, in the structure of the variables.
        variables: What they are gradients of.
        scale: The loss scale that they carry.

    Raises:
        ProtocolError: The loss was scaled for several optimizers, and nobody knows which one updates a variable.
    """
    grads, flat = tf.nest.flatten(result), tf.nest.flatten(variables)
    owners = [_owner(bringers, variable) for variable in flat]
    for bringer in bringers:
        places = [place for place, owner in enumerate(owners) if owner is bringer]
        if places:
            mine = [grads[place] for place in places]
            brought = bringer.bring(mine, [flat[place] for place in places], scale)
            for place, gradient in zip(places, brought, strict=True):
                grads[place] = gradient
    return tf.nest.pack_sequence_as(result, grads)


def _owner(bringers: Sequence[Bringer], variable: Any) -> Bringer | None:
    unknown = []
    for bringer in bringers:
        owns = bringer.owns(variable)
        if owns:
            return bringer
        if owns is None:
            unknown.append(bringer)
    if len(unknown) > 1:
        raise ProtocolError(
            f"scaled.gradient got the variable {gradients.name(variable)} and a loss that was scaled for "
            f"{len(bringers)} optimizers, of which {len(unknown)} do not know yet what they update; accepted: built "
            f"optimizers. Call optimizer.build(variables) for each before the first step."
        )
    return unknown[0] if unknown else None
