"""An optimizer, because autograd has whole training loops and no optimizer that makes one step."""

from collections.abc import Sequence

import numpy as np


class SGD:
    """Gradient descent with momentum; changes a list of arrays in place."""

    def __init__(self, parameters: Sequence[np.ndarray], learning_rate: float, momentum: float = 0.0) -> None:
        self.parameters = list(parameters)
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.velocities = [np.zeros_like(parameter) for parameter in self.parameters]

    def step(self, gradients: Sequence[np.ndarray]) -> None:
        """Move every parameter against its gradient."""
        for parameter, velocity, gradient in zip(self.parameters, self.velocities, gradients, strict=True):
            velocity[...] = self.momentum * velocity + gradient
            parameter[...] -= self.learning_rate * velocity
