"""Look at a loss and scale it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from ampx.backend import LossInfo
from ampx.errors import AlreadyScaledError, LossDtypeError, ProtocolError

from . import losses_by_id


def inspect_loss(loss: Any, check_nan: bool | None) -> LossInfo:
    """Return what `scale_loss` has to know about a loss; whether a traced one is NaN cannot be known.

    Sync: none unless `check_nan` is True and the loss is on an accelerator.
    """
    if isinstance(loss, tf.Variable) or not tf.is_tensor(loss) or not isinstance(loss, tf.Tensor):
        raise LossDtypeError(
            f"scale_loss got a loss of type {type(loss).__name__}; accepted: a TensorFlow tensor. Pass the tensor that "
            f"the loss function returned, not a number."
        )
    elements = loss.shape.num_elements()  # None in traced code, perhaps
    floating, nan = bool(loss.dtype.is_floating), None
    readable = hasattr(loss, "numpy") and check_nan is not False and floating
    if readable and (check_nan or "CPU" in loss.device):
        nan = bool(tf.reduce_any(tf.math.is_nan(loss)))
    return LossInfo(1 if elements is None else elements, loss.dtype.name, floating, True, nan)


class ScaledGradient:
    """What a scaled loss has as `gradient`: differentiates it wherever it was scaled, inside the tape or outside."""

    def __init__(self, loss: Any, scale: Any) -> None:
        """Take the loss as it was, on the tape, and the scale as a float32 scalar tensor."""
        self.loss = loss
        self.scale = scale
        # Of optimizers whose gradients carry the scale of another loss.
        self._bringers = losses_by_id.attached(scale)
        self._brings = any(bringer.changes for bringer in self._bringers)
        self._traced = not tf.executing_eagerly()
        # In a trace the product alone consumes this tensor, until its derivative does, too.
        self._factor = tf.identity(scale) if self._traced else scale
        self._watched = getattr(scale, "ampx_watched", False)
        self._taken = False

    def __call__(self, tape: tf.GradientTape, variables: Any, **options: Any) -> Any:
        """Return the scaled gradients; `options` are those of `tape.gradient`."""
        if self.loss.dtype == tf.float16:
            raise LossDtypeError(
                "scaled.gradient got a loss of dtype float16, where the loss scale would become inf; accepted: a "
                "float32 or bfloat16 loss. Cast the loss to float32 inside the tape, or enter scale_loss inside the "
                "tape and call tape.gradient(scaled, variables)."
            )
        self._taken = True
        grads = tape.gradient(
            self.loss,
            variables,
            output_gradients=tf.fill(tf.shape(self.loss), tf.cast(self.scale, self.loss.dtype)),
            **options,
        )
        return losses_by_id.bring(self._bringers, grads, variables, self.scale) if self._brings else grads

    def product(self) -> Any:
        """Return the loss in float32 times the scale."""
        loss = tf.cast(self.loss, tf.float32)
        if self._brings:
            return _opaque(loss, self._factor)
        if self._traced or not self._watched:
            return loss * self._factor

        @tf.custom_gradient
        def watched(loss: Any) -> Any:
            def derivative(upstream: Any) -> Any:
                self._taken = True
                return upstream * self.scale

            return loss * self.scale, derivative

        return watched(loss)

    def was_taken(self) -> bool | None:
        """Return whether something differentiated the product; None where it was not watched."""
        if self._taken or self._brings:
            return self._taken
        if not (self._traced or self._watched):
            return None
        return self._traced and len(self._factor.consumers()) > 1


@tf.custom_gradient
def _opaque(loss: Any, scale: Any) -> Any:
    """Return a product that must not be differentiated: its gradients would carry another scale than the step's."""

    def derivative(upstream: Any) -> Any:
        raise ProtocolError(
            "tape.gradient got a scaled loss of another loss_id than the first of this step, whose gradients carry "
            "another loss scale; accepted: scaled.gradient(tape, variables), which brings them to the first one's. "
            "Call that for each of these losses, and add up what it returns."
        )

    return loss * scale, derivative


def check_not_scaled(loss: Any, call: str) -> None:
    """Raise for a loss that came out of `scale_loss`."""
    if isinstance(getattr(loss, "gradient", None), ScaledGradient):
        raise AlreadyScaledError(
            f"{call} got a loss that is scaled already; its gradients would be scaled twice. Pass the loss that your "
            f"loss function returned."
        )


def is_computed(loss: Any) -> bool:
    """Return whether a loss may be differentiated: a tape records it, or the function that is traced computed it.

    Other losses stand for gradients that are computed by hand. Outside of functions nothing says so of a loss whose
    tape has ended.
    """
    if not tf.is_tensor(loss):
        return False
    if tf.executing_eagerly():
        return bool(record.should_record_backprop([loss]))
    return loss.op.type not in ("Const", "Placeholder")


def watch_derivative(scale: Any) -> None:
    """Have products with a scale see whether they are differentiated, outside of traces; in traces all do.

    Such a product takes a fifth of a millisecond longer.
    """
    if tf.executing_eagerly():
        scale.ampx_watched = True


def watch_backward(loss: Any, scaled: Any) -> Callable[[], bool | None]:
    """Return a function that returns whether `scaled` was differentiated; other gradients are those of `loss`."""
    answer: Callable[[], bool | None] = scaled.gradient.was_taken
    return answer


def scale_loss(loss: Any, scale: Any) -> Any:
    """Return the loss in float32 times the scale, with a `gradient` of its own (`ScaledGradient`).

    Native defect: Keras multiplies in the loss's own dtype, where a float16 loss becomes inf.
    """
    gradient = ScaledGradient(loss, scale)
    scaled = gradient.product()
    scaled.gradient = gradient
    return scaled
