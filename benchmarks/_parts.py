"""Where the time of one small training step goes, part by part: ampx beside the recipe by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import _paired

import ampx

Lap = Callable[[str], None]
"""Called at the end of a part with its name; parts of one name are added up."""
Times = dict[str, float]
FASTEST = 20
"""Of so many times the fastest counts: a step without what the rest of the machine adds to it."""


class Training(NamedTuple):
    """What a step of either side trains with.

    Attributes:
        loss: Computes the loss.
        optimizer: The wrapped optimizer, or the raw one.
        clear: Clears its gradients.
    """

    loss: Callable[[], Any]
    optimizer: Any
    clear: Callable[[], object]


def compare(
    ours: Training,
    theirs: Training,
    scaler: Any,
    quick: bool,
    before: Callable[[bool], object] = lambda ours: None,
) -> list[dict[str, object]]:
    """Time the parts of two steps, which take turns; return a row a part, and one for the whole step.

    Args:
        ours: What ampx trains.
        theirs: The same by hand.
        scaler: The framework's own scaler, for theirs.
        quick: Fewer steps.
        before: Called before each step, untimed, with True before one of ours.
    """
    rounds = 2 if _paired.shortest else 300 if quick else 3000

    def through_ampx(lap: Lap) -> None:
        loss = ours.loss()
        lap("forward")
        scaling = ampx.scale_loss(loss, ours.optimizer)
        scaled = scaling.__enter__()
        lap("scaling the loss")
        scaled.backward()
        lap("backward")
        scaling.__exit__(None, None, None)
        lap("scaling the loss")
        ours.optimizer.step()
        lap("check, optimizer, scale")
        ours.clear()
        lap("clearing gradients")

    def by_hand(lap: Lap) -> None:
        loss = theirs.loss()
        lap("forward")
        scaled = scaler.scale(loss)
        lap("scaling the loss")
        scaled.backward()
        lap("backward")
        scaler.step(theirs.optimizer)
        scaler.update()
        lap("check, optimizer, scale")
        theirs.clear()
        lap("clearing gradients")

    def round_of_both() -> tuple[Times, Times]:
        before(True)
        mine = _times(through_ampx)
        before(False)
        return mine, _times(by_hand)

    taken = [round_of_both() for _ in range(rounds + rounds // 10)][rounds // 10 :]

    def fastest(side: int, part: str) -> float:
        times = sorted(each[side].get(part, 0.0) for each in taken)
        return times[len(times) // FASTEST]

    return [{"part": part, "seconds_a": fastest(0, part), "seconds_b": fastest(1, part)} for part in taken[0][0]]


def _times(step: Callable[[Lap], None]) -> Times:
    times: Times = {}
    started = last = time.perf_counter()

    def lap(part: str) -> None:
        nonlocal last
        now = time.perf_counter()
        times[part] = times.get(part, 0.0) + now - last
        last = now

    step(lap)
    lap("freeing the graph")  # what the step's variables held is freed as it returns
    times["the whole step"] = last - started
    return times
