"""Products of low-precision factors, whose derivatives have the dtypes in which the factors arrived.

JAX gives a derivative the dtype of the factor that was multiplied. That is the low one: the gradient of a float32
weight would be rounded at once, and several devices would add up rounded gradients in low precision,
because the compiler adds them where the product makes them. Here the derivative for a float32 factor is a product of
low-precision factors with a float32 result, which GPUs make as fast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from .casting import to_dtype

# Linear in each of two factors, which arrive in any floating dtype. `dtype` is that in which they are multiplied,
# `result` that of the product; the other parameters are those of dot_general.
_product_p: Final = core.Primitive("ampx_product")
_DOT: Final = jax.lax.dot_general_p


def product(left: Any, right: Any, dtype: Any, visible: bool, **params: Any) -> Any:
    """Multiply two floating factors, at most float32, in a low dtype; the derivatives have the dtypes of the factors.

    Where it is to be `visible`, a trace shows `dot_general`, for which policies of `jax.checkpoint` look; then it is
    compiled for a CPU as for any device. `params` are those of `dot_general` but `preferred_element_type`.
    """
    dtype = jnp.dtype(dtype)
    options = {"dtype": dtype, "result": dtype, **params}
    if not visible:
        return _product_p.bind(left, right, **options)

    @jax.custom_jvp
    def ampx_product(left: Any, right: Any) -> Any:
        return _multiply(left, right, **options)

    def derivative(factors: Any, tangents: Any) -> tuple[Any, Any]:
        parts = [
            rule(tangent, *factors, **options)
            for rule, tangent in zip(_DERIVATIVES, tangents, strict=True)
            if not isinstance(tangent, SymbolicZero)
        ]
        return _multiply(*factors, **options), functools.reduce(jnp.add, parts)

    ampx_product.defjvp(derivative, symbolic_zeros=True)
    return ampx_product(left, right)


def _multiply(left: Any, right: Any, *, dtype: Any, result: Any, **params: Any) -> Any:
    return _DOT.bind(to_dtype(left, dtype), to_dtype(right, dtype), **params, preferred_element_type=result)


def _multiply_on_cpu(left: Any, right: Any, *, dtype: Any, result: Any, **params: Any) -> Any:
    """Multiply; bfloat16 sums are float32, and rounded after the product where its result is bfloat16.

    XLA's CPU compiler has instructions for bfloat16 factors where the result is float32 and the left factor's last
    dimensions are summed over. Some other products it compiles all the same, and they fail when they run; so these get
    their rounded factors in float32. The sums are the same.
    """
    if dtype != jnp.bfloat16:
        return _multiply(left, right, dtype=dtype, result=result, **params)
    (summed, _), (batch, _) = params["dimension_numbers"]
    shared = len(summed) + len(batch)
    in_order = (*batch, *summed) == (*range(len(batch)), *range(left.ndim - len(summed), left.ndim))
    factors = to_dtype(left, dtype), to_dtype(right, dtype)
    if not in_order or (left.ndim - shared == 1 and right.ndim - shared > 1):
        factors = to_dtype(factors[0], jnp.float32), to_dtype(factors[1], jnp.float32)
    else:  # or the compiler takes a transpose that makes the left factor into the product, which then fails so
        factors = jax.lax.optimization_barrier(factors[0]), factors[1]
    return to_dtype(_DOT.bind(*factors, **params, preferred_element_type=jnp.dtype(jnp.float32)), result)


@functools.cache
def _compiled(options: frozenset[tuple[str, Any]]) -> Callable[..., Any]:
    """Return what multiplies outside of compiled code."""
    return jax.jit(functools.partial(_product_p.bind, **dict(options)))


def _product_aval(left: Any, right: Any, *, dtype: Any, result: Any, **params: Any) -> Any:
    factors = [aval.update(dtype=dtype, weak_type=False) for aval in (left, right)]
    return _DOT.abstract_eval(*factors, **params, preferred_element_type=result)[0]


# What is kept for them is low: a derivative needs the other factor in low precision only.
_DERIVATIVES: Final = (
    lambda tangent, left, right, **options: _product_p.bind(tangent, to_dtype(right, options["dtype"]), **options),
    lambda tangent, left, right, **options: _product_p.bind(to_dtype(left, options["dtype"]), tangent, **options),
)


def _transposed(place: int, cotangent: Any, *factors: Any, dtype: Any, result: Any, **params: Any) -> Any:
    """Return the derivative for the factor at `place`, in the dtype in which that arrived."""
    aval = factors[place].aval

    def native(cotangent: Any, other: Any) -> Any:
        pair = [other, other]
        pair[place] = ad.UndefinedPrimal(aval.update(dtype=dtype, weak_type=False))
        return ad.primitive_transposes[_DOT](cotangent, *pair, **params, preferred_element_type=dtype)[place]

    return _replayed(native, (cotangent, factors[1 - place]), dtype, aval.dtype)


def _batched(factors: Any, axes: Any, *, dtype: Any, result: Any, **params: Any) -> tuple[Any, int]:
    """Multiply many pairs of factors along a new axis, the first of the product."""
    native = jax.vmap(functools.partial(_multiply, dtype=dtype, result=dtype, **params), in_axes=tuple(axes))
    return _replayed(native, factors, dtype, result), 0


def _replayed(native: Callable[..., Any], arrays: Sequence[Any], dtype: Any, result: Any) -> Any:
    """Run JAX's own rule for `dot_general` with arrays of other dtypes, and with our product in its place."""
    jaxpr = jax.make_jaxpr(native)(*(to_dtype(array, dtype) for array in arrays)).jaxpr
    values_of = dict(zip(jaxpr.invars, arrays, strict=True))
    for equation in jaxpr.eqns:
        values = [atom.val if isinstance(atom, core.Literal) else values_of[atom] for atom in equation.invars]
        primitive, params = equation.primitive, dict(equation.params)
        if primitive is _DOT:
            primitive, params = _product_p, {**params, "dtype": dtype, "result": result}
            del params["preferred_element_type"]
        values_of[equation.outvars[0]] = primitive.bind(*values, **params)
    return values_of[jaxpr.outvars[0]]


_product_p.def_impl(lambda *factors, **options: _compiled(frozenset(options.items()))(*factors))
_product_p.def_abstract_eval(_product_aval)
ad.defbilinear(_product_p, functools.partial(_transposed, 0), functools.partial(_transposed, 1))
ad.defjvp(_product_p, *_DERIVATIVES)
batching.primitive_batchers[_product_p] = _batched
mlir.register_lowering(_product_p, mlir.lower_fun(_multiply, multiple_results=False))
mlir.register_lowering(_product_p, mlir.lower_fun(_multiply_on_cpu, multiple_results=False), platform="cpu")
