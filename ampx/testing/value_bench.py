"""The test bench for optimizer state that is a value: what the user of such a framework writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ampx.session import Amp

from .bench import Bench
from .harness import Chosen, ValueHarness


class ValueBench(Bench):
    """One optimizer over two parameters; parameters and optimizer state are replaced at each step."""

    harness: ValueHarness

    def __init__(self, harness: ValueHarness, momentum: bool = False) -> None:
        super().__init__(harness, momentum)
        self.plain_state = harness.init(self.raw, self.parameters)

    def join(self, amp: Amp, opt: Any) -> Bench:
        """Take over a wrapped optimizer and make its state."""
        super().join(amp, opt)
        self.opt = self.harness.init(opt, self.parameters)
        return self

    @property
    def handle(self) -> Any:
        """What `gate` takes: a function, because the state changes."""
        return lambda: self.opt

    def state_dict(self) -> Any:
        """Save the loss scale."""
        return self.amp.state_dict(self.opt)

    def load(self, state: object) -> None:
        """Load the loss scale."""
        self.opt = self.amp.load_state_dict(state, self.opt)

    def gradients(self, slopes: Chosen) -> list[Any]:
        """Differentiate without ampx."""
        return self.harness.differentiate(lambda parameters: self.harness.loss(parameters, slopes), self.parameters)

    def accumulate_loss(self, make: Callable[[list[Any]], Any], loss_id: int = 0) -> None:
        """Differentiate a scaled loss; `scale_loss` is inside the differentiated function."""

        def scaled_loss(parameters: list[Any]) -> Any:
            with self.amp.scale_loss(make(parameters), self.opt, loss_id=loss_id) as scaled:
                return scaled

        self.receive(self.harness.differentiate(scaled_loss, self.parameters))

    def step(self, forget: bool = True) -> Any:
        """Update parameters and state; look at the state, which sends the events."""
        grads, self.pending = self.pending, None
        self.parameters, self.opt = self.harness.update(self.wrapped, grads or [], self.opt, self.parameters)
        return self.amp.observe(self.opt)

    def train_plainly(self, *gradients: Chosen) -> None:
        """Train the raw optimizer in float32."""
        for slopes in gradients:
            self.receive(self.gradients(slopes))
        grads, self.pending = self.pending, None
        self.parameters, self.plain_state = self.harness.update(self.raw, grads, self.plain_state, self.parameters)

    def set_rate(self, rate: float) -> None:
        """Set the learning rate in the state of the raw optimizer."""
        self.harness.set_rate(self.plain_state, rate)

    @property
    def scale(self) -> float:
        """The current loss scale."""
        scale: float = self.amp.loss_scale(self.opt)
        return scale

    def snapshot(self) -> tuple[Any, Any]:
        """Read parameters and optimizer state."""
        return self.values(), self.harness.optimizer_state(self.plain_state if self.wrapped is None else self.opt)
