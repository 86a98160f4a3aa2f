"""`optax.MultiSteps` around a wrapped transformation: the window after an overflow starts with an empty accumulator.

optax empties the accumulator by a product with zero, which leaves NaN where a sum was not finite: no later window would
be finite. Nothing that `MultiSteps` gets from a transformation can change that, so its method is replaced. For a
`MultiSteps` that holds no wrapped transformation, or one of a disabled session, nothing changes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from . import state as states


@functools.cache
def let_multi_steps_recover() -> None:
    """Replace `optax.MultiSteps.update` by one that empties what an overflow left; repeated calls do nothing."""
    native = optax.MultiSteps.update

    @functools.wraps(native)
    def update(self: Any, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, after = native(self, updates, state, params, **extra)
        if any(own.settings.enabled for own in states.find_all(after.inner_opt_state)):
            new_window = after.mini_step == 0
            sums = jax.tree.map(lambda leaf: jnp.where(new_window, jnp.zeros_like(leaf), leaf), after.acc_grads)
            after = after._replace(acc_grads=sums)
        return updates, after

    optax.MultiSteps.update = update
