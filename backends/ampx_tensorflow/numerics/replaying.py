"""Compute a batch and its gradients again, and leave everything as it was."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras.src.random.seed_generator import global_seed_generator
from tensorflow.python.eager import context
from tensorflow.python.ops import resource_variable_ops

from ampx.backend import CastPlan
from ampx.errors import DetachedLossError, LossDtypeError, LossShapeError
from ampx.numerics.probe import Replayed, Step
from ampx.numerics.randomness import random_numbers_kept
from ampx.numerics.timing import timed
from ampx_tensorflow import casting, gradients, products, retracing
from ampx_tensorflow.names import parameters, walk

from . import stats
from .forcing import Policies, is_forced
from .watching import uncompiled

# What a program that has seeded nothing draws from: the same in every replay.
_SEED: Final = 0


def replay(model: Any, step: Step, plan: CastPlan | None, scale: float, autocast: Callable[[], Any]) -> Replayed:
    """Compute the loss of a batch and its gradients: see `Probe.replay`.

    Args:
        model: The model, or variables in a list or dict.
        step: Returns the loss.
        plan: How to cast; None in float32.
        scale: What the loss is multiplied by.
        autocast: Returns the region of the plan.
    """
    with ExitStack() as stack:
        stack.enter_context(_state_kept(model))
        stack.enter_context(uncompiled())
        stack.enter_context(casting.off() if plan is None else autocast())
        stack.enter_context(_policies_set(model, plan))
        with tf.GradientTape() as tape:
            loss = step(model)
            _check(loss)
            scaled = tf.cast(loss, tf.float32) * scale
        named = parameters(model)
        slopes = tape.gradient(scaled, [variable for _, variable in named])
        if named and all(slope is None for slope in slopes):
            raise DetachedLossError(
                "replay got a loss that depends on no parameter of the model; accepted: a loss computed from the model "
                "that the step function is passed. Call that model in it, with operations of TensorFlow."
            )
        true = {
            name: tf.convert_to_tensor(slope).numpy().astype(np.float32) / np.float32(scale)
            for (name, _), slope in zip(named, slopes, strict=True)
            if slope is not None
        }
        held = {name: tf.convert_to_tensor(variable) for name, variable in named}
        described = stats.TENSORS.stats(held, "float16" if plan is None else plan.dtype)
        return Replayed(float(tf.cast(loss, tf.float32)), true, described)


def clock(model: Any, step: Step, plan: CastPlan | None, autocast: Callable[[], Any]) -> Callable[[], float]:
    """Return what times a batch and its gradients: see `Probe.clock`.

    All of it is one function, as in `fit` and in a `tf.function` around a training step. A step that TensorFlow cannot
    trace is timed as Python, as it trains; so is every step where functions run eagerly. Where something is cast,
    gradients are looked at, as the optimizer will do.

    Args:
        model: As for `replay`.
        step: As for `replay`.
        plan: As for `replay`.
        autocast: As for `replay`.
    """
    trained = [variable for _, variable in parameters(model)]

    def compute() -> list[Any]:
        with tf.GradientTape() as tape:
            loss = tf.cast(step(model), tf.float32)
        slopes = tape.gradient(loss, trained)
        look = [] if plan is None else [gradients.finite(slopes)]
        return [loss, *look, *(slope for slope in slopes if slope is not None)]

    @contextmanager
    def region() -> Iterator[None]:
        with casting.off() if plan is None else autocast(), _policies_set(model, plan):
            yield

    run: Callable[[], list[Any]] = compute
    written: Iterable[Any] = ()
    if not tf.config.functions_run_eagerly():
        # Whatever functions the step calls were traced under other policies, of which their caches know nothing.
        with _state_kept(model), retracing.anew(), region():
            try:
                traced = tf.function(compute).get_concrete_function()
                run, written = traced, traced.variables
            except Exception:  # of any kind: it is the step's own Python, which ran before, and is timed as such
                run = compute

    def seconds() -> float:
        # A traced function does not report which variables it writes.
        before = [(variable, variable.read_value()) for variable in written]
        try:
            with _state_kept(model), region():
                run()
                tf.test.experimental.sync_devices()
                return timed(run, tf.test.experimental.sync_devices)
        finally:
            for variable, value in before:
                variable.assign(value)

    return seconds


def _check(loss: Any) -> None:
    if not isinstance(loss, tf.Tensor) or not loss.dtype.is_floating:
        kind = loss.dtype.name if isinstance(loss, tf.Tensor) else type(loss).__name__
        raise LossDtypeError(
            f"replay got a step function that returned {kind}; accepted: one that returns the loss as a floating "
            f"tensor. Return the tensor of the loss function, not a number."
        )
    if loss.shape.num_elements() != 1:
        raise LossShapeError(
            f"replay got a step function that returned a loss of {loss.shape.num_elements()} elements; accepted: a "
            f"scalar. Reduce it first, for instance with tf.reduce_mean(loss)."
        )


@contextmanager
def _policies_set(model: Any, plan: CastPlan | None) -> Iterator[None]:
    """Return a region in which the layers of a model follow a plan, or compute in float32.

    A model in which some layer casts already says by itself which do; others are cast whole, as by `prepare`. Models
    without layers are cast product by product, as under `ampx run`.
    """
    layers = [module for _, module in walk(model) if isinstance(module, keras.layers.Layer)]
    policies = Policies()
    free = [layer for layer in layers if not is_forced(layer) and type(layer.dtype_policy) is not casting.AmpPolicy]
    low = [layer for layer in free if layer.compute_dtype in casting.LOW]
    with ExitStack() as stack:
        stack.callback(policies.restore)
        if plan is None:
            for layer in low:
                policies.set(layer, "float32")
        elif not layers:
            stack.enter_context(products.cast(casting.compute_dtype))
        elif not low and not any(type(layer.dtype_policy) is casting.AmpPolicy for layer in layers):
            for layer in free:
                if layer.compute_dtype == "float32":
                    policies.set(layer, plan.dtype)
        yield


@contextmanager
def _state_kept(model: Any) -> Iterator[None]:
    """Return a region after which random numbers and variables are what they were."""
    before: dict[int, tuple[Any, Any]] = {}

    def keep(variable: Any) -> None:
        if id(variable) not in before and hasattr(variable, "read_value"):
            before[id(variable)] = variable, variable.read_value()

    with ExitStack() as stack:
        stack.enter_context(random_numbers_kept())
        python = random.getstate()
        global_seed_generator()  # Keras makes it when it is first used, with a number of Python's
        random.setstate(python)
        stack.enter_context(_operations_seeded())

        @stack.callback
        def restore() -> None:
            for variable, value in before.values():
                variable.assign(value)

        for owner in (resource_variable_ops.BaseResourceVariable, resource_variable_ops.ResourceVariable):
            for name, native in list(vars(owner).items()):  # TensorFlow copies methods into classes below
                if name.startswith(("assign", "scatter_", "batch_scatter_")):
                    stack.enter_context(mock.patch.object(owner, name, _keeping(native, keep)))
        skip = tf.random.Generator.skip  # writes to its state by an operation of its own

        def skipping(self: Any, delta: Any) -> Any:
            keep(self.state)
            return skip(self, delta)

        stack.enter_context(mock.patch.object(tf.random.Generator, "skip", skipping))
        for variable in getattr(model, "variables", ()):
            keep(getattr(variable, "value", variable) if isinstance(variable, keras.Variable) else variable)
        yield


def _keeping(native: Callable[..., Any], keep: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(native)
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            keep(self)
        return native(self, *args, **kwargs)

    return write


@contextmanager
def _operations_seeded() -> Iterator[None]:
    """Return a region in which random operations draw what they will draw after it.

    TensorFlow draws a seed for each of them from a generator of its own, and keeps those that have drawn: clearing
    them has an operation with a seed of its own start from it again.
    """
    state = context.context()
    seed = state._seed
    drawn = None if seed is None else state._rng.getstate()

    def begin(number: Any) -> None:
        state._set_global_seed(number)
        if drawn is not None:
            state._rng.setstate(drawn)

    begin(_SEED if seed is None else seed)
    try:
        yield
    finally:
        begin(seed)
