"""What several replicas of `tf.distribute` have to agree on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def everywhere(finite: Any) -> Any:
    """Tell on each replica whether a boolean scalar tensor is true on all of them.

    Native defect: Keras 3 looks at the gradients of the first replica only. Call it where each replica runs its own
    code; outside, and with a single replica, the answer is the argument.

    Sync: none with the host; one all-reduce of a number between several replicas.
    """
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return finite
    overflows = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(tf.logical_not(finite), tf.float32))
    return tf.equal(overflows, 0.0)


def conditionally(finite: Any, function: Callable[..., None], *args: Any) -> None:
    """Call a function on each replica where `finite`, which `everywhere` gave, is true.

    Args:
        finite: Boolean scalar tensor, the same on all replicas.
        function: Changes variables and returns nothing.
        *args: What it gets; tensors are those of the replica.

    Sync: as `tf.cond`.
    """
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        _run_if(finite, lambda: function(*args))
        return

    # A condition around code that itself merges replicas must stand where the replicas are one.
    def across(strategy: Any, finite: Any, args: Any) -> None:
        first = strategy.experimental_local_results(finite)[0]
        _run_if(first, lambda: strategy.extended.call_for_each_replica(function, args=args))

    tf.distribute.get_replica_context().merge_call(across, args=(finite, args))


def _run_if(condition: Any, function: Callable[[], Any]) -> None:
    def run() -> Any:
        function()
        return tf.constant(0)

    tf.cond(condition, run, lambda: tf.constant(0))
