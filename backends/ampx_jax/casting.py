"""Where the casting plan lives, and the verb `cast`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ampx.policy import Dtype

from .rules import JaxPlan

# The plan that `ampx_jax.autocast` obeys; None: nothing is cast. It is part of jax.jit's key, so a function that was
# compiled under one plan is compiled anew under another.
active: Final = jax.make_user_context(None)


def switch(plan: JaxPlan | None) -> None:
    """Set the plan of the calling thread, until it is set again."""
    active(plan).__enter__()  # never left: the next switch replaces it


_MARK: Final = re.compile(r"ampx\.(off|float16|bfloat16)")


@contextmanager
def region(plan: JaxPlan, enabled: bool) -> Iterator[None]:
    """Cast inside by another plan, or not at all.

    A function transform only sees the operations, so they carry the region in their name stack.
    """
    with active(plan if enabled else None), jax.named_scope(f"ampx.{plan.dtype if enabled else 'off'}"):
        yield


def mark_of(name_stack: object) -> str | None:
    """Read the innermost region that an operation was traced in: `"off"`, a dtype, or None."""
    marks = _MARK.findall(str(name_stack))
    return marks[-1] if marks else None


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array, and no Python number."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def is_traced(tree: Any) -> bool:
    """Return whether there is an array in a tree whose value is not known yet."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def to_dtype(value: Any, dtype: Any) -> Any:
    """Return a value in a dtype; the same object where it has that."""
    return value if jnp.result_type(value) == dtype else jnp.asarray(value).astype(dtype)


def cast(tree: Any, dtype: Dtype) -> Any:
    """Cast the floating arrays of a tree; everything else stays the same object."""

    def one(leaf: Any) -> Any:
        if not is_array(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return leaf if leaf.dtype == jnp.dtype(dtype) else jnp.asarray(leaf).astype(dtype)

    return jax.tree.map(one, tree)


def widest(tree: Any, at_least: Dtype) -> Dtype:
    """Return the widest dtype among the floating arrays of a tree."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)]
    return "float32" if any(jnp.finfo(leaf.dtype).bits >= 32 for leaf in leaves) else at_least


def in_float64(parameters: Any) -> str | None:
    """Return what is to be said of parameters in float64, which casting leaves alone; None where there are none."""
    leaves = jax.tree.leaves(parameters)
    count = sum(jnp.result_type(leaf) == jnp.float64 for leaf in leaves)
    if not count:
        return None
    return (
        f"{count} of {len(leaves)} parameters are float64, which mixed precision leaves alone: what they meet computes "
        f"in float64. Cast them to float32, or leave jax_enable_x64 off"
    )
