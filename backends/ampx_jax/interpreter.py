"""Run a traced function with its operations in the dtypes of a plan.

What arrives at an operation may be narrower than it was traced with, never wider. An operation on the list `low` casts
its inputs to the plan's dtype, one on the list `full` to float32, one that follows takes the widest that arrives. All
others, unknown primitives included, run in the dtypes that they were traced with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from .casting import mark_of, to_dtype
from .products import product
from .rules import FOLLOW, JaxPlan, primitives

# Told of each operation that is cast, and of its dtype, while it is traced; `ampx run` sets it.
watch: Callable[[str, str], None] | None = None


def evaluate(plan: JaxPlan | None, closed: Any, inputs: Sequence[Any]) -> list[Any]:
    """Run a closed jaxpr; results have the dtypes that they were traced with."""
    return like(_run(plan, closed.jaxpr, closed.consts, inputs), closed.out_avals)


def like(values: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Return arrays the dtypes of a trace."""
    pairs = zip(values, avals, strict=True)
    return [to_dtype(value, aval.dtype) if is_narrow(aval) else value for value, aval in pairs]


def is_narrow(thing: Any) -> bool:
    """Return whether this is floating and at most float32: what casting is about."""
    dtype = getattr(thing, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 32


def _all_to(values: Sequence[Any], avals: Sequence[Any], dtype: Any) -> list[Any]:
    return [to_dtype(value, dtype) if is_narrow(aval) else value for value, aval in zip(values, avals, strict=True)]


def _run(plan: JaxPlan | None, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    computed: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else computed[atom]

    for variable, value in (*zip(jaxpr.constvars, consts, strict=True), *zip(jaxpr.invars, inputs, strict=True)):
        computed[variable] = value
    for equation in jaxpr.eqns:
        values = [read(atom) for atom in equation.invars]
        results = _equation(plan, equation, values)
        computed.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _equation(plan: JaxPlan | None, equation: Any, values: list[Any]) -> list[Any]:
    plan = _in_region(plan, equation)
    name, avals = equation.primitive.name, [atom.aval for atom in equation.invars]
    if plan is not None and name in ("jit", "pjit", "custom_jvp_call", "custom_vjp_call"):
        label = equation.params.get("name") or _label(equation)
        if label in plan.full:
            plan = None
        elif label in plan.low:
            plan, values = _wholly_low(plan), _all_to(values, values, plan.dtype)
    recursion = NESTED.get(name)
    if recursion is not None:
        return recursion(plan, equation, values)
    params = equation.params
    if plan is None or any(not is_narrow(aval) and _is_wide(aval) for aval in avals):
        values = like(values, avals)
    elif name in plan.full:
        values = _all_to(values, avals, jnp.float32)
    elif name in plan.low:
        if name == "dot_general" and all(is_narrow(atom.aval) for atom in (*equation.invars, *equation.outvars)):
            return [_product(plan, equation, values)]
        values = _all_to(values, avals, plan.dtype)
        if params.get("preferred_element_type") is not None and is_narrow(equation.outvars[0].aval):
            params = {**params, "preferred_element_type": jnp.dtype(plan.dtype)}
    elif name in FOLLOW:
        dtype = _widest(equation.invars, values)
        if dtype is not None:
            values = _all_to(values, avals, dtype)
    else:
        values = like(values, avals)
    return _bind(equation, values, params)


def _product(plan: JaxPlan, equation: Any, values: list[Any]) -> Any:
    left, right = values
    params = {name: value for name, value in equation.params.items() if name != "preferred_element_type"}
    if watch is not None:
        watch(equation.primitive.name, plan.dtype)
    visible = not (plan.device == "cpu" and plan.dtype == "bfloat16")
    with equation.ctx.manager:
        return product(left, right, plan.dtype, visible, **params)


def _widest(atoms: Sequence[Any], values: Sequence[Any]) -> Any:
    """Return the widest dtype that arrives; a number in the code follows the arrays, if their dtype can hold it."""
    arriving = [(atom, value) for atom, value in zip(atoms, values, strict=True) if is_narrow(value)]
    arrays = [jnp.result_type(value) for atom, value in arriving if not isinstance(atom, core.Literal)]
    if not arrays:
        return jnp.result_type(*(value for _, value in arriving)) if arriving else None
    dtype = jnp.result_type(*arrays)
    numbers = [float(value) for atom, value in arriving if isinstance(atom, core.Literal)]
    held = all(not math.isfinite(number) or abs(number) <= float(jnp.finfo(dtype).max) for number in numbers)
    return dtype if held else jnp.dtype(jnp.float32)


def _bind(equation: Any, values: Sequence[Any], params: Any) -> list[Any]:
    bound = equation.primitive.get_bind_params(params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # a pair up to some JAX version
    if watch is not None and values and is_narrow(values[0]):
        watch(equation.primitive.name, str(values[0].dtype))
    with equation.ctx.manager:
        results = equation.primitive.bind(*functions, *values, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def _is_wide(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", bool), jnp.floating)


def _in_region(plan: JaxPlan | None, equation: Any) -> JaxPlan | None:
    mark = mark_of(equation.source_info.name_stack)
    if plan is None or mark is None:
        return plan
    return None if mark == "off" else replace(plan, dtype=mark)  # type: ignore[arg-type]


def _label(equation: Any) -> str | None:
    closed = equation.params.get("call_jaxpr")
    info = getattr(getattr(closed, "jaxpr", closed), "debug_info", None)
    return None if info is None else str(info.func_name).partition(" ")[0]


def _wholly_low(plan: JaxPlan) -> JaxPlan:
    """Return a plan by which every operation computes in the plan's dtype, those of derivative rules included."""
    return replace(plan, low=primitives() - NESTED.keys(), full=frozenset())


# -- primitives that hold functions ---------------------------------------------------------------------------


def _jit(plan: JaxPlan | None, equation: Any, values: list[Any]) -> list[Any]:
    params = equation.params
    closed = params["jaxpr"]
    explicit = [s for key in ("in_shardings", "out_shardings") for s in params[key] if hasattr(s, "device_set")]
    if explicit:  # shardings belong to the call as it was traced
        return _bind(equation, like(values, equation_avals(equation)), params)
    inner = jax.jit(
        lambda *args: _run(plan, closed.jaxpr, closed.consts, args), inline=params["inline"], keep_unused=True
    )
    return inner(*values)  # type: ignore[no-any-return]


def equation_avals(equation: Any) -> list[Any]:
    """List the traced inputs of an equation."""
    return [atom.aval for atom in equation.invars]


def _checkpoint(plan: JaxPlan | None, equation: Any, values: list[Any]) -> list[Any]:
    params = equation.params
    inner = jax.checkpoint(
        lambda *args: _run(plan, params["jaxpr"], (), args), prevent_cse=params["prevent_cse"], policy=params["policy"]
    )
    return inner(*values)  # type: ignore[no-any-return]


def _cond(plan: JaxPlan | None, equation: Any, values: list[Any]) -> list[Any]:
    index, *operands = values

    def branch(closed: Any) -> Callable[..., Any]:
        return lambda *args: evaluate(plan, closed, args)

    branches = [branch(closed) for closed in equation.params["branches"]]
    return jax.lax.switch(index, branches, *operands)  # type: ignore[no-any-return]


def _while(plan: JaxPlan | None, equation: Any, values: list[Any]) -> list[Any]:
    params = equation.params
    first, second = params["cond_nconsts"], params["body_nconsts"]
    test_consts, body_consts, start = values[:first], values[first : first + second], values[first + second :]
    start = like(start, equation_avals(equation)[first + second :])
    return jax.lax.while_loop(  # type: ignore[no-any-return]
        lambda carry: evaluate(plan, params["cond_jaxpr"], [*test_consts, *carry])[0],
        lambda carry: evaluate(plan, params["body_jaxpr"], [*body_consts, *carry]),
        start,
    )


def _scan(plan: JaxPlan | None, equation: Any, values: list[Any]) -> list[Any]:
    params = equation.params
    consts, carried = params["num_consts"], params["num_carry"]
    constants, start, rows = values[:consts], values[consts : consts + carried], values[consts + carried :]
    start = like(start, equation_avals(equation)[consts : consts + carried])

    def body(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
        results = evaluate(plan, params["jaxpr"], [*constants, *carry, *row])
        return results[:carried], results[carried:]

    last, stacked = jax.lax.scan(
        body, start, rows, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*last, *stacked]


def _custom_jvp(plan: JaxPlan | None, equation: Any, values: list[Any]) -> list[Any]:
    """Keep the function's own derivative; both it and the function are cast."""
    avals, closed = equation_avals(equation), equation.params["call_jaxpr"]

    @jax.custom_jvp
    def function(*args: Any) -> list[Any]:
        return _run(plan, closed.jaxpr, closed.consts, args)

    @function.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        shapes = jax.eval_shape(function, *primals)
        own = jax.make_jaxpr(lambda p, t: jax.jvp(lambda *a: _bind(equation, a, equation.params), p, t))
        wide = tuple(like(primals, avals)), tuple(like(tangents, avals))
        results = evaluate(plan, own(*wide), [*wide[0], *wide[1]])
        half = len(results) // 2
        return like(results[:half], shapes), like(results[half:], shapes)

    return function(*values)  # type: ignore[no-any-return]


def _custom_vjp(plan: JaxPlan | None, equation: Any, values: list[Any]) -> list[Any]:
    """Keep the function's own derivative; both rules and the function are cast."""
    closed, count = equation.params["call_jaxpr"], equation.params["num_consts"]
    structure: list[Any] = []
    values = like(values, equation_avals(equation))

    @jax.custom_vjp
    def function(*args: Any) -> list[Any]:
        return evaluate(plan, closed, args)

    def forward(*args: Any) -> tuple[list[Any], list[Any]]:
        def both(*inner: Any) -> list[Any]:
            closed_over, inputs = inner[:count], inner[count:]  # JAX differentiates only the latter
            results, pullback = jax.vjp(lambda *a: _bind(equation, [*closed_over, *a], equation.params), *inputs)
            leaves, tree = jax.tree.flatten(pullback)
            structure[:] = [len(results), tree]
            return [*results, *leaves]

        computed = evaluate(plan, jax.make_jaxpr(both)(*args), args)
        return computed[: structure[0]], computed[structure[0] :]

    def backward(leaves: list[Any], upstream: list[Any]) -> tuple[Any, ...]:
        own = jax.make_jaxpr(lambda ls, up: jax.tree.unflatten(structure[1], ls)(up))(leaves, upstream)
        return (*(None for _ in range(count)), *evaluate(plan, own, [*leaves, *upstream]))

    function.defvjp(forward, backward)
    return function(*values)  # type: ignore[no-any-return]


NESTED: dict[str, Callable[[JaxPlan | None, Any, list[Any]], list[Any]]] = {
    "jit": _jit,
    "pjit": _jit,
    "checkpoint": _checkpoint,
    "remat2": _checkpoint,
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
}
