"""`watch`, `force` and `replay`: what values a traced step has, where, and in which dtype modules compute.

A step is traced with its modules marked (`scopes`), run in other dtypes where modules are forced (`interpreter`), and
differentiated. The trace of all that is run by `_Reader`, operation by operation, which reduces values where they are.
What runs in a loop of unknown length (`while`), under `shard_map`, or in a primitive that is not known, is not read.

Where a step is called inside of `watch` without `replay`, nothing is compiled, and what modules of flax receive and
return is read as it comes; so are the gradients where the step is differentiated.
"""

from __future__ import annotations

import functools
import math
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core, source_info_util

import ampx
from ampx.backend import CastPlan, Device
from ampx.callers import line_of
from ampx.formats import FORMATS
from ampx.modules import check_patterns
from ampx.numerics.probe import Direction, Probe, Reading, Replayed, Step, Watching
from ampx.numerics.timing import timed
from ampx.numerics.watching import Log, Reduced, read_stats, sample_slices

from . import casting, equations, interpreter, rules, scopes, taps
from .gradients import unscale
from .interpreter import Mode
from .state import path_name
from .taps import SIMULATED, is_floating, rounds

LOW: Final = frozenset({"float16", "bfloat16"})


# -- what is read of a value ----------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("dtype", "first", "step"))
def _measure(value: Any, dtype: str, first: int = 0, step: int = 0) -> tuple[Any, Any, Any]:
    """Reduce a floating array: five counts, three magnitudes, and every `step`-th element as float32.

    All is done with the bits of the numbers, since a CPU may take subnormal ones for zero.
    """
    wide = jnp.finfo(value.dtype).bits > 32
    number, integer, width = (np.float64, np.uint64, 64) if wide else (np.float32, np.uint32, 32)
    value = value.astype(number).ravel()
    bits = jax.lax.bitcast_convert_type(value, integer)
    sign = integer(1 << (width - 1))
    infinity = np.asarray(math.inf, number).view(integer)[()]
    magnitude = bits & ~sign
    finite, zero = magnitude < infinity, magnitude == 0

    def limit(bound: float, side: str) -> Any:
        with np.errstate(over="ignore"):
            rounded = np.asarray(bound, number)
        if side == "least" and float(rounded) < bound:
            rounded = np.nextafter(rounded, number(math.inf))
        return rounded.view(integer)[()]

    form = FORMATS[dtype]
    overflows = form.halfway if form.infinite else math.nextafter(form.halfway, math.inf)
    counts = [
        ~finite,
        magnitude > infinity,
        zero,
        ~zero & (magnitude <= limit(form.flushes_to, "most")),
        finite & (magnitude >= limit(overflows, "least")),
    ]
    top = integer(2 ** (width - 1) - 1)
    negative = bits >= sign
    ordered = jnp.where(negative, top - magnitude, sign + magnitude)
    last = integer(2**width - 1)
    extremes = [
        jnp.where(finite, magnitude, 0),
        jnp.where(finite & ~zero, magnitude, infinity),
        jnp.where(finite, ordered, last),
    ]
    # One reduction: several are compiled one after the other, and each reads the array.
    numbers = jax.lax.reduce(
        (*(count.astype(np.int32) for count in counts), *extremes),
        (*(np.int32(0) for _ in counts), integer(0), infinity, last),
        _join,
        (0,),
    )
    sample = value[first::step].astype(np.float32) if step else jnp.zeros(0, np.float32)
    return jnp.stack(numbers[: len(counts)]), jnp.stack(numbers[len(counts) :]), sample


def _join(numbers: tuple[Any, ...], others: tuple[Any, ...]) -> tuple[Any, ...]:
    """Join the numbers of two parts of an array: counts add up, and the last three are extremes."""
    joined = [number + other for number, other in zip(numbers[:-3], others[:-3], strict=True)]
    largest, smallest, lowest = zip(numbers[-3:], others[-3:], strict=True)
    return (*joined, jnp.maximum(*largest), jnp.minimum(*smallest), jnp.minimum(*lowest))


