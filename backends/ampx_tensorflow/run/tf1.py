"""`ampx run` in graphs of TensorFlow 1: their optimizers, and sessions that run them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import tensorflow as tf
from tensorflow.python.client.session import BaseSession

from ampx_tensorflow.graph import GraphOptimizer, is_optimizer

if TYPE_CHECKING:
    from .manager import Automation

# Reading the scale takes a run of the session; so many seconds apart nobody feels it.
_LOOK_SECONDS: Final = 0.25


def patches(this: Automation) -> Iterator[Any]:
    """Return the patches of optimizers and sessions."""
    base = tf.compat.v1.train.Optimizer
    for name in ("minimize", "compute_gradients", "apply_gradients"):
        yield mock.patch.object(base, name, _managed(this, getattr(base, name), name))
    for name in ("compute_gradients", "apply_gradients"):
        yield mock.patch.object(GraphOptimizer, name, _inside(this, getattr(GraphOptimizer, name)))
    run, close = BaseSession.run, BaseSession.close
    last = [time.perf_counter()]

    @functools.wraps(run)
    def ran(self: Any, *args: Any, **kwargs: Any) -> Any:
        if this.depth.value:
            return run(self, *args, **kwargs)
        with this.run.recorder.phase("train"):
            found = this.operations.run_session(run, self, *args, **kwargs)
            if time.perf_counter() - last[0] > _LOOK_SECONDS:
                _look(this, self)
                last[0] = time.perf_counter()
        return found

    @functools.wraps(close)
    def closed(self: Any) -> None:
        if self._session is not None:
            _look(this, self)
        close(self)

    yield mock.patch.object(BaseSession, "run", ran)
    yield mock.patch.object(BaseSession, "close", closed)


def _managed(this: Automation, native: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(native)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, GraphOptimizer):
            this.held.add(self)  # the script may forget it, and its graph goes on
            return _inside(this, native)(self, *args, **kwargs)
        if this.depth.value or this.stood_down or not is_optimizer(self):
            return native(self, *args, **kwargs)
        wrapped = this.manage(self, True)
        return this.guarded(_inside(this, getattr(type(wrapped), name)))(wrapped, *args, **kwargs)

    return call


def _inside(this: Automation, native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        this.depth.value += 1
        try:
            return native(self, *args, **kwargs)
        finally:
            this.depth.value -= 1

    return call


def _look(this: Automation, session: Any) -> None:
    """Count in the recorder the steps that a session has made; of a closed or broken one, none."""
    this.depth.value += 1
    try:
        with session.graph.as_default(), session.as_default():
            if this.stood_down and this.run.amp is not None:
                this.run.look()
                for group in this.run.amp.live_groups():
                    group.ledger.close(group)  # where it can be read
                this.run.look()
            for wrapped in this.wrapped:
                if isinstance(wrapped, GraphOptimizer) and wrapped._numbers.numbers() is not None:
                    this.count(wrapped)
    finally:
        this.depth.value -= 1
