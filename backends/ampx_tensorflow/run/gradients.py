"""Loops over `tf.GradientTape`: the loss is scaled, and the script sees unscaled gradients only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from ampx.run import patched
from ampx.scale_state import is_one
from ampx_tensorflow import gradients
from ampx_tensorflow.contexts import compiles, on_host
from ampx_tensorflow.keras3 import AmpOptimizer
from ampx_tensorflow.losses import ScaledGradient
from ampx_tensorflow.numerics import stats

from .manager import KerasManager


@contextmanager
def tapes_watched(manager: KerasManager) -> Iterator[None]:
    """Patch how tapes begin, and how they differentiate."""
    with patched(
        (tf.GradientTape, "__enter__", partial(_entering, manager)),
        (tf.GradientTape, "gradient", partial(_differentiating, manager)),
        (tf.GradientTape, "jacobian", partial(_differentiating_whole, manager)),
    ):
        yield


def _entering(manager: KerasManager, native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def enter(self: Any) -> Any:
        # The first forward is to be cast, too: a graph that XLA compiles is not rewritten later.
        if (on_host() or compiles()) and not manager.stood_down:
            manager.all()
        return native(self)

    return enter


def _differentiating_whole(manager: KerasManager, native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def jacobian(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Its rows are no gradients of losses, and are computed where no variable is written.
        with manager.unscaled:
            return native(self, *args, **kwargs)

    return jacobian


def _differentiating(manager: KerasManager, native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    @tf.autograph.experimental.do_not_convert
    def gradient(self: Any, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **kwargs: Any) -> Any:
        if manager.unscaled.depth:
            return native(self, target, sources, output_gradients, *args, **kwargs)
        scale = None
        with stats.unwatched():
            if manager.run.recorder.reads_losses and not manager.at_work.depth and _is_floating(target):
                manager.observing.loss(target)
            if output_gradients is None and _is_loss(target) and all(map(_is_variable, tf.nest.flatten(sources))):
                scale = _scale(manager)
            if scale is not None:
                output_gradients = tf.fill(tf.shape(target), tf.cast(scale, target.dtype))
        with ExitStack() as stack:
            if on_host():
                stack.enter_context(manager.run.recorder.phase("backward"))
            if manager.forces:
                stack.enter_context(manager.operations.resting())
            carried = target.gradient.scale if _is_scaled(target) else scale

            def differentiate() -> Any:
                return native(self, target, sources, output_gradients, *args, **kwargs)

            result = differentiate() if carried is None else manager.own_gradients.carry(carried, differentiate)
        if scale is None:
            return result
        nested = tf.nest.is_nested(sources)
        with stats.unwatched():
            unscaled = gradients.unscale(tf.nest.flatten(result) if nested else [result], scale)
        return tf.nest.pack_sequence_as(sources, unscaled) if nested else unscaled[0]

    return gradient


def _scale(manager: KerasManager) -> Any:
    """Return the scale for a backward that may belong to any optimizer; None where there is nothing to scale.

    Gradients are unscaled before the script sees them, so that any scale is right.
    """
    if manager.stood_down:
        return None
    wrapped = [managed.wrapped for managed in manager.all() if isinstance(managed.wrapped, AmpOptimizer)]
    groups = [(optimizer._ledger, optimizer.ampx_member.group) for optimizer in wrapped]
    scales = [ledger.factor(group, 0) for ledger, group in groups if not is_one(group.config)]
    return tf.reduce_min(tf.stack(scales)) if scales else None


def _is_scaled(target: Any) -> bool:
    return isinstance(getattr(target, "gradient", None), ScaledGradient)


def _is_floating(target: Any) -> bool:
    return isinstance(target, tf.Tensor) and bool(target.dtype.is_floating)


def _is_variable(source: Any) -> bool:
    return isinstance(source, (tf.Variable, keras.Variable))


def _is_loss(target: Any) -> bool:
    """Return whether this is a loss that was not scaled: what `scale_loss` returned has a `gradient`."""
    plain = isinstance(target, tf.Tensor) and not hasattr(target, "gradient")
    return bool(plain and target.dtype.is_floating and target.dtype != tf.float16)
