"""What hidden outputs save under `ampx run` in JAX, against callbacks; `python benchmarks/run_jax_outcomes.py`.

Both sides are one script that knows nothing of ampx: a perceptron of four layers with tanh and Adam, in one compiled
step. On side A `jax.jit` is that of the run: whether gradients were finite comes back as a hidden output, and in
float16 the loss scale goes in as a hidden input. On side B `jax.jit` is JAX's own, so that callbacks do both. A ratio
below one says that hidden outputs are faster. Each timing has a run of its own, and its function is compiled before the
clock starts; what the device still computes, and what callbacks still tell, counts.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

# One thread: the other cores keep the rest of the machine out of the timing.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()

import jax
import jax.numpy as jnp
import optax
from _paired import paired
from rich.console import Console
from rich.table import Table

import ampx_jax
from ampx.backend import offer
from ampx.run import Automation, Run, RunSettings

LAYERS = 4
STEPS = 50


class Side:
    """The script under `ampx run`, a new run each time that it begins."""

    def __init__(self, run: ExitStack, width: int, batch: int, dtype: str, jit: Callable[..., Any] | None) -> None:
        """Compile by `jit`, by that of the run where it is None; `run` holds the run that goes on."""
        self._run = run
        self._sizes = width, batch
        self._dtype = dtype
        self._jit = jit

    def begin(self) -> None:
        """End the run that goes on, start one, and take the first steps."""
        self._run.close()
        self._run.enter_context(
            offer(ampx_jax.load(), Automation).automate(Run("jax", RunSettings(dtype=self._dtype, device="cpu")))
        )
        width, batch = self._sizes
        keys = jax.random.split(jax.random.key(0), LAYERS)
        weights = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]
        optimizer = optax.adam(1e-3)
        self._carried = weights, optimizer.init(weights)
        self._data = jnp.ones((batch, width))

        def loss_of(weights: Any, x: Any) -> Any:
            for matrix in weights:
                x = jnp.tanh(x @ matrix)
            return jnp.mean(x**2)

        def step(weights: Any, state: Any, x: Any) -> Any:
            grads = jax.grad(loss_of)(weights, x)
            updates, state = optimizer.update(grads, state, weights)
            return optax.apply_updates(weights, updates), state

        self._step = (self._jit or jax.jit)(step)
        self.train()

    def train(self) -> None:
        """Take some steps, until all is computed and told."""
        for _ in range(STEPS):
            self._carried = self._step(*self._carried, self._data)
        jax.block_until_ready(self._carried)
        jax.effects_barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8, help="timings of each side")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # what the CPU only emulates is no matter here
    native = jax.jit
    table = Table("dtype", "width", "batch", "hidden outputs", "callbacks", "ratio", "middle half of the ratios")
    for dtype in ("bfloat16", "float16"):
        for width, batch in ((16, 8), (128, 32), (512, 64)):
            with ExitStack() as run:
                hidden, callbacks = (Side(run, width, batch, dtype, jit) for jit in (None, native))
                ratio = paired(
                    hidden.train,
                    callbacks.train,
                    pairs=arguments.pairs,
                    warmup=1,
                    before_a=hidden.begin,
                    before_b=callbacks.begin,
                )
            times = (f"{1e6 * seconds / STEPS:.0f} µs" for seconds in (ratio.median_a, ratio.median_b))
            spread = f"{ratio.ratio_low:.2f} to {ratio.ratio_high:.2f}"
            table.add_row(dtype, str(width), str(batch), *times, f"{ratio.ratio:.2f}", spread)
    Console().print(table)


if __name__ == "__main__":
    main()
