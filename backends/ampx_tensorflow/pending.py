"""Gradients between `scale_loss` and the step: where some wait, which loss scale they carry, which are unscaled.

Gradients are values, so that nothing hangs on variables. A function may scale the loss and another step: the stage is
kept for each place where code runs, and the loss scale that gradients carry is in a variable, which all of them know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf

from ampx.errors import ProtocolError, UnsupportedByBackendError
from ampx.protocol import Member
from ampx.scale_state import is_one

from . import gradients, replicas
from .contexts import on_host
from .device_scale import VariableLedger
from .losses_by_id import LossesByPlace

# Stages before a step.
_WRITTEN: Final = (
    "Inside the tape write `with ampx.scale_loss(loss, opt) as scaled: pass`, or in a train_step of yours `scaled = "
    "self.optimizer.scale_loss(loss)`, and differentiate that: tape.gradient(scaled, variables)."
)


class PendingGradients:
    """What is known of the gradients that wait for the step of one optimizer.

    Attributes:
        losses: What keeps losses of several ids apart.
    """

    def __init__(self, ledger: VariableLedger, place: int) -> None:
        self.losses: Final = LossesByPlace(ledger, place)
        self._ledger, self._place = ledger, place
        # One backward of optimizers with several scales takes the smallest, which need not be this one's.
        self._shares_loss = False
        # Since the last step, by id: the gradients that `get_unscaled_gradients` got, and those that it returned.
        self._divided: dict[int, Any] = {}
        self._unscaled: dict[int, Any] = {}

    def carried(self) -> Any:
        """Return the scale that gradients carry, as the variable has it."""
        return tf.convert_to_tensor(self._ledger.slots[self._place].pending)

    def carry(self, scale: Any) -> None:
        """Keep the scale that gradients now carry: another function may step."""
        if scale is not self._ledger.last_factor:
            self._shares_loss = True
            self._ledger.pin()
        self._ledger.slots[self._place].pending.assign(tf.convert_to_tensor(scale, tf.float32))

    def divides(self, member: Member) -> bool:
        """Return whether gradients carry a scale that is not always 1."""
        return self._shares_loss or not is_one(member.group.config)

    def wait_here(self, member: Member) -> bool:
        """Return whether gradients wait in the member's place; another may have stepped. Sync: one, on the host."""
        if not member.pending:
            return False
        return member.stage not in ("scaled", "unscaled") or not on_host() or self._ledger.waits(self._place)

    def wait(self, member: Member) -> bool:
        """Return whether gradients wait in some place, as far as this one can tell. Sync: likewise."""
        elsewhere = self._ledger.contexts.elsewhere(self._place)
        return self.wait_here(member) or (bool(elsewhere) and self._ledger.waits(self._place))

    def assert_none(self) -> list[Any]:
        """Return an operation that fails in a function where gradients wait when it runs."""
        if replicas.several():
            return []
        message = (
            "RawStepError: a raw optimizer was stepped while gradients of scale_loss are pending; they would be "
            "applied scaled or unchecked. Step what ampx.wrap_optimizer returned, or call its zero_grad to forget them."
        )
        return [tf.debugging.Assert(self.carried() <= 0, [message])]

    def note_unscaled(self, divided: Sequence[Any], unscaled: Sequence[Any]) -> None:
        """Note what `get_unscaled_gradients` got, and what it returns."""
        self._divided.update((id(gradient), gradient) for gradient in divided if gradient is not None)
        self._unscaled.update((id(gradient), gradient) for gradient in unscaled if gradient is not None)

    def forget(self, member: Member) -> None:
        """Forget them: they are used, or not wanted."""
        self._divided.clear()
        self._unscaled.clear()
        self.losses.forget(member)
        self._ledger.slots[self._place].pending.assign(0.0)

    # -- checks ---------------------------------------------------------------------------------------

    def check_step(self, member: Member) -> Any:
        """Return the scale that the gradients carry; raise where they carry none, or it is not known which."""
        if member.stage != "idle" or not (elsewhere := self._ledger.contexts.elsewhere(self._place)):
            member.check_step(_WRITTEN)
            return self.carried() if member.factor is None else member.factor
        # Another function scaled the loss: only the variable shows whether it ran.
        self.losses.check_step_here()
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
        scale = self.carried()
        if on_host():
            if not float(scale) > 0:
                member.check_step(_WRITTEN)
        else:
            message = (
                "NotScaledError: the gradients did not go through scale_loss since the last step; dividing them by the "
                "loss scale would shrink the update. Enter scale_loss in the function that computes the loss, and call "
                "that function before each step."
            )
            with tf.control_dependencies([tf.debugging.Assert(scale > 0, [message])]):
                scale = tf.identity(scale)
        if "unscaled" in stages:
            member.note_unscaled(scale)
        return scale

    def check(self, member: Member, grads: Sequence[Any]) -> None:
        """Raise for gradients that are unscaled where they should carry the scale, or the other way round."""
        if member.stage != "unscaled":
            self.check_scaled(member, "apply_gradients", grads)
        elif any(id(gradient) in self._divided and id(gradient) not in self._unscaled for gradient in grads):
            raise ProtocolError(
                "apply_gradients got gradients that carry the loss scale, after get_unscaled_gradients had made true "
                "ones of them; accepted: what it returned. Pass that."
            )

    def check_scaled(self, member: Member, call: str, grads: Sequence[Any]) -> None:
        """Raise for gradients that are unscaled already, or that come although nothing differentiated a scaled loss."""
        if self._unscaled and any(id(gradient) in self._unscaled for gradient in grads):
            raise ProtocolError(
                f"{call} got gradients that came out of get_unscaled_gradients already, and would be divided by the "
                f"loss scale twice; accepted: gradients of the scaled loss. Call get_unscaled_gradients once for each, "
                f"then apply_gradients."
            )
        if self.divides(member) and any(gradient is not None for gradient in grads):
            member.check_backward(
                "`with ampx.scale_loss(loss, opt) as scaled: pass`, then tape.gradient(scaled, variables)"
            )


