"""The former names: TensorFlow 1, its optimizers and the sessions that run their graphs; optimizers of Keras 2."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.client.session import BaseSession

from ampx.run import patched
from ampx_tensorflow.old import graph_rewrite, keras2, names as old_names
from ampx_tensorflow.old.tf1 import GraphOptimizer

from .manager import KerasManager

# Reading the scale takes a run of the session; at this interval, in seconds, that costs next to nothing.
_LOOK_SECONDS: Final = 0.25
_HALVES: Final = ("compute_gradients", "apply_gradients")  # of `minimize`


@contextmanager
def rewrites_started(manager: KerasManager) -> Iterator[None]:
    """Have the recipes of TensorFlow 1 use the session of this run."""
    old_names.install(manager.run.settings.dtype, manager.run.settings.device)
    manager.stand_alone = graph_rewrite.stand_alone
    try:
        with graph_rewrite.started_by(lambda: manager.session(True), manager.record):
            yield
    finally:
        old_names.uninstall()


@contextmanager
def own_scaling_noted(manager: KerasManager) -> Iterator[None]:
    """Patch how the script makes optimizers of Keras 2 that scale the loss."""
    with patched((keras2.LossScaleOptimizer, "__init__", partial(_making_own, manager))):
        yield


def _making_own(manager: KerasManager, native: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(native)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        native(self, *args, **kwargs)
        manager.record_without_session(self)

    return make


@contextmanager
def graphs_managed(manager: KerasManager) -> Iterator[None]:
    """Patch optimizers and sessions."""
    base = tf.compat.v1.train.Optimizer
    with patched(
        *((base, name, partial(_managed, manager, name)) for name in ("minimize", *_HALVES)),
        (GraphOptimizer, "compute_gradients", partial(_computing, manager)),
        *((GraphOptimizer, name, partial(_inside, manager)) for name in _HALVES),
        (BaseSession, "run", partial(_running, manager)),
        (BaseSession, "close", partial(_closing, manager)),
    ):
        yield


def _running(manager: KerasManager, native: Callable[..., Any]) -> Callable[..., Any]:
    last = time.perf_counter()

    @functools.wraps(native)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal last
        if manager.at_work.depth:
            return native(self, *args, **kwargs)
        with manager.run.recorder.phase("train"):
            result = manager.operations.run_session(native, self, *args, **kwargs)
            if manager.observing.wanted or time.perf_counter() - last > _LOOK_SECONDS:
                _look(manager, self)
                last = time.perf_counter()
        return result

    return run


def _closing(manager: KerasManager, native: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(native)
    def close(self: Any) -> None:
        if self._session is not None:
            _look(manager, self)
        native(self)

    return close


def _managed(manager: KerasManager, name: str, native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, GraphOptimizer):
            manager.held.add(self)  # the script may forget it, and its graph goes on
            return _inside(manager, native)(self, *args, **kwargs)
        if manager.at_work.depth or manager.stood_down:
            return native(self, *args, **kwargs)
        wrapped = manager.manage(self, True)
        with manager.working():
            return _inside(manager, getattr(type(wrapped), name))(wrapped, *args, **kwargs)

    return call


def _inside(manager: KerasManager, native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with manager.at_work:
            return native(self, *args, **kwargs)

    return call


def _computing(manager: KerasManager, native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        return manager.own_gradients.carry(self._loss_scale(), lambda: native(self, *args, **kwargs))

    return compute


def _look(manager: KerasManager, session: Any) -> None:
    """Count in the recorder the steps that a session has made; of a closed or broken one, none."""
    with manager.at_work, session.graph.as_default(), session.as_default():
        if manager.stood_down and manager.run.amp is not None:
            manager.run.look()
            for group in manager.run.amp.live_groups():
                group.ledger.close(group)  # where it can be read
            manager.run.look()
        for wrapped in manager.wrapped:
            if isinstance(wrapped, GraphOptimizer) and wrapped._numbers.numbers() is not None:
                manager.count(wrapped)
