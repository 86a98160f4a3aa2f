"""Losses, and how good a prediction is."""

from __future__ import annotations

from typing import Any

import paddle
from paddle.nn import functional

__all__ = [
    "accuracy",
    "cross_entropy",
    "sigmoid_cross_entropy_with_logits",
    "softmax_with_cross_entropy",
    "square_error_cost",
]


def cross_entropy(input: Any, label: Any, soft_label: bool = False, ignore_index: int = -100) -> Any:
    """Return -log of the probability of the right class.

    Args:
        input: Probabilities of shape (N, classes), after a softmax.
        label: Class numbers of shape (N, 1), or probabilities if `soft_label`.
        soft_label: See `label`.
        ignore_index: Class number that counts nothing.

    Returns:
        A tensor of shape (N, 1).
    """
    options = {"soft_label": soft_label, "ignore_index": ignore_index, "use_softmax": False, "reduction": "none"}
    return functional.cross_entropy(input, label, **options)


def softmax_with_cross_entropy(
    logits: Any,
    label: Any,
    soft_label: bool = False,
    ignore_index: int = -100,
    numeric_stable_mode: bool = True,
    return_softmax: bool = False,
    axis: int = -1,
) -> Any:
    """Return the cross entropy of the softmax, of shape (N, 1); with `return_softmax` the probabilities, too."""
    loss = functional.cross_entropy(
        logits, label, soft_label=soft_label, ignore_index=ignore_index, reduction="none", axis=axis
    )
    return (loss, functional.softmax(logits, axis)) if return_softmax else loss


def sigmoid_cross_entropy_with_logits(
    x: Any, label: Any, ignore_index: int = -100, name: str | None = None, normalize: bool = False
) -> Any:
    """Return the cross entropy of the sigmoid, element by element.

    Args:
        x: Logits.
        label: Probabilities of the same shape.
        ignore_index: Label that counts nothing.
        name: Not looked at.
        normalize: Divide by how many labels count.
    """
    loss = functional.binary_cross_entropy_with_logits(x, label, reduction="none")
    counts = (label != ignore_index).astype("float32")
    loss = loss * counts
    return loss / counts.sum() if normalize else loss


def square_error_cost(input: Any, label: Any) -> Any:
    """Return the squared difference, element by element."""
    return paddle.square(input - label)


def accuracy(input: Any, label: Any, k: int = 1, correct: Any = None, total: Any = None) -> Any:
    """Return the share of right predictions among the best k, of shape (1,).

    Args:
        input: Scores of shape (N, classes).
        label: Class numbers of shape (N, 1).
        k: How many predictions count.
        correct: Receives nothing; accepted as None.
        total: Receives nothing; accepted as None.
    """
    return paddle.reshape(paddle.static.accuracy(input, label, k), [1])
