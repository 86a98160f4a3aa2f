"""The contract of the precision debugger: its verbs, in one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import keras
import tensorflow as tf

from ampx.backend import CastPlan, Device
from ampx.numerics.probe import Probe, Replayed, Step

from . import forcing, replaying, watching as reading


class TensorFlowProbe(Probe):
    """Looks into layers and `tf.Module`s."""

    watches_uncompiled: ClassVar[bool] = True
    watch = staticmethod(reading.watch)
    force = staticmethod(forcing.force)

    def simulates(self, device: Device) -> frozenset[str]:
        return frozenset(forcing.SIMULATED)

    def replay(self, model: Any, step: Step, plan: CastPlan | None, scale: float = 1.0) -> Replayed:
        """Compute the loss of a batch and its gradients; functions run as Python.

        Where the program has set no seed, random operations draw from one of ampx during the replay. An operation with
        a seed of its own starts from it again, in the replay and after it.
        """
        return replaying.replay(model, step, plan, scale, lambda: self.backend.autocast(plan, True))  # type: ignore[arg-type]

    def clock(self, model: Any, step: Step, plan: CastPlan | None) -> Callable[[], float]:
        """Return what times a batch and its gradients, as one function where TensorFlow can trace the step."""
        return replaying.clock(model, step, plan, lambda: self.backend.autocast(plan, True))  # type: ignore[arg-type]

    def seed(self, number: int) -> None:
        """Seed TensorFlow and Keras, whose random numbers are then the same in every run."""
        keras.utils.set_random_seed(number)

    def peak_memory(self) -> int | None:
        """Return the peak of TensorFlow's allocator on the first GPU; None without one."""
        if not tf.config.list_logical_devices("GPU"):
            return None
        return int(tf.config.experimental.get_memory_info("GPU:0")["peak"])
