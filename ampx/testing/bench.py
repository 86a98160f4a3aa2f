"""A wrapped optimizer on the test bench: chosen gradients in, results and numbers out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ampx.session import Amp

from .harness import Chosen, Harness

START: Chosen = ((1.0, -2.0), (0.5,))
FINITE: Chosen = ((0.25, -0.5), (1.5,))
OTHER: Chosen = ((-1.5, 0.125), (2.0,))
OVERFLOW: Chosen = ((0.25, math.inf), (1.5,))
NAN: Chosen = ((0.25, -0.5), (math.nan,))
# Finite themselves, but not when the framework has multiplied them by 2**16 in float32.
TOO_LARGE: Chosen = ((0.25, 2.0**120), (1.5,))


def chosen(overflow: bool) -> Chosen:
    """Return finite gradients or others."""
    return OVERFLOW if overflow else FINITE


class Bench:
    """One optimizer over two parameters: raw, wrapped, and the gradients that wait for its step."""

    def __init__(self, harness: Harness, momentum: bool = False) -> None:
        self.harness = harness
        self.parameters = [harness.parameter(values) for values in START]
        self.raw = harness.optimizer(self.parameters, momentum)
        self.wrapped: Any = None  # what `wrap_optimizer` gave
        self.opt: Any = None  # what calls take: the same, or the optimizer state where that is a value
        self.pending: list[Any] | None = None

    def wrap(self, amp: Amp, **options: Any) -> Bench:
        """Wrap the optimizer."""
        return self.join(amp, amp.wrap_optimizer(self.raw, **options))

    def join(self, amp: Amp, opt: Any) -> Bench:
        """Take over an optimizer that was wrapped together with others."""
        self.amp = amp
        self.wrapped = self.opt = opt
        return self

    @property
    def handle(self) -> Any:
        """What `gate` takes."""
        return self.opt

    def state_dict(self) -> Any:
        """Save the session's loss scales."""
        return self.amp.state_dict()

    def load(self, state: object) -> None:
        """Load the session's loss scales."""
        self.amp.load_state_dict(state)

    def gradients(self, slopes: Chosen) -> list[Any] | None:
        """Run one backward without ampx; return the gradients where they are values."""
        return self.harness.backward(self.loss(slopes), self.parameters)

    def loss(self, gradients: Chosen = FINITE) -> Any:
        """Compute a loss."""
        return self.harness.loss(self.parameters, gradients)

    def receive(self, grads: list[Any] | None) -> None:
        """Add gradients that are values to those that wait."""
        if grads is not None:
            self.pending = grads if self.pending is None else self.harness.add(self.pending, grads)

    def accumulate(self, gradients: Chosen = FINITE, loss_id: int = 0) -> None:
        """Run one backward through a scaled loss."""
        self.accumulate_loss(lambda parameters: self.harness.loss(parameters, gradients), loss_id)

    def accumulate_loss(self, make: Callable[[list[Any]], Any], loss_id: int = 0) -> None:
        """Run one backward through a loss, made from the parameters and scaled."""
        with self.amp.scale_loss(make(self.parameters), self.opt, loss_id=loss_id) as scaled:
            self.receive(self.harness.backward(scaled, self.parameters))

    def step(self, forget: bool = True) -> Any:
        """Step, and forget the gradients; return what the step did."""
        explicit = self.amp.backend.capabilities.gradients == "explicit"
        grads, self.pending = self.pending, None
        self.harness.step(self.opt, (grads or []) if explicit else None)
        result = self.harness.last_step(self.opt)
        if forget and not explicit:
            self.harness.zero_grad(self.opt)
        return result

    def train(self, gradients: Chosen = FINITE) -> Any:
        """Run backward and step."""
        self.accumulate(gradients)
        return self.step()

    def train_plainly(self, *gradients: Chosen) -> None:
        """Train the raw optimizer in float32, without ampx; several gradients are accumulated."""
        harness = self.harness
        for slopes in gradients:
            self.receive(self.gradients(slopes))
        grads, self.pending = self.pending, None
        harness.plain_step(self.raw, grads)
        if grads is None:
            harness.zero_grad(self.raw)

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the raw optimizer."""
        self.harness.set_rate(self.raw, rate)

    def trace(self, pattern: Sequence[Any]) -> list[float]:
        """Train over a pattern of overflows; return the scale after each step."""
        return [self.train(chosen(bool(overflow))).next_scale for overflow in pattern]

    @property
    def scale(self) -> float:
        """The current loss scale."""
        return self.harness.loss_scale(self.opt)

    def values(self) -> list[list[float]]:
        """Read the parameters."""
        return [self.harness.numbers(parameter) for parameter in self.parameters]

    def snapshot(self) -> tuple[Any, Any]:
        """Read parameters and optimizer state."""
        return self.values(), self.harness.optimizer_state(self.raw)

    def saved(self) -> dict[str, Any]:
        """Read configuration and state of the loss scale, as saved."""
        group: dict[str, Any] = self.amp.state_dict(self.opt)["groups"][0]
        return group

    def row(self, loss_id: int = 0) -> dict[str, Any]:
        """Read the four numbers of one loss scale."""
        (row,) = (loss for loss in self.saved()["losses"] if loss["loss_id"] == loss_id)
        return {name: value for name, value in row.items() if name != "loss_id"}


def multi_backward(benches: Sequence[Bench], gradients: Sequence[Chosen]) -> None:
    """Run one backward of one loss into several optimizers."""
    harness, amp = benches[0].harness, benches[0].amp
    parameters = [parameter for bench in benches for parameter in bench.parameters]
    flat = [slopes for group in gradients for slopes in group]
    with amp.scale_loss(harness.loss(parameters, flat), [bench.opt for bench in benches]) as scaled:
        grads = harness.backward(scaled, parameters)
    if grads is not None:
        for bench in benches:
            count = len(bench.parameters)
            bench.receive(grads[:count])
            grads = grads[count:]
