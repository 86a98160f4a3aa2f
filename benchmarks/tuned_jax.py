"""What `ampx.tune` decides for the workloads of `jax_step.py`, and a compiled step under it: see `tuned.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax_step  # sets XLA to one thread before JAX is imported
import optax
from tuned import DTYPE, Settings, Side, Task, main, measure_all

import ampx
import ampx_jax


def _made(workload: str) -> tuple[Any, Any, tuple[Any, Any]]:
    """Return a workload's function, its parameters and a batch."""
    (init, forward, shape), batch, *_ = jax_step.WORKLOADS[workload]
    keys = jax.random.split(jax.random.key(0), 3)
    data = jax.random.normal(keys[1], (batch, *shape)), jax.random.randint(keys[2], (batch,), 0, 10)
    return functools.partial(forward, product=jnp.matmul), init(keys[0]), data


class JaxSide(Side):
    """One way to train in JAX; compiled once, since what a session of the same settings compiles is the same."""

    framework = "jax"
    untimed = 1

    def __init__(self, workload: str, settings: Settings | None) -> None:
        super().__init__(settings)
        self.forward, self.params, self.data = _made(workload)
        self.raw = jax_step.WORKLOADS[workload][2]()
        self.compiled: Any = None

    def start(self, amp: ampx.Amp | None) -> None:
        if self.compiled is None:
            tx = self.raw if amp is None else amp.wrap_optimizer(self.raw)
            step = self.plain if amp is None else functools.partial(self.through_ampx, tx)
            self.compiled = jax.jit(step, donate_argnums=(0, 1))
            self.carried = jax.tree.map(jnp.copy, (self.params, tx.init(self.params)))

    def plain(self, params: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any]:
        """Train as without ampx."""
        gradients = jax.grad(jax_step._loss(self.forward))(params, x, y)
        updates, state = self.raw.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    def through_ampx(self, tx: Any, params: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any]:
        """Train with ampx, as its manual says."""

        def scaled_loss(params: Any) -> Any:
            with ampx.scale_loss(jax_step._loss(ampx_jax.autocast(self.forward))(params, x, y), state) as scaled:
                return scaled

        updates, state = tx.update(jax.grad(scaled_loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    def step(self) -> object:
        self.carried = self.compiled(*self.carried, *self.data)
        return jax.block_until_ready(self.carried)


def tuned(workload: str) -> ampx.TunedPolicy:
    """Return what `tune` decides for a workload."""
    forward, params, data = _made(workload)
    step = jax_step._loss(forward)
    return ampx.tune(lambda params: step(params, *data), params, dtype=DTYPE, framework="jax", device="cpu")


def task(workload: str) -> Task:
    """Return a workload as it is tuned and trained."""
    *_, pairs, repeat = jax_step.WORKLOADS[workload]
    sides = functools.partial(JaxSide, workload)
    return Task(workload, functools.partial(tuned, workload), sides, min(pairs, 20), repeat)


# The smallest and the one with the largest products first: a quick run times these.
TASKS = [task(list(jax_step.WORKLOADS)[place]) for place in (0, 2, 1, 3, 4)]
STEPS = len(TASKS)
"""How often `run` advances."""


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Tune and time each workload."""
    return measure_all(TASKS, quick, advance)


if __name__ == "__main__":
    main(run)
