"""Where code runs: on the host, in a trace of a `tf.function`, or on one of several replicas."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from ampx.protocol import Member, ScaleGroup


def on_host() -> bool:
    """Return whether Python itself runs the steps: not in a trace, and not on one of several replicas."""
    if not tf.executing_eagerly():
        return False
    context = tf.distribute.get_replica_context()
    return context is None or bool(context.num_replicas_in_sync == 1)


def compiles() -> bool:
    """Return whether a function is traced that XLA compiles."""
    if tf.executing_eagerly():
        return False
    return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


class Contexts:
    """The protocol of one loss scale, kept apart for the host, each trace and each replica.

    A trace runs Python once and its operations often, so what Python notes in one place means nothing in another:
    each place has a group of its own, with the same members.
    """

    def __init__(self, group: ScaleGroup) -> None:
        self.host = group
        self._others: weakref.WeakKeyDictionary[Any, dict[Any, ScaleGroup]] = weakref.WeakKeyDictionary()

    def here(self) -> ScaleGroup:
        """Return the group of the place where the caller runs."""
        if on_host():
            return self.host
        places = self._others.setdefault(tf.compat.v1.get_default_graph(), {})
        context, replica = tf.distribute.get_replica_context(), None
        if context is not None and context.num_replicas_in_sync > 1:
            replica = int(tf.get_static_value(context.replica_id_in_sync_group))  # a constant tensor is no key
        group = places.get(replica)
        if group is None:
            host = self.host
            group = ScaleGroup(host.framework, host.config, host.enabled, host.index, ledger=host.ledger)
            for _ in host.members:
                group.add_member()
            places[replica] = group
        return group

    def elsewhere(self, position: int) -> list[Member]:
        """List the other places of a member where gradients were left, scaled or unscaled."""
        here = self.here()
        groups = [self.host, *(group for places in self._others.values() for group in places.values())]
        members = [group.members[position] for group in groups if group is not here]
        return [member for member in members if member.stage in ("scaled", "unscaled")]
