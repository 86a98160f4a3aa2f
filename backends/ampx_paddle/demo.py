"""The trainer behind `ampx demo --framework paddle`: an ordinary training script with three names of ampx."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import paddle
from paddle import nn

import ampx
from ampx.cli.demo import LEARNING_RATE, Digits, DigitsTrainer, Run


def make_network() -> nn.Layer:
    """Return a small convolutional network for images of shape (N, 1, 8, 8)."""
    return nn.Sequential(
        nn.Conv2D(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2D(2),
        nn.Conv2D(16, 32, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


class PaddleTrainer(DigitsTrainer):
    """Trains on the best device of this machine."""

    framework: ClassVar[str] = "paddle"

    @contextmanager
    def set_up(self, seed: int) -> Iterator[None]:
        """Seed Paddle, and give it its random state back."""
        state = paddle.get_rng_state()
        paddle.seed(seed)
        try:
            yield
        finally:
            paddle.set_rng_state(state)

    def start(self, data: Digits, run: Run, amp: ampx.Amp) -> None:
        self.data = Digits(*(paddle.to_tensor(part) for part in data))
        self.model = make_network()
        raw = paddle.optimizer.AdamW(LEARNING_RATE, parameters=self.model.parameters())
        self.optimizer = ampx.wrap_optimizer(raw, loss_scale=run.loss_scale)
        self.loss_function = nn.CrossEntropyLoss()

    def set_learning_rate(self, rate: float) -> None:
        self.optimizer.set_lr(rate)

    def step(self, rows: Any, factor: float) -> Any:
        batch = paddle.to_tensor(rows)
        loss = self.loss_function(self.model(self.data.train_images[batch]), self.data.train_labels[batch])
        with ampx.scale_loss(loss * factor, self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        return loss.detach()

    def accuracy(self) -> float:
        self.model.eval()
        with paddle.no_grad():
            right = self.model(self.data.test_images).argmax(1) == self.data.test_labels
            return float(right.astype("float32").mean())
