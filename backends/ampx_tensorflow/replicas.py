"""What several replicas of `tf.distribute` have to agree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf


def copies(variable: Any) -> Sequence[Any]:
    """Return a variable's copies on the replicas of this process, or itself: the host reads and writes these.

    TensorFlow reads and writes a variable of a strategy in no other strategy's scope; its copies belong to none.
    """
    held = variable.value if isinstance(variable, keras.Variable) else variable  # `names.plain`, without its call
    if not isinstance(held, tf.distribute.DistributedValues):
        return (variable,)
    local: Sequence[Any] = held.distribute_strategy.experimental_local_results(held)
    return local


def read(variable: Any) -> Any:
    """Return the value of a variable that is the same on all replicas, as an array. Sync: one."""
    return copies(variable)[0].numpy()


def write(variable: Any, value: Any) -> None:
    """Write a value into a variable on all replicas."""
    for copy in copies(variable):
        copy.assign(value)


def everywhere(finite: Any) -> Any:
    """Return on each replica whether a boolean scalar tensor is true on all of them.

    Native defect: Keras 3 looks at the gradients of the first replica only. Call it where each replica runs its own
    code; outside, and with a single replica, the answer is the argument.

    Sync: none with the host; one all-reduce of a number between several replicas.
    """
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return finite
    overflows = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(tf.logical_not(finite), tf.float32))
    return tf.equal(overflows, 0.0)


def several() -> bool:
    """Return whether the caller runs on one of several replicas."""
    context = tf.distribute.get_replica_context()
    return context is not None and context.num_replicas_in_sync > 1


def summed(grads: Sequence[Any]) -> list[Any]:
    """Add up the gradients of all replicas, so that their global norm can be told; None stays.

    Sync: none with the host; one all-reduce between several replicas.
    """
    present = [gradient for gradient in grads if gradient is not None]
    if not present or not several():
        return list(grads)
    total = iter(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, present))
    return [None if gradient is None else next(total) for gradient in grads]


def with_headroom(grads: Sequence[Any]) -> list[Any]:
    """Return what to test so that the sum over all replicas, which Keras makes later, is finite too."""
    if not several():
        return list(grads)
    count = tf.distribute.get_replica_context().num_replicas_in_sync
    every = [grad.values if isinstance(grad, tf.IndexedSlices) else grad for grad in grads if grad is not None]
    return [values * tf.cast(count, values.dtype) for values in every]


def shared(grads: Sequence[Any]) -> list[Any]:
    """Divide gradients that `summed` returned among the replicas again: Keras's optimizers add them up."""
    if not several():
        return list(grads)
    count = tf.distribute.get_replica_context().num_replicas_in_sync

    def share(gradient: Any) -> Any:
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(share(gradient.values), gradient.indices, gradient.dense_shape)
        return None if gradient is None else gradient / tf.cast(count, gradient.dtype)

    return [share(gradient) for gradient in grads]


def conditionally(
    finite: Any, if_finite: Callable[..., None], *args: Any, otherwise: Callable[[], None] | None = None
) -> None:
    """Call a function on each replica where `finite`, of `everywhere`, is true, and another where it is not.

    Both change variables and return nothing; the first gets `args`, where tensors are those of the replica.
    """
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        _choose(finite, lambda: if_finite(*args), otherwise)
        return

    # A condition around code that itself merges replicas must stand where the replicas are one.
    def across(strategy: Any, finite: Any, args: Any) -> None:
        first = strategy.experimental_local_results(finite)[0]
        _choose(first, lambda: strategy.extended.call_for_each_replica(if_finite, args=args), otherwise)

    tf.distribute.get_replica_context().merge_call(across, args=(finite, args))


def _choose(condition: Any, if_true: Callable[[], Any], if_false: Callable[[], Any] | None) -> None:
    def done(function: Callable[[], Any] | None) -> Any:
        if function is not None:
            function()
        return tf.constant(0)

    tf.cond(condition, lambda: done(if_true), lambda: done(if_false))
