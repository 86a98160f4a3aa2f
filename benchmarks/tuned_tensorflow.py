"""What `ampx.tune` decides for the workloads of `tensorflow_step.py`, and a step in a `tf.function`: see `tuned.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tensorflow_step
from tuned import DTYPE, Settings, Side, Task, main, measure_all

import ampx


def _made(workload: str) -> tuple[Any, tuple[Any, Any]]:
    """Return a workload's model and a batch."""
    make, *_ = tensorflow_step.WORKLOADS[workload]
    data = tensorflow_step.batch_of(workload)
    return tensorflow_step._built(make, data[0]), data


class TensorFlowSide(Side):
    """One way to train in TensorFlow; its function is traced once a casting."""

    framework = "tensorflow"
    untimed = 1

    def __init__(self, workload: str, settings: Settings | None) -> None:
        super().__init__(settings)
        self.model, self.data = _made(workload)
        self.raw = tensorflow_step._raw(tensorflow_step.WORKLOADS[workload][2])
        self.compiled: Any = None

    def start(self, amp: ampx.Amp | None) -> None:
        if amp is not None:
            amp.prepare(self.model)
        if self.compiled is None:
            optimizer = self.raw if amp is None else amp.wrap_optimizer(self.raw)
            optimizer.build(self.model.trainable_variables)
            self.compiled = tf.function(functools.partial(self.train, optimizer, amp is not None))

    def train(self, optimizer: Any, scales: bool, x: Any, y: Any) -> Any:
        """Train with or without ampx."""
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            loss = tensorflow_step._loss(y, self.model(x, training=True))
            if scales:
                with ampx.scale_loss(loss, optimizer) as scaled:
                    pass
            else:
                scaled = loss
        optimizer.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))
        return loss

    def step(self) -> object:
        return self.compiled(*self.data).numpy()


def tuned(workload: str) -> ampx.TunedPolicy:
    """Return what `tune` decides for a workload."""
    model, (x, y) = _made(workload)
    return ampx.tune(
        lambda model: tensorflow_step._loss(y, model(x, training=True)),
        model,
        dtype=DTYPE,
        framework="tensorflow",
        device="cpu",
    )


def task(workload: str) -> Task:
    """Return a workload as it is tuned and trained."""
    *_, pairs = tensorflow_step.WORKLOADS[workload]
    sides = functools.partial(TensorFlowSide, workload)
    return Task(workload, functools.partial(tuned, workload), sides, min(pairs, 20), 1 if pairs < 60 else 10)


# The smallest and the one with the largest products first: a quick run times these.
TASKS = [task(list(tensorflow_step.WORKLOADS)[place]) for place in (0, 2, 1, 3, 4)]
STEPS = len(TASKS)
"""How often `run` advances."""


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Tune and time each workload."""
    return measure_all(TASKS, quick, advance)


if __name__ == "__main__":
    main(run)
