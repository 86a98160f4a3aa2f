"""Learning rates that change with the steps: in fluid they were part of the program, here the executor moves them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import paddle

__all__ = ["cosine_decay", "exponential_decay", "noam_decay", "piecewise_decay", "polynomial_decay"]


class Schedule(paddle.optimizer.lr.LRScheduler):
    """A learning rate by the number of steps so far; `Executor.run` counts."""

    def __init__(self, rate: Callable[[int], float]) -> None:
        """Take a function of the number of steps."""
        self._rate = rate
        super().__init__(rate(0))

    def get_lr(self) -> float:
        """Return the present learning rate."""
        return self._rate(self.last_epoch)


def piecewise_decay(boundaries: Sequence[int], values: Sequence[float]) -> Schedule:
    """Return one value before each boundary, and the last one after all."""

    def rate(step: int) -> float:
        return next((value for bound, value in zip(boundaries, values, strict=False) if step < bound), values[-1])

    return Schedule(rate)


def exponential_decay(learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False) -> Schedule:
    """Multiply by `decay_rate` every `decay_steps`, in steps if `staircase`."""

    def rate(step: int) -> float:
        times = step / decay_steps
        return float(learning_rate * decay_rate ** (math.floor(times) if staircase else times))

    return Schedule(rate)


def polynomial_decay(
    learning_rate: float, decay_steps: int, end_learning_rate: float = 0.0001, power: float = 1.0, cycle: bool = False
) -> Schedule:
    """Go to `end_learning_rate` within `decay_steps`; over and over, longer each time, if `cycle`."""

    def rate(step: int) -> float:
        length = decay_steps * max(1, math.ceil(step / decay_steps)) if cycle else decay_steps
        left = 1 - min(step, length) / length
        return float((learning_rate - end_learning_rate) * left**power + end_learning_rate)

    return Schedule(rate)


def cosine_decay(learning_rate: float, step_each_epoch: int, epochs: int) -> Schedule:
    """Follow half a cosine over the epochs."""

    def rate(step: int) -> float:
        return learning_rate * 0.5 * (math.cos(step // step_each_epoch * math.pi / epochs) + 1)

    return Schedule(rate)


def noam_decay(d_model: float, warmup_steps: int, learning_rate: float = 1.0) -> Schedule:
    """Warm up, then fall with the root of the number of steps, as for transformers."""

    def rate(step: int) -> float:
        now = step + 1
        return float(learning_rate * d_model**-0.5 * min(now**-0.5, warmup_steps**-1.5 * now))

    return Schedule(rate)
