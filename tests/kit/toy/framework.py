"""A tensor framework in pure Python: vectors, reverse-mode differentiation, autocast, modules, an optimizer.

It stands for any real framework in the conformance kit. Every stored number is rounded to its dtype, so
overflow, underflow and lost bits are genuine. It knows nothing of ampx.
"""

from __future__ import annotations

import functools
import math
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

Number = float | int | bool
Pullback = Callable[[tuple[Number, ...]], tuple[Number, ...]]
FLOATING: Final = ("float16", "bfloat16", "float32")


def round_to(value: Number, dtype: str) -> Number:
    """Return the nearest number that the dtype can hold; inf beyond its largest."""
    if dtype == "int64":
        return int(value)
    if dtype == "bool":
        return bool(value)
    if not math.isfinite(value):
        return float(value)
    try:
        if dtype == "float16":
            return float(struct.unpack("e", struct.pack("e", value))[0])
        single = struct.pack("f", value)
    except OverflowError:
        return math.copysign(math.inf, value)
    if dtype == "float32":
        return float(struct.unpack("f", single)[0])
    (bits,) = struct.unpack("I", single)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000  # to nearest, ties to even
    return float(struct.unpack("f", struct.pack("I", bits))[0])


@dataclass(frozen=True)
class CastingState:
    """What the autocast switch says; `dtype=None` is off."""

    dtype: str | None = None
    allow: frozenset[str] = frozenset({"product"})
    deny: frozenset[str] = frozenset({"total"})


_casting = [CastingState()]


def casting_state() -> CastingState:
    """Return how operations are cast now."""
    return _casting[0]


def set_casting(state: CastingState) -> None:
    """Switch casting for the process."""
    _casting[0] = state


@contextmanager
def autocast(state: CastingState) -> Iterator[None]:
    """Switch casting for a region."""
    before = _casting[0]
    _casting[0] = state
    try:
        yield
    finally:
        _casting[0] = before


class Tensor:
    """A vector of one dtype that remembers how it was computed."""

    def __init__(
        self,
        data: Sequence[Number],
        dtype: str = "float32",
        parents: Sequence[tuple[Tensor, Pullback]] = (),
        parameter: bool = False,
    ) -> None:
        self.data = tuple(round_to(value, dtype) for value in data)
        self.dtype = dtype
        self.parents = tuple(parents)
        self.parameter = parameter
        self.grad: Tensor | None = None

    @property
    def attached(self) -> bool:
        """Whether a gradient can flow back from here."""
        return self.parameter or any(parent.attached for parent, _ in self.parents)

    def to(self, dtype: str) -> Tensor:
        """Cast; gradients flow through."""
        return self if dtype == self.dtype else Tensor(self.data, dtype, [(self, lambda upstream: upstream)])

    def __mul__(self, factor: float) -> Tensor:
        """Multiply by a number."""
        scaled = [value * factor for value in self.data]
        return Tensor(scaled, self.dtype, [(self, lambda upstream: tuple(value * factor for value in upstream))])

    def __add__(self, other: Tensor) -> Tensor:
        """Add elementwise, in the wider dtype."""
        dtype = self.dtype if self.dtype == other.dtype else "float32"
        summed = [a + b for a, b in zip(self.data, other.data, strict=True)]
        return Tensor(summed, dtype, [(self, lambda upstream: upstream), (other, lambda upstream: upstream)])

    def backward(self) -> None:
        """Add to the gradients of all parameters that this scalar depends on."""
        for tensor, gradient in _differentiate(self):
            if tensor.parameter:
                tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient


