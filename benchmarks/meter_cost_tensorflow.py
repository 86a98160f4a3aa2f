"""What the meter costs in functions of TensorFlow, where it was asked for: steps with it beside steps without it."""

from __future__ import annotations

import sys
from collections.abc import Callable

from _paired import limited, paired
from tensorflow_step import WAYS, WORKLOADS, _built, _raw, _step, batch_of

import ampx
from ampx.numerics.meter import EVERY


def measure(workload: str, way: str, quick: bool) -> dict[str, object]:
    """Time as many steps as the meter looks at one of, with the meter and without, in turn."""
    make, _, optimizer, pairs = WORKLOADS[workload]
    data = batch_of(workload)
    with ampx.init("tensorflow", device="cpu", dtype="float32", loss_scale="dynamic") as amp:
        steps = []
        for every in (EVERY, 0):
            amp.meter_every = every
            opt = amp.wrap_optimizer(_raw(optimizer))
            steps.append(_step(way, _built(make, data[0]), opt, opt.scale_loss, data))
            steps[-1]()
        ratio = paired(*steps, pairs=max(pairs // (8 if quick else 2), 8), repeat=EVERY, warmup=1)
    return {"workload": workload, "way": way, "share": ratio.ratio - 1, "every": EVERY, **ratio.to_json()}


STEPS = len(WORKLOADS) * len(WAYS)
"""How often `run` advances."""


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Measure each model in each way to train it; quickly, the two smallest."""
    rows = []
    for workload in limited(list(WORKLOADS)[: 2 if quick else None]):
        for way in WAYS:
            rows.append(measure(workload, way, quick))
            advance()
    return rows


if __name__ == "__main__":
    for row in run("--quick" in sys.argv):
        spread = f"[{100 * row['ratio_low'] - 100:.2f}, {100 * row['ratio_high'] - 100:.2f}]"
        times = f"{1e6 * row['median_b']:8.0f} us  {100 * row['share']:6.2f} % of a step"
        print(f"{row['workload']:48} {row['way']:12} {times} {spread}", flush=True)
