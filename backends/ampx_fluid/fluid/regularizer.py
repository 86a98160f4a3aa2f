"""`fluid.regularizer`: Paddle's, by fluid's name of the coefficient."""

from __future__ import annotations

import paddle

from .missing import refuse_missing

__all__ = ["L1Decay", "L1DecayRegularizer", "L2Decay", "L2DecayRegularizer"]


class L1Decay(paddle.regularizer.L1Decay):
    """Adds the sum of absolute values, times a coefficient, to the loss."""

    def __init__(self, regularization_coeff: float = 0.0) -> None:
        super().__init__(regularization_coeff)


class L2Decay(paddle.regularizer.L2Decay):
    """Adds half the sum of squares, times a coefficient, to the loss."""

    def __init__(self, regularization_coeff: float = 0.0) -> None:
        super().__init__(regularization_coeff)


L1DecayRegularizer, L2DecayRegularizer = L1Decay, L2Decay

__getattr__ = refuse_missing(__name__)