def gradients(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of a scalar as values; None for a parameter that takes no part."""
    by_tensor = {id(tensor): gradient for tensor, gradient in _differentiate(loss)}
    return [by_tensor.get(id(parameter)) for parameter in parameters]


def _differentiate(loss: Tensor) -> list[tuple[Tensor, Tensor]]:
    order: list[Tensor] = []
    seen: set[int] = set()

    def visit(tensor: Tensor) -> None:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            for parent, _ in tensor.parents:
                visit(parent)
            order.append(tensor)

    visit(loss)
    gradients: dict[int, Tensor] = {id(loss): Tensor([1.0] * len(loss.data), loss.dtype)}
    for tensor in reversed(order):
        for parent, pullback in tensor.parents:
            # The next line rounds to the parent's dtype: a float16 loss makes its gradients overflow there.
            arriving = Tensor(pullback(gradients[id(tensor)].data), parent.dtype)
            earlier = gradients.get(id(parent))
            gradients[id(parent)] = arriving if earlier is None else earlier + arriving
    return [(tensor, gradients[id(tensor)]) for tensor in order]


def _cast_for(name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    state = casting_state()
    if state.dtype is None or (name not in state.allow and name not in state.deny):
        return list(tensors)
    dtype = "float32" if name in state.deny else state.dtype
    return [tensor.to(dtype) if tensor.dtype in FLOATING else tensor for tensor in tensors]


# What runs around the call of every operation, and of every module: the last is the outermost.
around_operations: list[Callable[..., Tensor]] = []
around_modules: list[Callable[..., Tensor]] = []
generator = random.Random(0)


def operation(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Run an operation with all that was put around operations."""

    @functools.wraps(function)
    def call(*inputs: Any) -> Tensor:
        run = function
        for around in around_operations:
            run = functools.partial(around, function.__name__, run)
        return run(*inputs)

    return call


@operation
def product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply elementwise, or by a single number; on the framework's own allow list."""
    x, y = _cast_for("product", [a, b])
    repeats = len(x.data) // len(y.data)
    left, right = x.data, y.data * repeats

    def slopes(upstream: tuple[Number, ...]) -> tuple[Number, ...]:
        every = tuple(u * p for u, p in zip(upstream, left, strict=True))
        return every if repeats == 1 else (sum(every),)

    return Tensor(
        [p * q for p, q in zip(left, right, strict=True)],
        x.dtype if x.dtype == y.dtype else "float32",
        [
            (x, lambda upstream: tuple(u * q for u, q in zip(upstream, right, strict=True))),
            (y, slopes),
        ],
    )


@operation
def dropout(a: Tensor) -> Tensor:
    """Forget about every other element, and double the others."""
    mask = [2.0 * generator.getrandbits(1) for _ in a.data]

    def masked(values: tuple[Number, ...]) -> tuple[Number, ...]:
        return tuple(value * factor for value, factor in zip(values, mask, strict=True))

    return Tensor(masked(a.data), a.dtype, [(a, masked)])


@operation
def total(a: Tensor) -> Tensor:
    """Sum the elements; on the framework's own deny list."""
    (x,) = _cast_for("total", [a])
    count = len(x.data)
    return Tensor([sum(x.data)], x.dtype, [(x, lambda upstream: upstream * count)])


def pull(parameters: Sequence[Tensor], chosen: Sequence[Sequence[float]]) -> Tensor:
    """Return the sum of the parameters, with derivatives of the caller's choice (inf and NaN too)."""

    def along(slopes: Sequence[float]) -> Pullback:
        return lambda upstream: tuple(upstream[0] * slope for slope in slopes)

    parents = [(parameter, along(slopes)) for parameter, slopes in zip(parameters, chosen, strict=True)]
    return Tensor([sum(sum(parameter.data) for parameter in parameters)], "float32", parents)


class Module:
    """A part of a model: parameters, a buffer that counts its calls, and the modules inside, which run in a row."""

    def __init__(self, *parameters: Tensor, **modules: Module) -> None:
        self.parameters = dict(zip(("weight", "bias"), parameters, strict=False))
        self.modules = modules
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Run the modules inside in a row."""
        for module in self.modules.values():
            x = module(x)
        return x

    def __call__(self, x: Tensor) -> Tensor:
        """Run it with all that was put around modules."""
        call: Callable[[Tensor], Tensor] = self.forward
        self.calls += 1
        for around in around_modules:
            call = functools.partial(around, self, call)
        return call(x)

    def named_modules(self, name: str = "") -> Iterator[tuple[str, Module]]:
        """Name this module and those inside."""
        yield name, self
        for key, module in self.modules.items():
            yield from module.named_modules(f"{name}.{key}" if name else key)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Name the parameters."""
        for name, module in self.named_modules():
            for key, parameter in module.parameters.items():
                yield (f"{name}.{key}" if name else key), parameter


class Dense(Module):
    """Multiplies by its only weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return product(x, self.parameters["weight"])


class Twice(Module):
    """Returns one time what it receives, and two times that."""

    def forward(self, x: Tensor) -> Any:
        """Return both."""
        return x * 1.0, x * 2.0


class Norm(Module):
    """Subtracts its running mean, and multiplies by its weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self.mean = Tensor([0.0])

    def forward(self, x: Tensor) -> Tensor:
        """Normalize."""
        mean = Tensor([-value for value in self.mean.data] * len(x.data))
        return product(x + mean, self.parameters["weight"])


class Dropout(Module):
    """Draws a mask in every call."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the mask."""
        return dropout(x)


class Optimizer:
    """Gradient descent, with momentum and a step counter where asked for."""

    def __init__(self, parameters: Sequence[Tensor], lr: float, momentum: float = 0.0) -> None:
        self.parameters = list(parameters)
        self.lr = lr
        self.momentum = momentum
        self.steps = 0
        self.buffers: list[Tensor | None] = [None] * len(self.parameters)

    def update(self, grads: Sequence[Tensor | None]) -> None:
        """Move the parameters by gradients given as values."""
        self.steps += 1
        for position, (parameter, grad) in enumerate(zip(self.parameters, grads, strict=True)):
            if grad is None:
                continue
            before = self.buffers[position]
            # A tensor of its own: the gradient may be written to.
            move = Tensor(grad.data) if before is None or not self.momentum else before * self.momentum + grad
            self.buffers[position] = move if self.momentum else None
            parameter.data = (Tensor(parameter.data) + move * -self.lr).data

    def step(self) -> None:
        """Move the parameters by the gradients that hang on them."""
        self.update([parameter.grad for parameter in self.parameters])

    def zero_grad(self) -> None:
        """Forget the gradients that hang on the parameters."""
        for parameter in self.parameters:
            parameter.grad = None
