"""Look at a loss and scale it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from ampx.backend import LossInfo
from ampx.errors import LossDtypeError


def inspect_loss(loss: Any, check_nan: bool | None) -> LossInfo:
    """Return what `scale_loss` has to know about a loss; whether a traced one is NaN cannot be known.

    Sync: none unless `check_nan` is True and the loss is on an accelerator.
    """
    if isinstance(loss, tf.Variable) or not tf.is_tensor(loss) or not isinstance(loss, tf.Tensor):
        raise LossDtypeError(
            f"scale_loss got a loss of type {type(loss).__name__}; accepted: a TensorFlow tensor. Pass the tensor that "
            f"the loss function returned, not a number."
        )
    # A loss of unknown shape inside traced code may well be a scalar.
    elements = loss.shape.num_elements()
    floating, nan = bool(loss.dtype.is_floating), None
    readable = hasattr(loss, "numpy") and check_nan is not False and elements == 1 and floating
    if readable and (check_nan or "CPU" in loss.device):
        nan = bool(tf.reduce_all(tf.math.is_nan(loss)))
    return LossInfo(1 if elements is None else elements, loss.dtype.name, floating, True, nan)


@dataclass(frozen=True)
class ScaledGradient:
    """What a scaled loss has as `gradient`: differentiates it wherever it was scaled, inside the tape or outside."""

    loss: Any  # the loss as it was, on the tape
    scale: Any

    def __call__(self, tape: tf.GradientTape, variables: Any, **options: Any) -> Any:
        """Return the scaled gradients; `options` are those of `tape.gradient`."""
        if self.loss.dtype == tf.float16:
            raise LossDtypeError(
                "scaled.gradient got a loss of dtype float16, where the loss scale would become inf; accepted: a "
                "float32 or bfloat16 loss. Cast the loss to float32 inside the tape, or enter scale_loss inside the "
                "tape and call tape.gradient(scaled, variables)."
            )
        return tape.gradient(
            self.loss,
            variables,
            output_gradients=tf.fill(self.loss.shape, tf.cast(self.scale, self.loss.dtype)),
            **options,
        )


def scale_loss(loss: Any, scale: Any) -> Any:
    """Return the loss in float32 times the scale, with a `gradient` of its own (`ScaledGradient`).

    Native defect: Keras multiplies in the loss's own dtype, where a float16 loss becomes inf.
    """
    scaled = tf.cast(loss, tf.float32) * scale
    scaled.gradient = ScaledGradient(loss, scale)
    return scaled
