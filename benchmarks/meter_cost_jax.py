"""What the meter costs in JAX: a hundred steps of which it looks at one, beside a hundred steps compiled without it.

The same function, compiled twice, lies elsewhere in memory, and its times differ by several percent where steps are
short: `twice` is how much. A share that is no larger says nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
from _paired import measure_each, paired
from jax_step import WORKLOADS, _loss, _Run, _through_ampx

import ampx
import ampx_jax
from ampx.numerics.meter import EVERY


def measure(workload: str, quick: bool) -> dict[str, object]:
    """Time a hundred steps of a workload with the meter and without, in turn."""
    (init, forward, shape), batch, optimizer, pairs, _ = WORKLOADS[workload]
    keys = jax.random.split(jax.random.key(0), 3)
    params = init(keys[0])
    x, y = jax.random.normal(keys[1], (batch, *shape)), jax.random.randint(keys[2], (batch,), 0, 10)
    loss = _loss(ampx_jax.autocast(functools.partial(forward, product=jnp.matmul)))
    with ampx.init("jax", device="cpu", dtype="bfloat16", loss_scale="dynamic") as amp:
        runs = []
        for every in (EVERY, 0, 0):
            amp.meter_every = every
            runs.append(_Run(_through_ampx(loss, optimizer(), params), params, x, y))
            runs[-1]()
        metered, without, again = runs
        number = max(pairs // (8 if quick else 1), 8)
        ratio = paired(metered, without, pairs=number, repeat=EVERY, warmup=1)
        twice = paired(again, without, pairs=number, repeat=EVERY, warmup=1)
    facts = {"workload": workload, "share": ratio.ratio - 1, "twice": twice.ratio - 1, "every": EVERY}
    return {**facts, **ratio.to_json()}


STEPS = len(WORKLOADS)
"""How often `run` advances."""


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Measure each model; quickly, the two smallest."""
    return measure_each(measure, list(WORKLOADS)[: 2 if quick else None], quick, advance)


if __name__ == "__main__":
    for row in run("--quick" in sys.argv):
        spread = f"[{100 * row['ratio_low'] - 100:.2f}, {100 * row['ratio_high'] - 100:.2f}]"
        print(
            f"{row['workload']:42} {1e6 * row['median_b']:8.0f} us  {100 * row['share']:6.2f} % of a step {spread}; "
            f"two builds without it differ by {100 * row['twice']:.2f} %",
            flush=True,
        )
