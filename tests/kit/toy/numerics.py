"""The verbs by which the precision debugger looks into the toy: watch, force, replay."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import ampx
from ampx.backend import CastPlan, Reading, Replayed, Stats, Step, Watching
from ampx.numerics.rounding import describe, round_to, sample
from toy import framework
from toy.framework import FLOATING, CastingState, Module, Tensor
from toy.verbs import ToyVerbs, casting_of


class Names:
    """The names of modules: of those of a model, or of every model that is called."""

    def __init__(self, model: Module | None, patterns: tuple[str, ...]) -> None:
        self.of: dict[int, str] = {}
        self.models: list[Module] = []
        if model is None:
            return
        self.add(model)
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in self.of.values()):
                raise ampx.UnsupportedOpError(
                    f"{pattern!r} matches no module of the model; accepted: patterns of "
                    f"{', '.join(map(repr, self.of.values()))}. Correct the pattern."
                )

    def add(self, model: Module) -> None:
        """Name the modules of a model, unless they have names."""
        if id(model) not in self.of:
            prefix = f"{type(model).__name__}:" if self.models else ""
            self.models.append(model)
            self.of |= {id(module): prefix + name for name, module in model.named_modules()}


class ToyWatch:
    """Reads what runs inside its region."""

    def __init__(self, names: Names, watching: Watching) -> None:
        self.names, self.watching = names, watching
        self.seen: list[Reading] = []
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.inside: list[Module] = []

    def readings(self) -> list[Reading]:
        """Return what was seen."""
        return list(self.seen)

    def stats(self, *values: Any) -> Stats:
        """Count."""
        return describe([number for value in values for number in value], self.watching.dtype)

    def note(self, operation: str, direction: Any, dtype: str, value: Any, **more: Any) -> None:
        """Add a reading of the innermost module."""
        module = self.inside[-1] if self.inside else None
        name = self.names.of.get(id(module), "")
        patterns = self.watching.modules
        if patterns and not any(fnmatchcase(name, pattern) for pattern in patterns):
            return
        key = name, operation, direction
        kept = sample(value, self.watching.samples) if self.watching.samples else None
        kind = type(module).__name__
        reading = Reading(
            name, kind, operation, direction, self.calls[key], dtype, self.stats(value), sample=kept, **more
        )
        self.calls[key] += 1
        self.seen.append(reading)

    def around_module(self, module: Module, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Read the output of a module, and its gradient once it is there."""
        if not self.inside:
            self.names.add(module)
        self.inside.append(module)
        try:
            started = time.perf_counter()
            output = call(x)
            seconds = time.perf_counter() - started if self.watching.times else None
            self.note("", "forward", output.dtype, output.data, inputs=self.stats(x.data), seconds=seconds)
        finally:
            self.inside.pop()

        def noted(upstream: tuple[Any, ...]) -> tuple[Any, ...]:
            self.inside.append(module)
            self.note("", "backward", output.dtype, upstream)
            self.inside.pop()
            return upstream

        return Tensor(output.data, output.dtype, [(output, noted)])

    def around_operation(self, name: str, call: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Read the output of an operation, and the gradients of its inputs."""
        module = self.inside[-1] if self.inside else None

        def reads(tensor: Tensor) -> Tensor:
            def noted(upstream: tuple[Any, ...]) -> tuple[Any, ...]:
                self.inside.append(module)  # type: ignore[arg-type]
                self.note(name, "backward", tensor.dtype, upstream)
                self.inside.pop()
                return upstream

            return Tensor(tensor.data, tensor.dtype, [(tensor, noted)])

        output = call(*map(reads, inputs))
        self.note(name, "forward", output.dtype, output.data, inputs=self.stats(*(tensor.data for tensor in inputs)))
        return output


class ToyNumerics(ToyVerbs):
    """Looks at the toy's modules."""

    @contextmanager
    def watch(self, model: Module | None, watching: Watching) -> Iterator[ToyWatch]:
        """Read what modules compute."""
        watch = ToyWatch(Names(model, watching.modules), watching)
        before = list(framework.around_modules), list(framework.around_operations)
        framework.around_modules.append(watch.around_module)
        if watching.operations:
            framework.around_operations.append(watch.around_operation)
        try:
            yield watch
        finally:
            framework.around_modules[:], framework.around_operations[:] = before

    @contextmanager
    def force(self, model: Module | None, dtypes: Mapping[str, str]) -> Iterator[None]:
        """Compute modules in dtypes of their own."""
        simulated = self.capabilities.simulates
        for dtype in dtypes.values():
            if dtype not in FLOATING and dtype not in simulated:
                raise ampx.UnsupportedDtypeError(
                    f"dtype={dtype!r} is neither computed nor simulated by the toy; accepted: "
                    f"{', '.join([*FLOATING, *sorted(simulated)])}. Pass one of these."
                )
        names = Names(model, tuple(dtypes))
        depth = [0]

        def around(module: Module, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            if not depth[0]:
                names.add(module)
            name = names.of.get(id(module))
            matches = [dtype for pattern, dtype in dtypes.items() if name is not None and fnmatchcase(name, pattern)]
            depth[0] += 1
            try:
                if not matches:
                    return call(x)
                if matches[-1] in simulated:
                    return rounded(call(rounded(x, matches[-1])), matches[-1])
                state = CastingState(None if matches[-1] == "float32" else matches[-1])
                with framework.autocast(state):
                    return call(x.to(matches[-1]))
            finally:
                depth[0] -= 1

        before = list(framework.around_modules)
        framework.around_modules.append(around)
        try:
            yield
        finally:
            framework.around_modules[:] = before

    def replay(self, model: Module, step: Step, plan: CastPlan | None, scale: float = 1.0) -> Replayed:
        """Compute a batch and its gradients, and put everything back."""
        parameters = dict(model.named_parameters())
        random_state = framework.generator.getstate()
        calls = {module: module.calls for _, module in model.named_modules()}
        try:
            with framework.autocast(CastingState() if plan is None else casting_of(plan, True)):
                loss = step(model)
            self.inspect_loss(loss, check_nan=False)
            gradients = framework.gradients(self.scale(loss, scale), list(parameters.values()))
        finally:
            framework.generator.setstate(random_state)
            for module, count in calls.items():
                module.calls = count
        return Replayed(
            loss.data[0],
            {
                name: round_to([value / scale for value in gradient.data], "float32")
                for name, gradient in zip(parameters, gradients, strict=True)
                if gradient is not None
            },
            {name: describe(parameter.data) for name, parameter in parameters.items()},
        )


def rounded(x: Tensor, dtype: str) -> Tensor:
    """Round a tensor, and the gradient that comes back, to a dtype that no tensor has."""

    def values(numbers: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(math.nan if math.isnan(value) else float(value) for value in round_to(numbers, dtype))

    return Tensor(values(x.data), x.dtype, [(x, values)])
