"""The trainer behind `ampx demo --framework torch`: an ordinary training script with three names of ampx."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

import ampx
from ampx.cli.demo import LEARNING_RATE, Digits, DigitsTrainer, Run


def make_network() -> nn.Module:
    """Return a small convolutional network for images of shape (N, 1, 8, 8)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


class TorchTrainer(DigitsTrainer):
    """Trains on the best device of this machine."""

    framework: ClassVar[str] = "torch"

    @contextmanager
    def set_up(self, seed: int) -> Iterator[None]:
        """Compute on one thread, and draw all random numbers on the host."""
        threads = torch.get_num_threads()
        # A network this small gains nothing from more, and on a busy machine the threads wait for each other.
        torch.set_num_threads(1)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                yield
        finally:
            torch.set_num_threads(threads)

    def shuffle(self, images: int, seed: int) -> Callable[[], torch.Tensor]:
        return lambda: torch.randperm(images)

    def start(self, data: Digits, run: Run, amp: ampx.Amp) -> None:
        self.data = Digits(*(torch.as_tensor(part, device=amp.effective.device) for part in data))
        self.model = make_network().to(amp.effective.device)
        raw = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE)
        self.optimizer = ampx.wrap_optimizer(raw, loss_scale=run.loss_scale)

    def set_learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def step(self, rows: torch.Tensor, factor: float) -> torch.Tensor:
        rows = rows.to(self.data.train_labels.device)
        loss = functional.cross_entropy(self.model(self.data.train_images[rows]), self.data.train_labels[rows])
        with ampx.scale_loss(loss * factor, self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def accuracy(self) -> float:
        self.model.eval()
        with torch.no_grad():
            return (self.model(self.data.test_images).argmax(1) == self.data.test_labels).float().mean().item()
