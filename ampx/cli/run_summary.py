"""The summary that `ampx run` prints on stderr when the script has ended."""

from __future__ import annotations

from collections.abc import Iterator

from ampx.running.recorder import FORWARD
from ampx.running.supervising import Finished

_NAMES = {FORWARD: "forward and the rest of the loop"}
TOP = 10


def summary_lines(finished: Finished) -> Iterator[str]:
    """Give the lines of the summary. Sync: none."""
    recorder, run, effective = finished.recorder, finished.run, finished.effective
    if run is None:
        yield "ampx run: nothing to automate: the script made no optimizer of a framework that ampx knows"
    elif effective is not None:
        dtype = effective.dtype or "float32"
        yield f"ampx run: {run.framework} in {dtype} on {effective.device}, level {effective.level}: {effective.reason}"
    else:
        yield f"ampx run: {run.framework} as the script has it, with {run.stood_down}"
    for one in recorder.optimizers.values():
        yield f"  {one.kind:<11} {_count(one.steps, 'step')}, {len(one.skipped)} skipped; loss scale {one.trace()}"
    if recorder.seconds:
        times = sorted(recorder.seconds.items(), key=lambda item: item[0] != FORWARD)
        told = ", ".join(f"{_NAMES.get(name, name)} {seconds:.2f} s" for name, seconds in times)
        yield f"  {'time':<11} {told} (on the host)"
    if recorder.ops and recorder.steps_sampled:
        yield f"  {'operations':<11} of the first {_count(recorder.steps_sampled, 'step')}, the most frequent:"
        for (name, dtype), count in recorder.ops.most_common(TOP):
            yield f"  {'':<11} {name:<32} {dtype:<9} {count:>6} ×"
    lines = finished.explain()
    if lines:
        yield f"  {'by hand':<11} {lines[0]}"
        yield from (f"  {'':<11} {line}" for line in lines[1:])
    for note in recorder.notes:
        yield f"  {'note':<11} {note}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
