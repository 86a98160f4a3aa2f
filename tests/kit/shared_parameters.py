"""Scripts in which two optimizers hold one parameter, for frameworks whose gradients hang on the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol


class Trainees(Protocol):
    """Two optimizers over a parameter of their own and one that they share; plain ones, or wrapped."""

    opts: Sequence[Any]

    def loss(self, number: float = 1.0) -> Any: ...
    def own(self, index: int) -> Any: ...
    def backward(self, loss: Any, *which: int) -> None: ...
    def unscale(self, index: int) -> None: ...
    def clip(self, index: int, norm: float) -> None: ...
    def step(self, index: int) -> None: ...
    def zero_grad(self, *which: int) -> None: ...


def both_at_once(trainees: Trainees) -> None:
    trainees.backward(trainees.loss(), 0, 1)
    trainees.step(0)
    trainees.step(1)
    trainees.zero_grad()


def the_other_way_round(trainees: Trainees) -> None:
    trainees.backward(trainees.loss(), 0, 1)
    trainees.step(1)
    trainees.step(0)
    trainees.zero_grad()


def accumulated(trainees: Trainees) -> None:
    trainees.backward(trainees.loss(), 0, 1)
    trainees.backward(trainees.loss(3.0), 0, 1)
    trainees.step(0)
    trainees.step(1)
    trainees.zero_grad()


def a_loss_each(trainees: Trainees) -> None:
    trainees.backward(trainees.loss(), 0)
    trainees.backward(trainees.loss(3.0), 1)
    trainees.step(0)
    trainees.step(1)
    trainees.zero_grad()


def one_after_the_other(trainees: Trainees) -> None:
    for index in range(2):
        trainees.backward(trainees.loss(), index)
        trainees.step(index)
        trainees.zero_grad()


def unscaled_first(trainees: Trainees) -> None:
    trainees.backward(trainees.loss(), 0, 1)
    trainees.unscale(0)
    trainees.unscale(1)
    trainees.unscale(0)
    trainees.step(0)
    trainees.step(1)
    trainees.zero_grad()


def one_unscaled(trainees: Trainees) -> None:
    trainees.backward(trainees.loss(), 0, 1)
    trainees.unscale(1)
    trainees.step(0)
    trainees.step(1)
    trainees.zero_grad()


def clipped_before_the_other_steps(trainees: Trainees) -> None:
    trainees.backward(trainees.loss(), 0, 1)
    trainees.clip(0, 0.25)
    trainees.step(0)
    trainees.step(1)
    trainees.zero_grad()


def both_clipped(trainees: Trainees) -> None:
    trainees.backward(trainees.loss(), 0, 1)
    trainees.clip(0, 0.5)
    trainees.clip(1, 0.25)
    trainees.step(1)
    trainees.step(0)
    trainees.zero_grad()


def left_from_before(trainees: Trainees) -> None:
    trainees.backward(trainees.loss(), 0)
    trainees.step(0)  # nothing is cleared: its gradients count for the next loss
    trainees.backward(trainees.loss(3.0), 1)
    trainees.step(1)
    trainees.zero_grad()


def cleared_by_one(trainees: Trainees) -> None:
    trainees.backward(trainees.loss(), 0, 1)
    trainees.step(0)
    trainees.zero_grad(0)
    trainees.backward(trainees.loss(3.0), 0, 1)
    trainees.step(1)
    trainees.step(0)
    trainees.zero_grad()


def one_goes_on(trainees: Trainees) -> None:
    trainees.backward(trainees.loss(), 0, 1)
    trainees.step(0)
    trainees.backward(trainees.own(0), 0)  # of what is left it does not reach all
    trainees.step(1)


def both_go_on(trainees: Trainees) -> None:
    trainees.backward(trainees.loss(), 0, 1)
    trainees.step(0)
    trainees.backward(trainees.loss(), 0, 1)
    trainees.step(1)


def never_cleared(trainees: Trainees) -> None:
    for _ in range(2):
        trainees.backward(trainees.loss(), 0, 1)
        trainees.step(0)
        trainees.step(1)


def one_in_between(trainees: Trainees) -> None:
    trainees.backward(trainees.loss(), 0)
    trainees.step(0)
    trainees.backward(trainees.own(1), 1)
    trainees.backward(trainees.own(0), 0)
    trainees.step(1)


# What one has stepped with is brought to a loss scale again, and the other one knows it by another.
REFUSED: Final[Sequence[Callable[[Trainees], None]]] = (one_goes_on, both_go_on, never_cleared, one_in_between)
SCRIPTS: Final[Sequence[Callable[[Trainees], None]]] = (
    *(both_at_once, the_other_way_round, accumulated, a_loss_each, one_after_the_other, unscaled_first, one_unscaled),
    *(clipped_before_the_other_steps, both_clipped, left_from_before, cleared_by_one),
)
CLIPS: Final = (clipped_before_the_other_steps, both_clipped)