def _numbers(measured: tuple[Any, Any, Any]) -> list[float]:
    """Return the measures of an array on the host as the numbers of `NUMBERS`."""
    counts, extremes, _ = measured
    kind = np.float64 if extremes.dtype == np.uint64 else np.float32
    width = 8 * extremes.dtype.itemsize
    largest, least, ordered = (int(number) for number in extremes)
    sign = 1 << (width - 1)

    def number_of(bits: int) -> float:
        return float(np.asarray(bits, extremes.dtype).view(kind))

    negative = ordered < sign
    lowest = -number_of(sign - 1 - ordered) if negative else number_of(ordered - sign)
    lowest = math.inf if ordered == 2**width - 1 else lowest + 0.0  # -0.0 is 0.0
    nonfinite, nan, zeros, flushed, overflowed = (int(count) for count in counts)
    return [nonfinite, nan, zeros, number_of(largest), number_of(least), lowest, flushed, overflowed]


def _reduced(elements: Sequence[int], measured: Sequence[Any]) -> list[Reduced]:
    return list(zip(elements, measured, strict=True))


def _read(measured: Sequence[Any]) -> list[list[float]]:
    """Return the numbers of measures that are on the host."""
    return [_numbers(own) for own in measured]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["value", "inputs"],
    meta_fields=["module", "kind", "operation", "direction", "dtype", "place", "seconds", "elements"],
)
@dataclass
class _Entry:
    """One value that was read; its numbers are on the device.

    Attributes:
        value: Measures of its arrays.
        inputs: Measures of what the module or operation received.
        elements: Of each array of the value, and of the inputs.
    """

    value: list[Any]
    inputs: list[Any]
    module: str
    kind: str
    operation: str
    direction: Direction
    dtype: str
    place: str
    seconds: float | None
    elements: tuple[tuple[int, ...], tuple[int, ...]]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["turn"], meta_fields=["length", "backwards"])
@dataclass
class _Loop:
    """What a loop read: `turn`, whose arrays have a first axis more, of as many rows as the loop has turns."""

    turn: list[Any]
    length: int
    backwards: bool


@functools.partial(jax.tree_util.register_dataclass, data_fields=["index", "branches"], meta_fields=[])
@dataclass
class _Choice:
    """What the branches of a condition read; only that at `index` was run."""

    index: Any
    branches: list[list[Any]]


def _flatten(entries: Sequence[Any]) -> Iterator[_Entry]:
    """List what was read in order of execution; arrays are those of NumPy."""
    for entry in entries:
        if isinstance(entry, _Loop):
            for turn in reversed(range(entry.length)) if entry.backwards else range(entry.length):
                yield from _flatten(jax.tree.map(lambda array, turn=turn: array[turn], entry.turn))
        elif isinstance(entry, _Choice):
            yield from _flatten(entry.branches[int(entry.index)])
        else:
            yield entry


# -- regions --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class WatchRegion:
    """A region of `watch`: what it looks at, and what it has seen.

    Attributes:
        watching: What to look at.
        entries: What was read, on the device.
    """

    watching: Watching
    entries: list[Any] = field(default_factory=list)

    def readings(self) -> list[Reading]:
        """Return what was seen so far, in order of execution. Sync: one a device."""
        log = Log(self.watching, _read, list)
        for seen in _flatten(jax.device_get(self.entries)):
            entry = log.add(seen.module, seen.kind, seen.operation, seen.direction)
            entry.dtype, entry.seconds, entry.place = seen.dtype, seen.seconds, seen.place
            entry.value = _reduced(seen.elements[0], seen.value)
            entry.inputs = _reduced(seen.elements[1], seen.inputs)
            entry.samples = {place: sample for place, (_, _, sample) in enumerate(seen.value)}
        return log.readings()


@contextmanager
def watch(model: Any, watching: Watching) -> Iterator[WatchRegion]:
    """Read what is computed in this thread; compiled functions run uncompiled inside, and loops turn by turn.

    Raises:
        UnsupportedOpError: A pattern matches no module of flax nnx; where the model is no such module, `replay` raises.
        UnsupportedDtypeError: `watching.dtype` is not known.
    """
    if watching.dtype not in FORMATS:
        raise ampx.UnsupportedDtypeError(
            f"watch got dtype={watching.dtype!r}; accepted: {', '.join(FORMATS)}. Pass one of these."
        )
    _check_patterns(model, watching.modules, "watch")
    region, before = WatchRegion(watching), interpreter.regions.watches
    heard = taps.listening.heard
    interpreter.regions.watches = (*before, region)
    try:
        with scopes.naming(model, True), jax.disable_jit():
            taps.listening.heard = Reader(interpreter.regions.watches).hear
            yield region
    finally:
        interpreter.regions.watches, taps.listening.heard = before, heard


