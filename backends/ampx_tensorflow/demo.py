"""The trainer behind `ampx demo --framework tensorflow`: an ordinary training script with three names of ampx."""

from __future__ import annotations

from typing import Any, ClassVar

import keras
import tensorflow as tf

import ampx
from ampx.cli.demo import LEARNING_RATE, Digits, DigitsTrainer, History, Run


def make_network(seed: int) -> keras.Model:
    """Return a small convolutional network for images of shape (N, 8, 8, 1); its logits are float32."""
    seeds = iter(range(3 * seed, 3 * seed + 3))

    def initializer() -> Any:
        return keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform", seed=next(seeds))

    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu", kernel_initializer=initializer()),
            keras.layers.MaxPooling2D(2),
            keras.layers.Conv2D(32, 3, activation="relu", kernel_initializer=initializer()),
            keras.layers.Flatten(),
            keras.layers.Dense(10, kernel_initializer=initializer()),
            keras.layers.Activation("linear", dtype="float32"),
        ]
    )


class KerasTrainer(DigitsTrainer):
    """Trains on the best device of this machine."""

    framework: ClassVar[str] = "tensorflow"

    def start(self, data: Digits, run: Run, amp: ampx.Amp) -> None:
        images, self.test_images = (tf.constant(part.transpose(0, 2, 3, 1)) for part in (data[0], data[2]))
        labels, self.test_labels = tf.constant(data.train_labels), data.test_labels
        self.model = model = make_network(run.seed)
        raw = keras.optimizers.AdamW(LEARNING_RATE, weight_decay=1e-2)
        self.optimizer = optimizer = ampx.wrap_optimizer(raw, loss_scale=run.loss_scale)
        loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.results: list[tuple[Any, Any]] = []

        @tf.function
        def step(rows: Any, factor: Any) -> tuple[Any, Any, Any]:
            with tf.GradientTape() as tape:
                loss = loss_function(tf.gather(labels, rows), model(tf.gather(images, rows), training=True))
                with ampx.scale_loss(loss * factor, optimizer) as scaled:
                    pass
            gradients = tape.gradient(scaled, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            result = optimizer.last_step
            return loss, result.applied, result.scale

        self.compiled = step

    def set_learning_rate(self, rate: float) -> None:
        self.optimizer.learning_rate = rate

    def step(self, rows: Any, factor: float) -> Any:
        loss, *result = self.compiled(tf.constant(rows), tf.constant(factor))
        self.results.append(tuple(result))
        return loss

    def accuracy(self) -> float:
        return float((tf.argmax(self.model(self.test_images), 1).numpy() == self.test_labels).mean())

    def history(self, steps: int) -> History:
        skipped = [number for number, (applied, _) in enumerate(self.results) if not bool(applied)]
        return History([float(scale) for _, scale in self.results], skipped, float(self.optimizer.loss_scale))
