"""What every backend's trainer of `ampx demo` does with the losses, times and events of a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise

from ampx.events import Event, ScaleChanged, StepSkipped
from ampx.policy import Effective

from .demo import Run, RunResult


def scale_trace(init_scale: float, events: Iterable[Event], steps: int) -> list[float]:
    """Return the loss scale of every step; a change holds from the step after its event's."""
    changes = {event.step: event.next_scale for event in events if isinstance(event, ScaleChanged)}
    trace = [init_scale]
    for step in range(1, steps):
        trace.append(changes.get(step, trace[-1]))
    return trace


def skipped_steps(events: Iterable[Event]) -> list[int]:
    """List the steps that were skipped, counted from 0."""
    return [event.step - 1 for event in events if isinstance(event, StepSkipped)]


def make_result(
    run: Run,
    effective: Effective,
    *,
    accuracy: float,
    losses: list[float],
    marks: Sequence[tuple[int, float]],
    scales: list[float],
    skipped: list[int],
    final_scale: float,
) -> RunResult:
    """Return the result of a run.

    Args:
        run: What was done.
        effective: `amp.effective` of its session.
        accuracy: Share of the test images told right, in [0, 1].
        losses: Training loss by step, unscaled.
        marks: (steps done, time in seconds) after the first step, which warms up, and after each epoch.
        scales: Loss scale by step.
        skipped: Steps that were skipped, counted from 0.
        final_scale: Loss scale after the last step.
    """
    speeds = [(done - before) / (end - start) for (before, start), (done, end) in pairwise(marks) if done > before]
    last_epoch = losses[-(len(losses) // run.epochs) :]
    return RunResult(
        dtype=run.dtype,
        seed=run.seed,
        device=effective.device,
        native=run.dtype == "float32" or effective.native,
        reason=effective.reason,
        accuracy=accuracy,
        final_loss=sum(last_epoch) / len(last_epoch),
        seconds=marks[-1][1] - marks[0][1],
        steps_per_second=statistics.median(speeds),
        losses=losses,
        scales=scales,
        skipped=skipped,
        final_scale=final_scale,
    )