@contextmanager
def force(model: Any, dtypes: Mapping[str, str]) -> Iterator[None]:
    """Compute modules in other dtypes in the next replays in this thread.

    Raises:
        UnsupportedOpError: As in `watch`.
        UnsupportedDtypeError: A dtype is not known.
    """
    accepted = ("float32", *sorted(LOW), *SIMULATED)
    for pattern, dtype in dtypes.items():
        if dtype not in accepted and not rounds(dtype):
            raise ampx.UnsupportedDtypeError(
                f"force got {dtype!r} for {pattern!r}; accepted: {', '.join(accepted)}. Pass one of these."
            )
    _check_patterns(model, dtypes, "force")
    with interpreter.forced((*interpreter.forced.value, *dtypes.items())):
        yield


def _check_patterns(model: Any, patterns: Iterable[str], call: str) -> None:
    names = [name for name, _ in scopes.module_names(model).values()]
    if names:
        require_matches(patterns, names, call)


def require_matches(patterns: Iterable[str], names: Collection[str], call: str) -> None:
    """Raise where a pattern matches none of the names of modules.

    Raises:
        UnsupportedOpError: There is one.
    """
    advice = "Pass one of these names; a module is one of flax, or a jax.named_scope."
    check_patterns(call, patterns, sorted(names), advice)


# -- reading --------------------------------------------------------------------------------------------------


