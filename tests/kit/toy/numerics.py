"""How the precision debugger looks into the toy: watch, force, replay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import ampx
from ampx.backend import CastPlan, Device, leaves, map_leaves
from ampx.formats import find_digits
from ampx.modules import FORCES, WATCHERS, CallInterceptors, Names
from ampx.numerics.forcing import Forcer
from ampx.numerics.probe import Probe, Replayed, Step, Watching
from ampx.numerics.rounding import describe, host_tensors, round_to
from ampx.numerics.watching import Watcher, Where
from ampx.scaling import check_loss
from toy import framework
from toy.framework import FLOATING, CastingState, Module, Tensor
from toy.verbs import casting_of

# Who stands around the calls of modules.
calls: Final = CallInterceptors(
    lambda: framework.around_modules.append(calls.run), lambda: framework.around_modules.remove(calls.run)
)


TENSORS: Final = host_tensors(
    floating=lambda tree: (leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)),
    dtype=lambda tensor: tensor.dtype,
    values=lambda tensor: tensor.data,
)


def behind(tensor: Tensor, listen: Callable[[Tensor], None]) -> Tensor:
    """Return a tensor whose gradient is read."""

    def noted(upstream: tuple[Any, ...]) -> tuple[Any, ...]:
        listen(Tensor(upstream, tensor.dtype))
        return upstream

    return Tensor(tensor.data, tensor.dtype, [(tensor, noted)])


class ToyWatcher(Watcher):
    """Reads what runs inside its region."""

    def tapped(self, value: Any, where: Where, operation: str = "") -> Any:
        """Return a value whose gradients are read when they come."""
        listeners = iter(self.listeners(where, list(leaves(value)), operation))
        return map_leaves(value, lambda tensor: behind(tensor, next(listeners)))

    def around_operation(self, name: str, call: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Read the output of an operation, and the gradients of its inputs."""
        where = self.where
        if not self.watching.watches(where[0]):
            return call(*inputs)
        output = call(*(self.tapped(tensor, where, name) for tensor in inputs))
        self.note(where, name, "forward", output, self.reduced(inputs))
        return output


@contextmanager
def operations_watched(watcher: ToyWatcher) -> Iterator[None]:
    """Have a watcher see the toy's operations."""
    framework.around_operations.append(watcher.around_operation)
    try:
        yield
    finally:
        framework.around_operations.remove(watcher.around_operation)


class ToyForcer(Forcer):
    """Computes modules in dtypes of their own."""

    def __init__(self, names: Names, dtypes: Mapping[str, str], simulated: frozenset[str]) -> None:
        for dtype in dtypes.values():
            if dtype not in FLOATING and dtype not in simulated and find_digits(dtype) is None:
                raise ampx.UnsupportedDtypeError(
                    f"dtype={dtype!r} is neither computed nor simulated by the toy; accepted: "
                    f"{', '.join([*FLOATING, *sorted(simulated)])}. Pass one of these."
                )
        super().__init__(names, dtypes)

    def rounds(self, dtype: str) -> bool:
        """Return whether the toy rounds to a dtype by itself."""
        return dtype not in FLOATING

    def rounded(self, tree: Any, dtype: str, gradients: bool) -> Any:
        """Round the tensors of a tree, and the gradients that come back."""
        return map_leaves(tree, lambda tensor: rounded(tensor, dtype))

    def computing(self, dtype: str) -> AbstractContextManager[None]:
        """Return a region that computes in a dtype."""
        return framework.autocast(CastingState(None if dtype == "float32" else dtype))

    def cast(self, tree: Any, dtype: str) -> Any:
        """Cast the tensors of a tree."""
        return map_leaves(tree, lambda tensor: tensor.to(dtype))


class ToyProbe(Probe):
    """Looks at the toy's modules."""

    def simulates(self, device: Device) -> frozenset[str]:
        """Name what the toy rounds to by itself."""
        return (
            frozenset({"float8_e4m3", "float8_e5m2"})
            if self.backend.capabilities.gradients == "implicit"
            else frozenset()
        )

    def watch(self, model: Module | None, watching: Watching) -> AbstractContextManager[Watcher]:
        """Read what modules compute."""
        watcher = ToyWatcher(TENSORS, watching, Names(model, Module.named_modules, kinds=(Module,)))
        return watcher.looking([calls.around((WATCHERS, watcher))], operations_watched)

    @contextmanager
    def force(self, model: Module | None, dtypes: Mapping[str, str]) -> Iterator[None]:
        """Compute modules in dtypes of their own."""
        names = Names(model, Module.named_modules, kinds=(Module,))
        simulated = self.simulates(self.backend.device("cpu"))
        with calls.around((FORCES, ToyForcer(names, dtypes, simulated))):
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
