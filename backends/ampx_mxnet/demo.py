"""The trainer behind `ampx demo --framework mxnet`: an ordinary training script with three names of ampx."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

import ampx
from ampx.cli.demo import LEARNING_RATE, Digits, DigitsTrainer, Run

from .compat import mx


def make_network(seed: int, context: mx.Context) -> mx.gluon.HybridBlock:
    """Return a small convolutional network for images of shape (N, 1, 8, 8); MXNet's random state stays as it is."""
    network = mx.gluon.nn.HybridSequential()
    network.add(
        mx.gluon.nn.Conv2D(16, 3, padding=1, in_channels=1, activation="relu"),
        mx.gluon.nn.MaxPool2D(2),
        mx.gluon.nn.Conv2D(32, 3, in_channels=16, activation="relu"),
        mx.gluon.nn.Flatten(),
        mx.gluon.nn.Dense(10, in_units=128),
    )
    network.initialize(mx.init.Zero(), ctx=context)
    generator = np.random.default_rng(seed)
    fan_in = 1
    for parameter in network.collect_params().values():
        # The bias of a layer comes after its weight, and has the weight's bound.
        fan_in = math.prod(parameter.shape[1:]) if len(parameter.shape) > 1 else fan_in
        bound = 1 / math.sqrt(fan_in)
        parameter.set_data(mx.nd.array(generator.uniform(-bound, bound, parameter.shape), dtype="float32"))
    network.hybridize()
    return network


class MxnetTrainer(DigitsTrainer):
    """Trains on the best device of this machine."""

    framework: ClassVar[str] = "mxnet"

    def start(self, data: Digits, run: Run, amp: ampx.Amp) -> None:
        self.context = mx.gpu(0) if amp.effective.device.startswith("gpu") else mx.cpu()
        self.data = Digits(*(mx.nd.array(part, ctx=self.context, dtype=part.dtype) for part in data))
        self.network = make_network(run.seed, self.context)
        raw = mx.gluon.Trainer(self.network.collect_params(), "adam", {"learning_rate": LEARNING_RATE})
        self.optimizer = ampx.wrap_optimizer(raw, loss_scale=run.loss_scale)
        self.loss_function = mx.gluon.loss.SoftmaxCrossEntropyLoss()

    def set_learning_rate(self, rate: float) -> None:
        self.optimizer.set_learning_rate(rate)

    def step(self, rows: Any, factor: float) -> Any:
        batch = mx.nd.array(rows, ctx=self.context, dtype="int32")
        with mx.autograd.record():
            outputs = self.network(self.data.train_images[batch])
            loss = self.loss_function(outputs, self.data.train_labels[batch]).mean()
            with ampx.scale_loss(loss * factor, self.optimizer) as scaled:
                scaled.backward()
        self.optimizer.step(1)  # the loss is a mean already
        return loss.detach()

    def number(self, loss: Any) -> float:
        return float(loss.asscalar())

    def accuracy(self) -> float:
        digits = self.network(self.data.test_images).astype("float32").argmax(1).astype("int64")
        return float((digits == self.data.test_labels).astype("float32").mean().asscalar())