class Reader:
    """Runs a trace and measures what its taps, and its operations, see."""

    def __init__(self, watches: Sequence[WatchRegion]) -> None:
        self._watches = watches
        self._received: list[tuple[str, list[Any], float]] = []
        self.seen: set[str] = set()

    def run(self, closed: Any, inputs: Sequence[Any], loss_first: bool) -> tuple[list[Any], list[list[Any]]]:
        """Return the results of a closed jaxpr, and what was read, for every region.

        Where the first result is the loss, and nothing else but gradients is returned, what the loss does not need
        belongs to the backward pass, though it is computed in the forward pass.
        """
        entries: list[list[Any]] = [[] for _ in self._watches]
        derivative = _unneeded(closed.jaxpr) if loss_first else frozenset()
        return self._run(closed.jaxpr, closed.consts, inputs, "", entries, True, derivative), entries

    def hear(self, values: list[Any], **names: str) -> None:
        """Read what has passed a tap outside of traces."""
        entries = [region.entries for region in self._watches]
        self._tap(values, "", entries, True, **names)

    def _run(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        inputs: Sequence[Any],
        path: str,
        entries: list[list[Any]],
        eager: bool,
        derivative: frozenset[int] = frozenset(),
    ) -> list[Any]:
        computed: dict[Any, Any] = {}
        last_use: dict[Any, int] = {}
        for place, equation in enumerate(jaxpr.eqns):
            last_use.update((atom, place) for atom in equation.invars if not isinstance(atom, core.Literal))
        kept = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else computed[atom]

        for variables, values in ((jaxpr.constvars, consts), (jaxpr.invars, inputs)):
            computed.update(zip(variables, values, strict=True))
        for place, equation in enumerate(jaxpr.eqns):
            values = [read(atom) for atom in equation.invars]
            stack = str(equation.source_info.name_stack)
            within = f"{path}/{stack}" if path and stack else path or stack
            if place in derivative:
                within = f"transpose({within})"
            with interpreter.named_like(equation):
                results = self._equation(equation, values, within, entries, eager)
            computed.update(zip(equation.outvars, results, strict=True))
            for atom in equation.invars:  # arrays that nothing needs any more are freed
                if not isinstance(atom, core.Literal) and last_use[atom] == place and atom not in kept:
                    computed.pop(atom, None)
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(
        self, equation: Any, values: list[Any], path: str, entries: list[list[Any]], eager: bool
    ) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        if name == "ampx_tap":
            self._tap(values, path, entries, eager, **params)
            return values
        if name in equations.CALLS:
            function = equations.function_of(equation)
            inner, consts = equations.parts_of(function)
            return self._run(inner, consts, values, path, entries, eager)
        if name == "scan":
            return self._scan(equation, values, path, entries)
        if name == "cond":
            return self._cond(equation, values, path, entries)
        results = interpreter.bind(equation, values, params)
        for region, own in zip(self._watches, entries, strict=True):
            if region.watching.operations:
                self._operation(region.watching, equation, values, results, path, own)
        return results

    def _scan(self, equation: Any, values: list[Any], path: str, entries: list[list[Any]]) -> list[Any]:
        params = equation.params
        consts, carried = equations.scan_parts(equation)
        closed = equations.function_of(equation)
        constants, start, rows = values[:consts], values[consts : consts + carried], values[consts + carried :]

        def body(carry: list[Any], row: list[Any]) -> tuple[list[Any], Any]:
            own: list[list[Any]] = [[] for _ in entries]
            results = self._run(closed.jaxpr, closed.consts, [*constants, *carry, *row], path, own, False)
            return results[:carried], (results[carried:], own)

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        last, (stacked, turns) = jax.lax.scan(body, start, rows, **options)
        for own, turn in zip(entries, turns, strict=True):
            if turn:
                own.append(_Loop(turn, params["length"], params["reverse"]))
        return [*last, *stacked]

    def _cond(self, equation: Any, values: list[Any], path: str, entries: list[list[Any]]) -> list[Any]:
        index, *operands = values
        branches = equations.held(equation)

        def run(branch: Any, *operands: Any) -> tuple[list[Any], list[list[Any]]]:
            own: list[list[Any]] = [[] for _ in entries]
            return self._run(branch.jaxpr, branch.consts, operands, path, own, False), own

        kinds = [jax.eval_shape(functools.partial(run, branch), *operands)[1] for branch in branches]

        def taken(place: int) -> Callable[..., Any]:
            def call(*operands: Any) -> Any:
                results, own = run(branches[place], *operands)
                read = [jax.tree.map(lambda kind: jnp.zeros(kind.shape, kind.dtype), kind) for kind in kinds]
                read[place] = own
                return results, read

            return call

        results, read = jax.lax.switch(index, [taken(place) for place in range(len(branches))], *operands)
        for place, own in enumerate(entries):
            if any(branch[place] for branch in read):
                own.append(_Choice(jnp.clip(index, 0, len(branches) - 1), [branch[place] for branch in read]))
        return results

    def _tap(
        self,
        values: list[Any],
        path: str,
        entries: list[list[Any]],
        eager: bool,
        module: str,
        kind: str,
        direction: str,
    ) -> None:
        if "rematted_computation" in path or direction == "tangent":
            return
        self.seen.add(module)
        timed = eager and any(region.watching.times for region in self._watches) and direction != "backward"
        if timed:
            jax.block_until_ready(values)
        if direction == "inputs":
            self._received.append((module, values, time.perf_counter()))
            return
        inputs, seconds = [], None
        if direction == "forward":
            while self._received:
                received, arrays, since = self._received.pop()
                if received == module:
                    inputs, seconds = arrays, time.perf_counter() - since if timed else None
                    break
        for region, own in zip(self._watches, entries, strict=True):
            watching = region.watching
            if not watching.watches(module):
                continue
            own.append(
                self._entry(
                    watching, values, inputs, module, kind, "", direction, "", seconds if watching.times else None
                )
            )

    def _operation(
        self, watching: Watching, equation: Any, values: list[Any], results: list[Any], path: str, own: list[Any]
    ) -> None:
        around = scopes.scopes_of(path)
        module, kind = around[-1] if around else ("", "")
        self.seen.update(scope.name for scope in around)
        if "rematted_computation" in path or not watching.watches(module):
            return
        outputs = [value for value in results if is_floating(value)]
        if not outputs:
            return
        inputs = [value for value in values if is_floating(value)]
        direction: Direction = "backward" if "transpose(" in path else "forward"
        name, place = _PRODUCTS.get(equation.primitive.name, equation.primitive.name), place_of(equation)
        own.append(self._entry(watching, outputs, inputs, module, kind, name, direction, place, None))

    def _entry(
        self, watching: Watching, values: list[Any], inputs: list[Any], module: str, kind: str, operation: str,
        direction: Any, place: str, seconds: float | None
    ) -> _Entry:  # fmt: skip
        sizes = tuple(value.size for value in values), tuple(value.size for value in inputs)
        sampled = sample_slices(sizes[0], watching.samples) if watching.samples else [slice(0, None, 0)] * len(values)
        with jax.disable_jit(False):
            measured = (
                [
                    _measure(value, watching.dtype, own.start, own.step)
                    for value, own in zip(values, sampled, strict=True)
                ],
                [_measure(value, watching.dtype) for value in inputs],
            )
        return _Entry(
            *measured,
            module,
            kind,
            operation,
            direction,
            str(values[0].dtype),
            place,
            seconds,
            sizes,
        )


