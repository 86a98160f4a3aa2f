"""What an observer of a run receives, the loss of every backward and the end of steps; and the curve of a report.

Where a function is compiled, its losses are added up in a variable. An observer has it read after every call, and steps
counted; for a curve some calls are looked at, whose sum and numbers of steps are read at the end, so that none waits.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final
from unittest import mock

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

from ampx.run import LossCurve, Recorder
from ampx_tensorflow.contexts import on_host
from ampx_tensorflow.losses import ScaledGradient
from ampx_tensorflow.numerics import stats


class Depth(threading.local):
    """How deep the calling thread is in something: a region that counts."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


class Observing:
    """Report losses and steps to the observer, where there is one.

    Attributes:
        recorder: That of the run.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder: Final = recorder
        self._sum: Any = None
        self._calls = 0
        self._functions = Depth()  # of TensorFlow

    @property
    def wanted(self) -> bool:
        """Whether there is an observer."""
        return self.recorder.observer is not None

    def loss(self, target: Any) -> None:
        """Note what a tape differentiates: a loss, scaled or not."""
        if not self.recorder.reads_losses:
            return
        scaled = getattr(target, "gradient", None)
        loss = scaled.loss if isinstance(scaled, ScaledGradient) else target
        if on_host():
            if self.recorder.wants_losses:
                self.recorder.saw_loss(lambda: _total(loss))
        elif tf.inside_function() and not tf.distribute.in_cross_replica_context() and _is_alone():
            if self._sum is None:
                with tf.init_scope():
                    self._sum = tf.Variable(0.0, trainable=False)
            self._sum.assign_add(tf.reduce_sum(tf.cast(loss, tf.float32)))

    def counting(self, count: Callable[[Any], None]) -> AbstractContextManager[None]:
        """Return a region in which steps are counted after every call of a compiled function.

        Args:
            count: Receives the sum of the losses since the last step, as a variable; None where there was none.
        """

        @contextmanager
        def around() -> Iterator[None]:
            yield
            with stats.unwatched():
                count(self._sum)

        return self._calling(around)

    def drawing(self, curve: LossCurve, counters: Callable[[], list[Any]]) -> AbstractContextManager[None]:
        """Return a region in which the curve gets the losses of some calls of compiled functions.

        Args:
            curve: Of the report.
            counters: Returns variables with the steps of each optimizer up to now, in their last element.
        """

        @contextmanager
        def around() -> Iterator[None]:
            calls = self._calls
            wanted = curve.wants(calls)
            before = _steps(counters()) if wanted else None
            if wanted and self._sum is not None:
                self._sum.assign(0.0)
            yield
            if self._sum is None:  # no function with a loss so far
                return
            self._calls += 1
            if before is not None:
                curve.keep(calls, functools.partial(_point, before, _steps(counters()), self._sum.read_value()))

        return self._calling(around)

    @contextmanager
    def _calling(self, around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        native = Function.__call__

        @functools.wraps(native)
        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            if self._functions.depth or not tf.executing_eagerly():
                return native(function, *args, **kwargs)
            with around(), self._functions:
                return native(function, *args, **kwargs)

        with mock.patch.object(Function, "__call__", call):
            yield


def _steps(counters: list[Any]) -> list[Any]:
    with stats.unwatched():
        return [tf.convert_to_tensor(counter) for counter in counters]


def _point(before: list[Any], after: list[Any], losses: Any) -> tuple[int, float]:
    """Return the last step of a call, and the mean of the losses of its steps; one that comes later is of the next."""
    first, last = (sum(int(counter[-1]) for counter in counters) for counters in (before, after))
    return max(last, first + 1), float(losses) / max(1, last - first)


def _total(loss: Any) -> float:
    with stats.unwatched():
        return float(tf.reduce_sum(tf.cast(loss, tf.float32)))


def _is_alone() -> bool:
    context = tf.distribute.get_replica_context()
    return context is None or bool(context.num_replicas_in_sync == 1)
