"""Run a traced function with its operations in the dtypes of a plan.

What arrives at an operation may be narrower than it was traced with, never wider. An operation on the list `low` casts
its inputs to the plan's dtype, one on the list `full` to float32, one that follows takes the widest that arrives. All
others, unknown primitives included, run in the dtypes that they were traced with.

In a module that is forced into a dtype, what arrives from outside is cast to it first. In float32 nothing is cast
inside, and nothing becomes narrower; in a low dtype operations are cast by the lists.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core, source_info_util

from . import equations
from .casting import mark_of, to_dtype
from .products import product
from .rules import FOLLOW, FULL, LOW, JaxPlan, primitives
from .scopes import Scope, dtype_for, scopes_of
from .taps import rounded_input, rounded_output, rounds, tap, tap_p

# Told of each operation that is cast, and of its dtype, while it is traced; `ampx run` sets it.
watch: Callable[[str, str], None] | None = None
# Told of each rule of the script's own that gets cotangents multiplied by the loss scale; `ampx run` sets it.
note_scaled: Callable[[str], None] | None = None


@dataclass(frozen=True)
class Mode:
    """How operations are run.

    Attributes:
        plan: The plan; None runs everything as it was traced.
        low: The plan of modules that are forced into a low dtype.
        forced: Patterns of names of modules, and the dtype of each.
        taps: What goes into and comes out of a `jax.named_scope` passes taps.
        seen: Takes the names of all modules.
        path: The stack of names of what the operations stand in.
        region: The forced module that they stand in.
        scale: What the loss will be multiplied by, and so the cotangents: rules of the script's own get theirs divided
            by it. None: by nothing, or there is no such rule.
    """

    plan: JaxPlan | None
    low: JaxPlan | None = None
    forced: tuple[tuple[str, str], ...] = ()
    taps: bool = False
    seen: set[str] = field(default_factory=set, compare=False)
    path: str = ""
    region: _Region | None = None
    scale: Any = field(default=None, compare=False)

    def within(self, equation: Any) -> str:
        """Return the stack of names of an operation."""
        stack = str(equation.source_info.name_stack)
        return f"{self.path}/{stack}" if self.path and stack else self.path or stack


@dataclass(frozen=True)
class _Region:
    """A call of a forced module: its name, its dtype, and its place among those of one function."""

    name: str
    dtype: str
    serial: int


class _Regions(threading.local):
    """The regions that read what a thread computes, the outermost first: those of `numerics.watch`."""

    watches: tuple[Any, ...] = ()


regions: Final = _Regions()
# What modules are forced into in a thread, by patterns of their names; part of jax.jit's key.
forced: Final = jax.make_user_context(())


def mode_of(plan: JaxPlan | None) -> Mode:
    """Return how operations are run in this thread now, by a plan or without one."""
    dtypes = (*(() if plan is None else plan.forced), *forced.value)
    device = "cpu" if jax.default_backend() == "cpu" else "cuda"
    return Mode(plan, plan or JaxPlan(device, "bfloat16"), dtypes, bool(regions.watches))


def evaluate(mode: Mode, closed: Any, inputs: Sequence[Any]) -> list[Any]:
    """Run a closed jaxpr; results have the dtypes that they were traced with."""
    return like(_run(mode, closed.jaxpr, closed.consts, inputs), closed.out_avals)


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


def _run(mode: Mode, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    if mode.forced or mode.taps:
        return _ByModule(mode).run(jaxpr, consts, inputs)
    computed: dict[Any, Any] = {}
    for variable, value in (*zip(jaxpr.constvars, consts, strict=True), *zip(jaxpr.invars, inputs, strict=True)):
        computed[variable] = value

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else computed[atom]

    for equation in jaxpr.eqns:
        values = [read(atom) for atom in equation.invars]
        with named_like(equation):
            results = _equation(mode, equation, values)
        computed.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def named_like(equation: Any) -> Any:
    """Return a region in which operations have the names and the line of code of another, within those of now."""
    info = equation.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    return source_info_util.user_context(info.traceback, name_stack=stack)


class _ByModule:
    """Runs a function with some of its modules in dtypes of their own, or with taps."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.values: dict[Any, Any] = {}
        self.homes: dict[Any, _Region | None] = {}  # the forced module that computed a value

    def run(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        mode = self.mode
        self.write([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], mode.region)
        starts, ends = _named_scopes(mode, jaxpr) if mode.taps else ({}, {})
        region = mode.region
        for place, equation in enumerate(jaxpr.eqns):
            for scope, variables in starts.get(place, ()):
                self.tap(variables, scope, "inputs")
            scopes = scopes_of(mode.within(equation))
            mode.seen.update(scope.name for scope in scopes)
            region = _region(mode, scopes, region, place)
            with named_like(equation):
                if equation.primitive is tap_p:
                    self.look(equation, region, scopes)
                else:
                    values = [self.arriving(atom, region, scopes) for atom in equation.invars]
                    self.write(equation.outvars, _equation(replace(mode, region=region), equation, values), region)
            for scope, variables in ends.get(place, ()):
                self.leave(variables, scope)
        around = () if mode.region is None else (Scope(mode.region.name, ""),)
        return [self.arriving(atom, mode.region, around) for atom in jaxpr.outvars]

    def look(self, equation: Any, region: _Region | None, scopes: Sequence[Scope]) -> None:
        """Run a tap, which only looks: what it hands on unchanged stays a value of the module that computed it."""
        values = [self.leaving(atom, scopes) for atom in equation.invars]
        self.write(equation.outvars, bind(equation, values, equation.params), region)
        for atom, variable, value in zip(equation.invars, equation.outvars, values, strict=True):
            if value is self.read(atom):
                self.homes[variable] = self._home(atom)

    def leave(self, outputs: Sequence[Any], scope: Scope) -> None:
        """Tap the outputs of a named scope; where a module of that name is forced, they are rounded as its outputs."""
        for variable in outputs:
            home = self.homes[variable]
            if home is not None and home.name == scope.name:
                self.write([variable], [self.leaving(variable, ())], None)
        self.tap(outputs, scope, "forward")

    def read(self, atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else self.values[atom]

    def _home(self, atom: Any) -> _Region | None:
        return None if isinstance(atom, core.Literal) else self.homes[atom]

    def write(self, variables: Sequence[Any], values: Sequence[Any], region: _Region | None) -> None:
        self.values.update(zip(variables, values, strict=True))
        self.homes.update(dict.fromkeys(variables, region))

    def tap(self, variables: Sequence[Any], scope: Scope, direction: str) -> None:
        values = [self.read(variable) for variable in variables]
        self.values.update(zip(variables, tap(values, *scope, direction), strict=True))

    def leaving(self, atom: Any, scopes: Sequence[Scope]) -> Any:
        """Return a value as it is behind the forced module that computed it."""
        value, home = self.read(atom), self._home(atom)
        if home is None or not rounds(home.dtype) or not is_narrow(value):
            return value
        return value if home.name in [scope.name for scope in scopes] else rounded_output(value, home.dtype)

    def arriving(self, atom: Any, region: _Region | None, scopes: Sequence[Scope]) -> Any:
        """Return a value as it enters a forced module."""
        value = self.read(atom)
        if isinstance(atom, core.Literal) or self.homes[atom] == region or not is_narrow(value):
            return value
        value = self.leaving(atom, scopes)
        if region is None:
            return value
        return rounded_input(value, region.dtype) if rounds(region.dtype) else to_dtype(value, region.dtype)


def _region(mode: Mode, scopes: Sequence[Scope], last: _Region | None, place: int) -> _Region | None:
    """Return the innermost forced module that an operation is in, the same for all operations of one call."""
    for scope in reversed(scopes):
        dtype = dtype_for(scope.name, mode.forced)
        if dtype is not None:
            for region in (mode.region, last):
                if region is not None and (region.name, region.dtype) == (scope.name, dtype):
                    return region
            return _Region(scope.name, dtype, place)
    return None


_Bounds = dict[int, list[tuple[Scope, list[Any]]]]


def _named_scopes(mode: Mode, jaxpr: Any) -> tuple[_Bounds, _Bounds]:
    """Return inputs and outputs of each `jax.named_scope` of a function, by the place of the operation.

    Parameters do not count: what the function receives at the outermost level.
    """
    parameters, last_use = set() if mode.path else set(jaxpr.invars), _last_uses(jaxpr)
    starts: _Bounds = {}
    ends: _Bounds = {}
    for scope, first, end in _spans(mode, jaxpr):
        inside = jaxpr.eqns[first:end]
        produced = [variable for equation in inside for variable in equation.outvars]
        inputs = [v for v in _variables(inside) if v not in parameters.union(produced) and is_narrow(v.aval)]
        outputs = [v for v in produced if last_use.get(v, 0) >= end and is_narrow(v.aval)]
        if outputs:
            starts.setdefault(first, []).insert(0, (scope, inputs))
            ends.setdefault(end - 1, []).append((scope, outputs))
    return starts, ends


def _spans(mode: Mode, jaxpr: Any) -> Iterator[tuple[Scope, int, int]]:
    """Yield each `jax.named_scope` as it ends, with the places of its first operation and of the one behind it."""
    outside = scopes_of(mode.path)
    stacks = [mode.within(equation) for equation in jaxpr.eqns]
    chains = [() if "transpose(" in stack else scopes_of(stack)[len(outside) :] for stack in stacks]
    entered: list[tuple[Scope, int]] = []
    for place, chain in enumerate([*chains, ()]):
        common = 0
        while common < min(len(entered), len(chain)) and entered[common][0] == chain[common]:
            common += 1
        while len(entered) > common:
            scope, first = entered.pop()
            if not scope.kind:
                yield scope, first, place
        entered += [(scope, place) for scope in chain[common:]]


def _last_uses(jaxpr: Any) -> dict[Any, int]:
    """Return the place of the last operation that reads a variable; of results, the place behind all operations."""
    last = {variable: place for place, equation in enumerate(jaxpr.eqns) for variable in _variables([equation])}
    return last | {atom: len(jaxpr.eqns) for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}


def _variables(equations: Sequence[Any]) -> list[Any]:
    """List the variables that operations read, each once."""
    atoms = (atom for equation in equations for atom in equation.invars)
    return list(dict.fromkeys(atom for atom in atoms if not isinstance(atom, core.Literal)))


def _equation(mode: Mode, equation: Any, values: list[Any]) -> list[Any]:
    region = mode.region
    if region is not None and region.dtype == "float32":
        return _wide(mode, equation, values)
    if region is not None and not rounds(region.dtype) and mode.low is not None:
        mode = replace(mode, plan=replace(mode.low, dtype=region.dtype))  # type: ignore[arg-type]
    mode = _in_region(mode, equation)
    plan = mode.plan
    if plan is not None and equation.primitive.name in equations.CALLS:
        label = equation.params.get("name") or _label(equation)
        if label in plan.full:
            plan = None
        elif label in plan.low:
            plan, values = _wholly_low(plan), _all_to(values, values, plan.dtype)
        mode = replace(mode, plan=plan)
    recursion = _recursion(mode, equation)
    if recursion is not None:
        return recursion(_entered(mode, equation), equation, values)
    return _operation(plan, equation, values)


def _operation(plan: JaxPlan | None, equation: Any, values: list[Any]) -> list[Any]:
    """Run an operation that holds no functions to be cast, by the list that it is on."""
    name, params, avals = equation.primitive.name, equation.params, equation_avals(equation)
    if plan is None or any(not is_narrow(aval) and _is_wide(aval) for aval in avals):
        values = like(values, avals)
    elif name in plan.full:
        values = _all_to(values, avals, jnp.float32)
    elif name in plan.low:
        if name == "dot_general" and all(is_narrow(atom.aval) for atom in (*equation.invars, *equation.outvars)):
            return [_product(plan, equation, values)]
        values, params = _all_to(values, avals, plan.dtype), _returning(equation, plan.dtype)
    elif name in FOLLOW:
        dtype = _widest(equation.invars, values)
        if dtype is not None:
            values = _all_to(values, avals, dtype)
    else:
        values = like(values, avals)
    return bind(equation, values, params)


def _wide(mode: Mode, equation: Any, values: list[Any]) -> list[Any]:
    """Run an operation of a module that is forced into float32."""
    name, params = equation.primitive.name, equation.params
    recursion = _recursion(mode, equation)
    if recursion is not None:
        return recursion(replace(_entered(mode, equation), plan=None), equation, values)
    if name == "convert_element_type" and is_narrow(equation.outvars[0].aval):
        params = {**params, "new_dtype": jnp.dtype(jnp.float32)}
    elif name in FOLLOW | FULL | LOW and all(map(is_narrow, filter(_is_wide, values))):
        values, params = _all_to(values, values, jnp.float32), _returning(equation, jnp.float32)
    else:
        values = like(values, equation_avals(equation))
    return bind(equation, values, params)


def _returning(equation: Any, dtype: Any) -> Any:
    """Return the parameters of an operation, with this dtype in place of a low one that they set for the result."""
    params = equation.params
    if params.get("preferred_element_type") is None or not is_narrow(equation.outvars[0].aval):
        return params
    return {**params, "preferred_element_type": jnp.dtype(dtype)}


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
    with jax.numpy_dtype_promotion("standard"):  # the script's own mixtures were checked when it was traced
        dtype = jnp.result_type(*arrays)
    numbers = [float(value) for atom, value in arriving if isinstance(atom, core.Literal)]
    return dtype if _holds(dtype, numbers) else jnp.dtype(jnp.float32)


def _holds(dtype: Any, numbers: Sequence[float]) -> bool:
    """Return whether no finite number becomes infinite in a dtype."""
    largest = float(jnp.finfo(dtype).max)
    return all(not math.isfinite(number) or abs(number) <= largest for number in numbers)


def bind(equation: Any, values: Sequence[Any], params: Any) -> list[Any]:
    """Run an operation as it is, with other parameters."""
    bound = equation.primitive.get_bind_params(params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # a pair up to some JAX version
    if watch is not None and values and is_narrow(values[0]):
        watch(equation.primitive.name, str(values[0].dtype))
    with equation.ctx.manager:
        results = equation.primitive.bind(*functions, *values, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def _is_wide(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", bool), jnp.floating)


def _in_region(mode: Mode, equation: Any) -> Mode:
    mark = mark_of(equation.source_info.name_stack)
    if mode.plan is None or mark is None:
        return mode
    return replace(mode, plan=None if mark == "off" else replace(mode.plan, dtype=mark))  # type: ignore[arg-type]


def _label(equation: Any) -> str | None:
    info = getattr(equations.jaxpr_of(equations.function_of(equation)), "debug_info", None)
    return None if info is None else str(info.func_name).partition(" ")[0]


def _wholly_low(plan: JaxPlan) -> JaxPlan:
    """Return a plan by which every operation computes in the plan's dtype, those of derivative rules included."""
    return replace(plan, low=frozenset(primitives() - NESTED.keys()), full=frozenset())


# -- primitives that hold functions ---------------------------------------------------------------------------


def _recursion(mode: Mode, equation: Any) -> Callable[[Mode, Any, list[Any]], list[Any]] | None:
    """Return what runs an operation by running the functions that it holds; None where it is one operation."""
    own = NESTED.get(equation.primitive.name)
    if own is not None or (mode.plan is None and mode.region is None) or not equations.held(equation):
        return own
    return None if equations.is_as_traced(equation) else _recast


def _entered(mode: Mode, equation: Any) -> Mode:
    """Return how the functions are run that an operation holds."""
    mode = replace(mode, path=mode.within(equation))
    if mode.scale is None or equations.own_rules_of(equation):
        return mode
    rules = [
        rule for function in equations.held(equation) for rule in equations.own_rules(equations.jaxpr_of(function))
    ]
    if rules and equation.primitive.name in _PASSING_SCALES:
        return mode
    if note_scaled is not None and equation.primitive.name not in _NEVER_TRANSPOSED:
        for rule in rules:
            note_scaled(f"the derivative rule of a function ({rule})")
    return replace(mode, scale=None)


def _recast(mode: Mode, equation: Any, values: list[Any]) -> list[Any]:
    """Run an operation whose functions are cast inside, and have the types that they were traced with."""

    def cast(function: Any) -> Any:
        jaxpr, consts = equations.parts_of(function)
        closed = jax.make_jaxpr(
            lambda *args: like(_run(inner, jaxpr, consts, args), [variable.aval for variable in jaxpr.outvars])
        )(*(variable.aval for variable in jaxpr.invars))
        if function is not jaxpr:
            return closed
        if closed.consts and closed is not closed.jaxpr:  # this JAX has jaxprs that hold no arrays
            raise equations.unknown(equation)
        return closed.jaxpr

    inner = replace(mode, taps=False)
    return bind(equation, like(values, equation_avals(equation)), equations.recast(equation, cast))


def _jit(mode: Mode, equation: Any, values: list[Any]) -> list[Any]:
    closed = equations.function_of(equation)
    if _is_sharded(equation) and (mode.forced or mode.taps):
        return _run(mode, closed.jaxpr, closed.consts, values)
    if _is_sharded(equation):  # shardings belong to the call as it was traced
        return bind(equation, like(values, equation_avals(equation)), equation.params)
    inline = equations.parameter(equation, "inline")
    if closed.consts or mode.forced or mode.taps or mode.scale is not None or watch is not None:  # traced each time
        return _jitted(mode, lambda: closed.jaxpr, closed.consts, inline)(*values)
    kept = _kept.setdefault(closed.jaxpr, {})
    if (mode, inline) not in kept:
        kept[mode, inline] = _jitted(mode, weakref.ref(closed.jaxpr), (), inline)
    return kept[mode, inline](*values)


def _is_sharded(equation: Any) -> bool:
    """Return whether a compiled function has shardings of its own."""
    shardings = (equation.params.get(name, ()) for name in ("in_shardings", "out_shardings"))
    return any(hasattr(sharding, "device_set") for each in shardings for sharding in each)


# Of each function that the script compiles, what runs it, by how it is run: a new one would be compiled anew in each
# call, where its surroundings are not compiled.
_kept: weakref.WeakKeyDictionary[Any, dict[tuple[Mode, bool], Callable[..., list[Any]]]] = weakref.WeakKeyDictionary()


def _jitted(mode: Mode, jaxpr: Callable[[], Any], consts: Sequence[Any], inline: bool) -> Callable[..., list[Any]]:
    return jax.jit(lambda *args: _run(mode, jaxpr(), consts, args), inline=inline, keep_unused=True)


def equation_avals(equation: Any) -> list[Any]:
    """List the traced inputs of an equation."""
    return [atom.aval for atom in equation.invars]


def _checkpoint(mode: Mode, equation: Any, values: list[Any]) -> list[Any]:
    function = equations.function_of(equation)
    jaxpr, consts = equations.parts_of(function)
    options = {name: equations.parameter(equation, name) for name in ("prevent_cse", "policy")}
    return list(jax.checkpoint(lambda *args: _run(mode, jaxpr, consts, args), **options)(*values))


def _cond(mode: Mode, equation: Any, values: list[Any]) -> list[Any]:
    index, *operands = values

    def branch(closed: Any) -> Callable[..., Any]:
        return lambda *args: evaluate(mode, closed, args)

    branches = [branch(closed) for closed in equations.held(equation)]
    return jax.lax.switch(index, branches, *operands)


def _while(mode: Mode, equation: Any, values: list[Any]) -> list[Any]:
    first, second = (equations.parameter(equation, name) for name in ("cond_nconsts", "body_nconsts"))
    test, body = (equations.parameter(equation, name) for name in ("cond_jaxpr", "body_jaxpr"))
    test_consts, body_consts, start = values[:first], values[first : first + second], values[first + second :]
    start = like(start, equation_avals(equation)[first + second :])
    return jax.lax.while_loop(
        lambda carry: evaluate(mode, test, [*test_consts, *carry])[0],
        lambda carry: evaluate(mode, body, [*body_consts, *carry]),
        start,
    )


def _scan(mode: Mode, equation: Any, values: list[Any]) -> list[Any]:
    function, (consts, carried) = equations.function_of(equation), equations.scan_parts(equation)
    constants, start, rows = values[:consts], values[consts : consts + carried], values[consts + carried :]
    start = like(start, equation_avals(equation)[consts : consts + carried])

    def body(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
        results = evaluate(mode, function, [*constants, *carry, *row])
        return results[:carried], results[carried:]

    options = {name: equations.parameter(equation, name) for name in ("length", "reverse", "unroll")}
    last, stacked = jax.lax.scan(body, start, rows, **options)
    return [*last, *stacked]


def _shard_map(mode: Mode, equation: Any, values: list[Any]) -> list[Any]:
    function = equations.function_of(equation)
    jaxpr, consts = equations.parts_of(function)
    mode = replace(mode, taps=False)
    options = {name: equations.parameter(equation, name) for name in ("mesh", "in_specs", "out_specs", "check_vma")}
    axes = equations.parameter(equation, "newly_manual_axes", "manual_axes")  # the latter up to some version
    inner = jax.shard_map(
        lambda *args: tuple(like(_run(mode, jaxpr, consts, args), [variable.aval for variable in jaxpr.outvars])),
        axis_names=axes,
        **options,
    )
    return list(inner(*like(values, equation_avals(equation))))


def _custom_jvp(mode: Mode, equation: Any, values: list[Any]) -> list[Any]:
    """Keep the function's own derivative; both it and the function are cast."""
    mode = replace(mode, taps=False)
    avals, closed = equation_avals(equation), equations.function_of(equation)

    @jax.custom_jvp
    def function(*args: Any) -> list[Any]:
        return _run(mode, closed.jaxpr, closed.consts, args)

    @function.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        shapes = jax.eval_shape(function, *primals)
        own = jax.make_jaxpr(lambda p, t: jax.jvp(lambda *a: bind(equation, a, equation.params), p, t))
        wide = tuple(like(primals, avals)), tuple(like(tangents, avals))
        results = evaluate(mode, own(*wide), [*wide[0], *wide[1]])
        half = len(results) // 2
        return like(results[:half], shapes), like(results[half:], shapes)

    return function(*values)


def _custom_vjp(mode: Mode, equation: Any, values: list[Any]) -> list[Any]:
    """Keep the function's own derivative; both rules and the function are cast."""
    mode = replace(mode, taps=False)
    closed, count = equations.function_of(equation), equations.parameter(equation, "num_consts")
    structure: list[Any] = []
    values = like(values, equation_avals(equation))
    scales = [] if mode.scale is None else [mode.scale]  # an operand: the rule may run when this trace is over
    mode = replace(mode, scale=None)

    @jax.custom_vjp
    def function(scales: list[Any], *args: Any) -> list[Any]:
        return evaluate(mode, closed, args)

    def forward(scales: list[Any], *args: Any) -> tuple[list[Any], Any]:
        # Rules may ask which operands are differentiated, as Equinox's loops do, and refuse the others.
        varied = [place for place, arg in enumerate(args) if arg.perturbed and place >= count]
        values = [arg.value for arg in args]

        def both(*values: Any) -> list[Any]:
            def call(*inner: Any) -> list[Any]:
                operands = list(values)
                for place, value in zip(varied, inner, strict=True):
                    operands[place] = value
                return bind(equation, operands, equation.params)

            results, pullback = jax.vjp(call, *(values[place] for place in varied))
            leaves, tree = jax.tree.flatten(pullback)
            structure[:] = [len(results), tree, varied]
            return [*results, *leaves]

        computed = evaluate(mode, jax.make_jaxpr(both)(*values), values)
        return computed[: structure[0]], (computed[structure[0] :], [scale.value for scale in scales])

    def backward(residuals: Any, upstream: list[Any]) -> tuple[Any, ...]:
        leaves, scales = residuals
        upstream = [_instantiated(value) for value in upstream]
        upstream = _times(upstream, [1.0 / scale for scale in scales])
        own = jax.make_jaxpr(lambda ls, up: jax.tree.unflatten(structure[1], ls)(up))(leaves, upstream)
        computed = _times(evaluate(mode, own, [*leaves, *upstream]), scales)
        gradients = dict(zip(structure[2], computed, strict=True))
        return (None, *map(gradients.get, range(len(values))))

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function(scales, *values)


def _instantiated(cotangent: Any) -> Any:
    """Return a cotangent as an array where it is a symbolic zero."""
    if not isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return cotangent
    make = np.zeros if cotangent.dtype == jax.dtypes.float0 else jnp.zeros
    return make(cotangent.shape, cotangent.dtype)


def _times(values: Sequence[Any], factors: Sequence[Any]) -> list[Any]:
    """Return cotangents multiplied in float32 or wider, each in its own dtype."""

    def multiplied(value: Any) -> Any:
        dtype = jnp.result_type(value)
        if not factors or not jnp.issubdtype(dtype, jnp.inexact):
            return value
        return (value.astype(jnp.promote_types(dtype, jnp.float32)) * factors[0]).astype(dtype)

    return [multiplied(value) for value in values]


def _custom_vmap(mode: Mode, equation: Any, values: list[Any]) -> list[Any]:
    """Keep the function's own rule for batches; both it and the function are cast."""
    mode = replace(mode, taps=False)
    closed = equations.function_of(equation)

    @jax.custom_batching.custom_vmap
    def function(*args: Any) -> list[Any]:
        return evaluate(mode, closed, args)

    @function.def_vmap
    def batched(size: int, in_batched: list[bool], *args: Any) -> tuple[list[Any], list[bool]]:
        axes = tuple(0 if is_batched else None for is_batched in in_batched)
        native = jax.vmap(lambda *a: bind(equation, a, equation.params), axes, axis_size=size)
        results = evaluate(mode, jax.make_jaxpr(native)(*args), args)
        return results, [True] * len(results)

    return list(function(*like(values, equation_avals(equation))))


def _linear_call(mode: Mode, equation: Any, values: list[Any]) -> list[Any]:
    """Keep the function's own transpose; both it and the function are cast."""
    mode = replace(mode, taps=False)
    closed, avals = equations.function_of(equation), equation_avals(equation)
    count = sum(equations.parameter(equation, name) for name in ("num_callee_consts", "num_res"))
    values = like(values, avals)
    scales = [] if mode.scale is None else [mode.scale]
    mode = replace(mode, scale=None)

    def function(held: Any, inputs: list[Any]) -> list[Any]:
        return evaluate(mode, closed, [*held[0], *inputs])

    def transposed(held: Any, cotangents: list[Any]) -> list[Any]:
        residuals, scales = held
        cotangents = _times(cotangents, [1.0 / scale for scale in scales])

        def native(residuals: list[Any], cotangents: list[Any]) -> Any:
            linear = jax.linear_transpose(lambda *a: bind(equation, [*residuals, *a], equation.params), *avals[count:])
            return linear(cotangents)

        gradients = evaluate(mode, jax.make_jaxpr(native)(residuals, cotangents), [*residuals, *cotangents])
        return _times(gradients, scales)

    held = (values[:count], scales)
    return list(jax.custom_derivatives.linear_call(function, transposed, held, values[count:]))


NESTED: dict[str, Callable[[Mode, Any, list[Any]], list[Any]]] = {
    "jit": _jit,
    "pjit": _jit,
    "checkpoint": _checkpoint,
    "remat2": _checkpoint,
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    "shard_map": _shard_map,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "custom_vmap_call": _custom_vmap,
    "linear_call": _linear_call,
}
# No cotangents reach what they hold.
_NEVER_TRANSPOSED: Final = frozenset({"custom_jvp_call", "while"})
# Functions that they hold may close over a loss scale.
_PASSING_SCALES: Final = frozenset({"jit", "pjit", "checkpoint", "remat2", "cond", "scan", "shard_map"})
