"""Which primitive computes in which dtype."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp

import ampx
from ampx.backend import CastPlan, is_module
from ampx.errors import meant
from ampx.modules import module_dtypes


def _names_in(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Computed in the plan's dtype: where the time goes, and where accelerators accumulate in float32.
LOW: Final = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"})

# Computed in float32: sums of many terms, and functions that leave float16's range or lose its few digits. `expm` is
# compiled, and multiplies matrices by constants of millions.
FULL: Final = _names_in(
    "acos acosh asin asinh atanh cosh cumlogsumexp cumprod cumsum digamma erf_inv exp exp2 expm expm1 integer_pow "
    "lgamma log log1p pow reduce_prod reduce_sum reduce_window_sum rsqrt sinh square tan"
)

# Computed in the widest dtype of their floating inputs, as these arrive.
FOLLOW: Final = _names_in(
    "abs add add_any atan atan2 broadcast_in_dim cbrt ceil clamp concatenate copy copy_p cos cummax cummin div "
    "dynamic_slice dynamic_update_slice eq erf erfc expand_dims floor gather ge gt is_finite le logistic lt max min "
    "mul name ne neg nextafter pad reduce_max reduce_min reduce_window_max reduce_window_min rem reshape rev round "
    "select_n sharding_constraint sign sin slice split sqrt squeeze stop_gradient sub tanh transpose argmax "
    "argmin"
)


# Never in another dtype than that of the trace: what reads the bits of a number.
AS_TRACED: Final = frozenset({"bitcast_convert_type", "convert_element_type", "reduce_precision"})


@dataclass(frozen=True)
class JaxPlan(CastPlan):
    """A plan whose lists are resolved to names of primitives and of compiled functions."""

    low: frozenset[str] = LOW  # names computed in `dtype`
    full: frozenset[str] = FULL  # names computed in float32
    forced: tuple[tuple[str, str], ...] = ()  # patterns of names of modules, and the dtype of each


def resolve(plan: CastPlan) -> JaxPlan:
    """Check the op lists and give the plan that the interpreter reads.

    At O3 every operation computes in the plan's dtype, but for those of `deny`.
    """
    allow, deny = _names("allow", plan.allow), _names("deny", plan.deny)
    if plan.level == "O3":
        allow = primitives() - AS_TRACED - deny
    return JaxPlan(
        plan.device,
        plan.dtype,
        plan.level,
        plan.allow,
        plan.deny,
        low=(LOW - deny) | allow,
        full=((FULL - allow) | deny) - (allow - deny),
        forced=tuple(module_dtypes(plan).items()),
    )


def _names(option: str, entries: Iterable[Any]) -> frozenset[str]:
    return frozenset(_name(option, entry) for entry in entries if not is_module(entry))


def _name(option: str, entry: Any) -> str:
    """Return the name under which a trace shows an entry: of a primitive, or of a compiled function."""
    name = entry if isinstance(entry, str) else getattr(entry, "__name__", None)
    if isinstance(name, str):
        if name in primitives() or (not isinstance(entry, str) and _is_compiled(entry)):
            return name
        if isinstance(entry, str) and any(_is_compiled(getattr(home, name, None)) for home in (jnp, jax.nn)):
            return name
    raise ampx.UnsupportedOpError(
        f"{option} got {entry!r}, which a trace does not show; accepted: the name of a primitive such as "
        f"'dot_general', a function of jax.numpy or jax.nn, a function of yours under jax.jit, or 'module:' and a "
        f"pattern of names of modules. Pass one of these, or mark your function with "
        f"ampx.float_function or ampx.half_function.{meant(entry, {*primitives(), *dir(jnp), *dir(jax.nn)})}"
    )


def _is_compiled(candidate: Any) -> bool:
    return callable(getattr(candidate, "lower", None)) or isinstance(candidate, (jax.custom_jvp, jax.custom_vjp))


@functools.cache
def primitives() -> frozenset[str]:
    """Return the names of the primitives of jax.lax."""
    names = {getattr(jax.lax, name).name for name in dir(jax.lax) if name.endswith("_p")}
    return frozenset(names) | LOW | FULL | FOLLOW
