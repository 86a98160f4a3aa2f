"""How the precision debugger looks into the toy: watch, force, replay."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import ampx
from ampx.backend import CastPlan, Device, leaves, map_leaves
from ampx.modules import FORCES, WATCHERS, CallInterceptors, Names, last_match
from ampx.numerics.probe import Probe, Replayed, Step, Watching
from ampx.numerics.rounding import HostLog, describe, round_to
from ampx.numerics.watching import GradientLog, Log
from ampx.scaling import check_loss
from toy import framework
from toy.framework import FLOATING, CastingState, Module, Tensor
from toy.verbs import casting_of

# Who stands around the calls of modules.
calls: Final = CallInterceptors(
    lambda: framework.around_modules.append(calls.run), lambda: framework.around_modules.remove(calls.run)
)


class Watcher:
    """Reads what runs inside its region."""

    def __init__(self, names: Names, watching: Watching) -> None:
        self.names = names
        self.log = HostLog(watching)
        self.inside = [("", "")]  # name and class of the modules that run, the outermost first

    def behind(self, tensor: Tensor, gradients: GradientLog, place: int) -> Tensor:
        """Return a tensor whose gradient is read."""

        def noted(upstream: tuple[Any, ...]) -> tuple[Any, ...]:
            self.log.put(gradients.at(place), place, tensor.dtype, upstream)
            return upstream

        return Tensor(tensor.data, tensor.dtype, [(tensor, noted)])

    def call(self, module: Module, forward: Callable[..., Any], inputs: tuple[Any, ...], options: Any) -> Any:
        """Read the output of a module, and its gradient once it is there."""
        name = self.names.of(module)
        if name is None:
            return forward(*inputs)
        where = name, type(module).__name__
        self.inside.append(where)
        try:
            output, seconds = self.log.timed(lambda: None, forward, inputs, options)
        finally:
            self.inside.pop()
        if not self.log.watching.watches(name):
            return output
        tensors = [tensor for value in inputs for tensor in leaves(value)]
        entry = self.log.add(*where, "", "forward", sizes := [len(tensor.data) for tensor in leaves(output)])
        entry.seconds, entry.inputs = seconds, [self.log.reduced(tensor.data) for tensor in tensors]
        for place, tensor in enumerate(leaves(output)):
            self.log.put(entry, place, tensor.dtype, tensor.data)
        gradients, places = GradientLog(self.log, *where, sizes=sizes), itertools.count()
        return map_leaves(output, lambda tensor: self.behind(tensor, gradients, next(places)))

    def around_operation(self, name: str, call: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Read the output of an operation, and the gradients of its inputs."""
        where = self.inside[-1]
        if not self.log.watching.watches(where[0]):
            return call(*inputs)
        logs = [GradientLog(self.log, *where, name, [len(tensor.data)]) for tensor in inputs]
        output = call(*(self.behind(tensor, log, 0) for tensor, log in zip(inputs, logs, strict=True)))
        self.log.note(where, name, "forward", output.dtype, output.data, [x.data for x in inputs])
        return output


class Forcer:
    """Computes modules in dtypes of their own."""

    def __init__(self, names: Names, dtypes: Mapping[str, str], simulated: frozenset[str]) -> None:
        self.names, self.dtypes, self.simulated = names, dtypes, simulated

    def call(self, module: Module, forward: Callable[..., Any], inputs: tuple[Any, ...], options: Any) -> Tensor:
        """Compute one."""
        name = self.names.of(module)
        dtype = None if name is None else last_match(name, self.dtypes)
        if dtype is None:
            return forward(*inputs)
        if dtype in self.simulated:
            return rounded(forward(*(rounded(x, dtype) for x in inputs)), dtype)
        with framework.autocast(CastingState(None if dtype == "float32" else dtype)):
            return forward(*(x.to(dtype) for x in inputs))


class ToyProbe(Probe):
    """Looks at the toy's modules."""

    def simulates(self, device: Device) -> frozenset[str]:
        """Name what the toy rounds to by itself."""
        return (
            frozenset({"float8_e4m3", "float8_e5m2"})
            if self.backend.capabilities.gradients == "implicit"
            else frozenset()
        )

    @contextmanager
    def watch(self, model: Module | None, watching: Watching) -> Iterator[Log]:
        """Read what modules compute."""
        names = Names(model, Module.named_modules)
        names.check(watching.modules, "watch")
        watcher = Watcher(names, watching)
        with calls.around((WATCHERS, watcher)):
            if watching.operations:
                framework.around_operations.append(watcher.around_operation)
            try:
                yield watcher.log
            finally:
                if watching.operations:
                    framework.around_operations.remove(watcher.around_operation)

    @contextmanager
    def force(self, model: Module | None, dtypes: Mapping[str, str]) -> Iterator[None]:
        """Compute modules in dtypes of their own."""
        simulated = self.simulates(self.backend.device("cpu"))
        for dtype in dtypes.values():
            if dtype not in FLOATING and dtype not in simulated:
                raise ampx.UnsupportedDtypeError(
                    f"dtype={dtype!r} is neither computed nor simulated by the toy; accepted: "
                    f"{', '.join([*FLOATING, *sorted(simulated)])}. Pass one of these."
                )
        names = Names(model, Module.named_modules)
        names.check(dtypes, "force")
        with calls.around((FORCES, Forcer(names, dtypes, simulated))):
            yield

    def replay(self, model: Module, step: Step, plan: CastPlan | None, scale: float = 1.0) -> Replayed:
        """Compute a batch and its gradients, and put everything back."""
        parameters = dict(model.named_parameters())
        random_state = framework.generator.getstate()
        calls = {module: module.calls for _, module in model.named_modules()}
        try:
            with framework.autocast(CastingState() if plan is None else casting_of(plan, True)):
                loss = step(model)
            check_loss(self.backend, loss, False, "replay")
            gradients = framework.gradients(self.backend.scale(loss, scale), list(parameters.values()))
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