def _unneeded(jaxpr: Any) -> frozenset[int]:
    """Return the places of the operations that the first result does not depend on; casts are kept for both passes."""
    needed = set(map(id, jaxpr.outvars[:1]))
    places = set()
    for place, equation in reversed(list(enumerate(jaxpr.eqns))):
        if any(id(variable) in needed for variable in equation.outvars):
            needed.update(map(id, equation.invars))
        elif equation.primitive.name != "convert_element_type":
            places.add(place)
    return frozenset(places)


# The product in low precision has the name that it has in float32, so that replays can be compared.
_PRODUCTS: Final = {"ampx_product": "dot_general"}
_FRAME: Final = re.compile(r"(.*?):(\d+)(?::\d+)? \(.*\)")
# What stands between a user's line and JAX.
_LIBRARIES: Final = ("flax", "optax", "haiku", "equinox", "ampx", "ampx_jax")


def place_of(equation: Any) -> str:
    """Return the line of the user's code that called an operation, as `"file:line"`; "" where it is not known."""
    # A user's own folder may have the name of a library, so libraries are recognised by where they are installed.
    paths = [path for name in _LIBRARIES for path in getattr(sys.modules.get(name), "__path__", ())]
    folders = tuple(os.path.join(path, "") for path in paths)
    for line in reversed(source_info_util.summarize(equation.source_info, 30).splitlines()):
        frame = _FRAME.fullmatch(line)
        if frame is not None and not frame[1].startswith(folders):
            return line_of(frame[1], int(frame[2]))
    return ""


# -- replay ---------------------------------------------------------------------------------------------------


def _trainable(leaf: Any) -> bool:
    return casting.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


