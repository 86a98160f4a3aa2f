"""Time a step that the meter looks at beside one that it does not, of which there are 99."""

from __future__ import annotations

import sys
from collections.abc import Callable

from _paired import paired

from ampx.numerics.meter import EVERY
from ampx.protocol import ScaleGroup


def metered(workload: str, step: Callable[[], object], group: ScaleGroup, pairs: int, quick: bool) -> dict[str, object]:
    """Time the two kinds of step in turn; return the share of all steps' time that the meter takes.

    Args:
        workload: What is trained, for the table.
        step: One training step.
        group: The loss scale of its optimizer, which says how often the meter looks.
        pairs: Number of pairs.
        quick: Fewer pairs.
    """

    def every(steps: int) -> None:
        group.meter_every = steps

    ratio = paired(
        step,
        step,
        pairs=max(pairs // (8 if quick else 1), 8),
        warmup=3,
        before_a=lambda: every(1),
        before_b=lambda: every(sys.maxsize),
    )
    return {"workload": workload, "share": (ratio.ratio - 1) / EVERY, "every": EVERY, **ratio.to_json()}
