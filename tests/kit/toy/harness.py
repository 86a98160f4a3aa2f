"""The toy harnesses: all that the kit asks of an author."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from script_calls import call_part

from ampx.testing.harness import Chosen, Harness
from toy import framework as toy
from toy.framework import Dense, Dropout, Module, Norm, Optimizer, Tensor, Twice


class ImplicitToyHarness(Harness):
    """The toy framework used like PyTorch."""

    framework: ClassVar[str] = "toy"
    plugin: ClassVar[str] = "toy.plugin"
    copies: ClassVar[tuple[str, ...]] = ("deepcopy",)
    tells_rates: ClassVar[bool] = True

    def tensor(self, values: Sequence[float], dtype: str) -> Tensor:
        """Make a vector."""
        return Tensor(values, dtype)

    def dtype_of(self, tensor: Tensor) -> str:
        """Name a dtype."""
        return tensor.dtype

    def numbers(self, tensor: Tensor) -> list[float]:
        """Read a tensor."""
        return list(tensor.data)

    def parameter(self, values: Sequence[float]) -> Tensor:
        """Make a parameter."""
        return Tensor(values, parameter=True)

    def optimizer(self, parameters: list[Tensor], momentum: bool) -> Optimizer:
        """Make a raw optimizer."""
        return Optimizer(parameters, lr=0.5, momentum=0.5 if momentum else 0.0)

    def set_rate(self, raw: Optimizer, rate: float) -> None:
        """Set the only one."""
        raw.lr = rate

    def optimizer_state(self, raw: Optimizer) -> Any:
        """Read counters and momentum."""
        return raw.steps, [None if buffer is None else buffer.data for buffer in raw.buffers]

    def loss(self, parameters: list[Tensor], gradients: Chosen) -> Tensor:
        """Compute a loss with chosen derivatives."""
        return toy.pull(parameters, gradients)

    def backward(self, scaled: Tensor, parameters: list[Tensor]) -> list[Tensor] | None:
        """Run backward."""
        scaled.backward()
        return None

    def gradients(self, parameters: list[Tensor]) -> list[list[float] | None]:
        """Read gradients."""
        return [None if parameter.grad is None else list(parameter.grad.data) for parameter in parameters]

    def casting(self) -> Any:
        """Read the switch."""
        return toy.casting_state()

    def computes_in(self) -> str:
        """Compute a product."""
        return toy.product(Tensor([2.0]), Tensor([3.0])).dtype

    def operation(self) -> Any:
        """Name the product."""
        return "product"

    def chain(self, weights: Sequence[float], inputs: Sequence[float], noise: bool = False) -> tuple[Any, Any, Any]:
        """Multiply by one weight after the other."""
        layers: dict[str, Module] = {
            f"layer{index}": Dense(Tensor([weight], parameter=True)) for index, weight in enumerate(weights)
        }
        names = list(layers)
        if noise:
            layers["dropout"] = Dropout()
        model = Module(**layers)
        return model, lambda model: toy.total(model(Tensor(inputs))), names

    def fork(self, inputs: Sequence[float]) -> tuple[Any, Any, str]:
        """Return two tensors from a module."""

        def step(model: Module) -> Tensor:
            first, second = model(Tensor(inputs))
            return toy.total(first) + toy.total(second) * 3.0

        return Module(layer=Dense(Tensor([1.0], parameter=True)), fork=Twice()), step, "fork"

    def larger(self, model: Module) -> tuple[Any, str, Any]:
        """Make a module with one part."""
        larger = Module(part=model)
        return larger, "part", partial(call_part, larger, "part")

    def shipped(self, weights: Sequence[float], norm: bool = False) -> tuple[Any, list[str]]:
        """Multiply by one weight after the other, and normalize."""
        model, _, names = self.chain(weights, ())
        if norm:
            model.modules["norm"] = Norm(Tensor([1.0], parameter=True))
            names = [*names, "norm"]
        return model, names

    def batch(self, inputs: Sequence[float]) -> Tensor:
        """Make a vector."""
        return Tensor(inputs)

    def stored(self, model: Module, layer: str) -> set[str]:
        """Read the dtypes of the parameters."""
        return {parameter.dtype for parameter in dict(model.named_modules())[layer].parameters.values()}

    def model_state(self, model: Module) -> Any:
        """Read weights, gradients, buffers and the random state."""
        parameters = [parameter for _, parameter in model.named_parameters()]
        return (
            [parameter.data for parameter in parameters],
            self.gradients(parameters),
            [module.calls for _, module in model.named_modules()],
            toy.generator.getstate(),
        )

    def parameters_of(self, model: Module) -> list[Tensor]:
        """List the parameters."""
        return [parameter for _, parameter in model.named_parameters()]


class ExplicitToyHarness(ImplicitToyHarness):
    """The toy framework used like JAX."""

    framework: ClassVar[str] = "toy-explicit"

    def backward(self, scaled: Tensor, parameters: list[Tensor]) -> list[Any] | None:
        """Compute gradients as values."""
        return toy.gradients(scaled, parameters)

    def plain_step(self, raw: Optimizer, gradients: list[Any] | None) -> None:
        """Call the framework's own verb."""
        raw.update(gradients or [])

    def watch_update(self, raw: Optimizer, watch: Callable[[], object]) -> None:
        """Watch that verb."""
        update = raw.update

        def watched(grads: Sequence[Tensor | None]) -> None:
            watch()
            update(grads)

        raw.update = watched  # type: ignore[method-assign]


class BareToyHarness(ExplicitToyHarness):
    """The toy framework with loss scaling and nothing else."""

    framework: ClassVar[str] = "toy-bare"
