"""Loops over `tf.GradientTape`: the loss is scaled, and the script sees unscaled gradients only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

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
    enter = tf.GradientTape.__enter__

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        # The first forward is to be cast, too: a graph that XLA compiles is not rewritten later.
        if (on_host() or compiles()) and not manager.stood_down:
            manager.manage_all()
        return enter(self)

    jacobian = tf.GradientTape.jacobian

    @functools.wraps(jacobian)
    def whole(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Its rows are no gradients of losses, and are computed where no variable is written.
        with manager.unscaled():
            return jacobian(self, *args, **kwargs)

    with (
        mock.patch.object(tf.GradientTape, "__enter__", entered),
        mock.patch.object(tf.GradientTape, "gradient", _differentiating(manager, tf.GradientTape.gradient)),
        mock.patch.object(tf.GradientTape, "jacobian", whole),
    ):
        yield


def _differentiating(manager: KerasManager, native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    @tf.autograph.experimental.do_not_convert
    def gradient(self: Any, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **kwargs: Any) -> Any:
        if manager.rests.value:
            return native(self, target, sources, output_gradients, *args, **kwargs)
        scale = None
        with stats.unwatched():
            if manager.run.recorder.reads_losses and not manager.depth.value and _is_floating(target):
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
            true = gradients.unscale(tf.nest.flatten(result) if nested else [result], scale)
        return tf.nest.pack_sequence_as(sources, true) if nested else true[0]

    return gradient


def _scale(manager: KerasManager) -> Any:
    """Return the scale for a backward that may belong to any optimizer; None where there is nothing to scale.

    Gradients are true again before the script sees them, so that any scale is right.
    """
    if manager.stood_down:
        return None
    manager.manage_all()
    wrapped = [managed.wrapped for managed in manager.managed() if isinstance(managed.wrapped, AmpOptimizer)]
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
    """Return whether this is a loss that was not scaled: what `scale_loss` gave has a `gradient`."""
    plain = isinstance(target, tf.Tensor) and not hasattr(target, "gradient")
    return bool(plain and target.dtype.is_floating and target.dtype != tf.float16)
