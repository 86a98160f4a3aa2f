"""What an observer of a run is told: the loss of every backward, and when steps are over.

Where a function is compiled, its losses are added up in a variable. Whoever calls it reads them, and counts its steps.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

from ampx.run import Recorder
from ampx_tensorflow.contexts import on_host
from ampx_tensorflow.losses import ScaledGradient
from ampx_tensorflow.numerics import stats


class _Depth(threading.local):
    """In how many functions of TensorFlow the calling thread is."""

    value = 0


class Observing:
    """Tells the observer of a run, where there is one.

    Attributes:
        recorder: That of the run.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder: Final = recorder
        self._sum: Any = None
        self._depth = _Depth()

    @property
    def wanted(self) -> bool:
        """Whether there is an observer."""
        return self.recorder.observer is not None

    def loss(self, target: Any) -> None:
        """Note what a tape differentiates: a loss, scaled or not."""
        observer = self.recorder.observer
        if observer is None:
            return
        scaled = getattr(target, "gradient", None)
        loss = scaled.loss if isinstance(scaled, ScaledGradient) else target
        if on_host():
            observer.loss(lambda: _total(loss))
        elif tf.inside_function() and not tf.distribute.in_cross_replica_context() and _is_alone():
            if self._sum is None:
                with tf.init_scope():
                    self._sum = tf.Variable(0.0, trainable=False)
            self._sum.assign_add(tf.reduce_sum(tf.cast(loss, tf.float32)))

    @contextmanager
    def calls(self, count: Callable[[Any], None]) -> Iterator[None]:
        """Return a region in which steps are counted after every call of a compiled function.

        Args:
            count: Receives the sum of the losses since the last step, as a variable; None where there was none.
        """
        native = Function.__call__

        @functools.wraps(native)
        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth.value or not tf.executing_eagerly():
                return native(function, *args, **kwargs)
            self._depth.value += 1
            try:
                result = native(function, *args, **kwargs)
            finally:
                self._depth.value -= 1
            with stats.unwatched():
                count(self._sum)
            return result

        with mock.patch.object(Function, "__call__", call):
            yield


def _total(loss: Any) -> float:
    with stats.unwatched():
        return float(tf.reduce_sum(tf.cast(loss, tf.float32)))


def _is_alone() -> bool:
    context = tf.distribute.get_replica_context()
    return context is None or bool(context.num_replicas_in_sync == 1)