def _split(model: Any) -> tuple[dict[str, Any], Callable[[list[Any]], Any]]:
    """Return what is trained of a model, by name, and a function that makes such a model of new values."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(model, nnx.Module):
        graph, trained, rest = nnx.split(model, nnx.Param, ...)
        values, kept = jax.tree.flatten(rest)
        tree, rebuild = trained, lambda tree: nnx.merge(graph, tree, jax.tree.unflatten(kept, values))
    else:
        tree, rebuild = model, lambda tree: tree
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    named = {path_name(path): leaf for path, leaf in paths if _trainable(leaf)}
    leaves = [leaf for _, leaf in paths]
    places = [place for place, leaf in enumerate(leaves) if _trainable(leaf)]

    def merge(values: list[Any]) -> Any:
        filled = list(leaves)
        for place, value in zip(places, values, strict=True):
            filled[place] = value
        return rebuild(jax.tree.unflatten(structure, filled))

    return named, merge


def watched() -> tuple[WatchRegion, ...]:
    """Return the regions of `watch` that this thread is in."""
    return interpreter.regions.watches


def read(closed: Any, arrays: Sequence[Any]) -> list[Any]:
    """Run a trace of concrete arrays, and let the regions of `watch` read it."""
    watches = interpreter.regions.watches
    with jax.disable_jit(False):
        results, entries = Reader(watches).run(closed, arrays, False)
    for region, own in zip(watches, entries, strict=True):
        region.entries.extend(own)
    return results


def replay(model: Any, step: Step, plan: CastPlan | None, scale: float = 1.0) -> Replayed:
    """Compute the loss of a batch and its gradients, one operation after another; the model is not touched.

    Raises:
        LossError: What `step` returned is no loss.
        UnsupportedOpError: A pattern of a region around matches no module.
    """
    watches = interpreter.regions.watches
    named, mode, both = _differentiated(model, step, plan, bool(watches))
    arrays = [jnp.asarray(leaf) for leaf in named.values()]
    reader = Reader(watches)
    with casting.active(None), jax.disable_jit(False):
        closed = jax.make_jaxpr(both)(arrays, jnp.float32(scale))
        (loss, *gradients), entries = reader.run(closed, [*arrays, jnp.float32(scale)], True)
        measured = [_measure(array, "float32") for array in arrays]
    names = mode.seen | reader.seen
    for region, own in zip(watches, entries, strict=True):
        require_matches(region.watching.modules, names, "watch")
        region.entries.extend(own)
    require_matches(dict(interpreter.forced.value), names, "force")
    reached = _reached(closed.jaxpr)
    loss, gradients, measured = jax.device_get((loss, gradients, measured))
    stats = read_stats(
        [_reduced([leaf.size], [own]) for leaf, own in zip(named.values(), measured, strict=True)], _read
    )
    return Replayed(
        float(loss),
        {
            name: np.asarray(gradient, np.float32) / np.float32(scale)
            for name, gradient, counts in zip(named, gradients, reached, strict=True)
            if counts
        },
        dict(zip(named, stats, strict=True)),
    )


def clock(model: Any, step: Step, plan: CastPlan | None) -> Callable[[], float]:
    """Return what times the loss of a batch and its gradients, compiled as a training step is.

    Where something is cast, gradients are looked at, as the optimizer will do.
    """
    named, _, both = _differentiated(model, step, plan, False)
    arrays = [jnp.asarray(leaf) for leaf in named.values()]

    def compute(arrays: list[Any], scale: Any) -> tuple[Any, ...]:
        loss, gradients = both(arrays, scale)
        return loss, gradients, None if plan is None else unscale(gradients, scale)[1]

    with casting.active(None), jax.disable_jit(False):
        compiled = jax.jit(compute).lower(arrays, jnp.float32(1.0)).compile()
    return lambda: timed(lambda: jax.block_until_ready(compiled(arrays, jnp.float32(1.0))))


def _differentiated(
    model: Any, step: Step, plan: CastPlan | None, seen: bool
) -> tuple[dict[str, Any], Mode, Callable[[list[Any], Any], tuple[Any, list[Any]]]]:
    """Return what is trained of a model, how operations are run, and a function that returns loss and gradients.

    Args:
        model: Parameters, or a module of nnx.
        step: Returns the loss.
        plan: How to cast.
        seen: Modules are watched.
    """
    named, merge = _split(model)
    mode = interpreter.mode_of(None if plan is None else rules.resolve(plan))

    def loss_of(arrays: list[Any]) -> Any:
        own = merge(arrays)
        with scopes.naming(own, seen):
            return _checked(step(own))

    def both(arrays: list[Any], scale: Any) -> tuple[Any, list[Any]]:
        closed = jax.make_jaxpr(loss_of)(arrays)
        loss, pull = jax.vjp(lambda arrays: interpreter.evaluate(mode, closed, arrays)[0].astype(jnp.float32), arrays)
        return loss, pull(scale)[0]

    return named, mode, both


def _checked(loss: Any) -> Any:
    if casting.is_array(loss) and loss.shape == () and jnp.issubdtype(loss.dtype, jnp.floating):
        return loss
    kind = f"an array of shape {loss.shape}, {loss.dtype}" if casting.is_array(loss) else type(loss).__name__
    raise ampx.LossError(
        f"replay got a step that returned {kind}; accepted: a function that returns a floating scalar. Return the "
        f"loss of one batch, not scaled."
    )


def _reached(jaxpr: Any) -> list[bool]:
    """Return which of the gradients depend on the scale, the last input: the others are zeros that JAX filled in."""
    depend = {jaxpr.invars[-1]}
    for equation in jaxpr.eqns:
        if any(not isinstance(atom, core.Literal) and atom in depend for atom in equation.invars):
            depend.update(equation.outvars)
    return [not isinstance(atom, core.Literal) and atom in depend for atom in jaxpr.outvars[1:]]


class JaxProbe(Probe):
    """Looks into the operations of a traced step."""

    watches_uncompiled: ClassVar[bool] = True
    watch = staticmethod(watch)
    force = staticmethod(force)
    replay = staticmethod(replay)
    clock = staticmethod(clock)

    def simulates(self, device: Device) -> frozenset[str]:
        return frozenset(SIMULATED)

    def peak_memory(self) -> int | None:
        """Return the peak of the first device's allocator; None where it does not count, as on a CPU."""
        stats = jax.local_devices()[0].memory_stats()
        return None if stats is None else stats.get("peak_bytes_in_use")