class ReceivedGradients:
    """The gradients of the step that is made outside of functions, for who looks on, and what is wrong with them."""

    def __init__(self) -> None:
        self.grads: Sequence[Any] = ()  # what the step was passed; () outside of such a step
        self.variables: Sequence[Any] = ()  # what it updates
        # Of the last such step: its number, and its variables with non-finite gradients.
        self._step = 0
        self._nonfinite: list[tuple[Any, int]] = []

    def list_nonfinite(self) -> list[tuple[Any, int]]:
        """List the variables with non-finite gradients, and how many elements of these are. Sync: one a gradient."""
        return gradients.nonfinite(self.grads, self.variables)

    def note_nonfinite(self, step: int, rows: Sequence[tuple[Any, int]]) -> None:
        """Note the variables with non-finite gradients in a step, and how many elements of these are."""
        self._step = step
        self._nonfinite = list({id(variable): (variable, bad) for variable, bad in reversed(rows)}.values())[::-1]

    def culprits(self) -> tuple[str, ...]:
        """Return the names of variables with non-finite gradients in the step that is made."""
        return tuple(gradients.name(variable) for variable, _ in self._nonfinite) if self.variables else ()

    def nonfinite(self, steps: int) -> list[tuple[Any, int]]:
        """List the variables with non-finite gradients in the last of so many steps.

        Raises:
            UnsupportedByBackendError: A function made it, after which the gradients are gone.
        """
        if steps and self._step not in (steps, steps + 1):
            raise UnsupportedByBackendError(
                "nonfinite_parameters was called after a step in a function of TensorFlow, after which its gradients "
                "are gone; accepted: steps outside of functions. Call tf.config.run_functions_eagerly(True) before it, "
                "or compile the model with run_eagerly=True."
            )
        return self._nonfinite

    def release(self) -> None:
        """Let go of them: the step is over."""
        self.grads = self.variables = ()
