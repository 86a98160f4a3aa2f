"""Which steps of traces overflowed: a log in variables, which the host reads now and then to send the events.

A trace runs where Python does not, so the host learns of its steps later, from this log. Steps that overflow in a row
are one entry, however many they are. The host looks before every so many calls of a function that trains, at the end
of `fit`, at the end of the process, and whenever somebody asks an optimizer.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import tensorflow as tf

from ampx.protocol import ScaleGroup

from . import retracing
from .replicas import read

# So many stretches of overflows fit between two looks.
STRETCHES: Final = 1024
# The host looks after about so many steps of traces: less than 1 % of the smallest steps.
LOOK_EVERY: Final = 256


class Missed(NamedTuple):
    """What traces did since the host looked last."""

    steps: int  # how many steps
    # Of steps that overflowed in a row: the number of the first, counted from 1, and how many.
    stretches: list[tuple[int, int]]
    lost: int  # how many stretches were overwritten before anybody looked; `stretches` holds the latest


class History:
    """The log of one loss scale. No checkpoint saves it.

    Attributes:
        in_graph: The variables belong to a graph of TensorFlow 1, and only its sessions know them.
        counts: Int64 vector: steps that traces made in this process, how many overflowed, in how many stretches.
        stretches: Int64 matrix, written in a ring: number of the first step of a stretch, and how many steps.
    """

    def __init__(self) -> None:
        """Make the variables: in a graph of TensorFlow 1 such that no initializer has to run."""
        self.in_graph = not tf.compat.v1.executing_eagerly_outside_functions()
        with tf.init_scope():
            make = functools.partial(tf.Variable, trainable=False)
            if self.in_graph:  # known to no saver
                make = functools.partial(tf.compat.v1.Variable, trainable=False, use_resource=True, collections=[])
            self.counts = make(tf.zeros([3], tf.int64))
            self.stretches = make(tf.zeros([STRETCHES, 2], tf.int64))
        # A graph that is finished takes no more operations.
        variables = (self.counts, self.stretches) if self.in_graph else ()
        self._reads = {id(variable): self._value(variable) for variable in variables}
        self._seen = 0, 0, 0

    def note(self, finite: Any) -> list[Any]:
        """Note one more step, in a trace or a graph, and return the operations that do it; `finite` may be a tensor."""
        if finite is True:
            return [self.counts.assign_add([1, 0, 0])]
        counts, stretches = self._value(self.counts), self._value(self.stretches)
        step, number = counts[0] + 1, counts[2]
        # Not an index, which would be a constant to XLA and compiled in every step.
        last = tf.gather(stretches, (number - 1) % STRETCHES)
        goes_on = tf.logical_and(number > 0, tf.equal(last[0] + last[1], step))
        entry = tf.where(goes_on, last + tf.constant([0, 1], tf.int64), tf.stack([step, tf.ones_like(step)]))
        place = tf.where(goes_on, number - 1, number) % STRETCHES
        change = tf.equal(tf.range(STRETCHES, dtype=tf.int64), place)
        new = tf.cast(tf.logical_not(goes_on), tf.int64)
        more = tf.stack([tf.ones_like(new), tf.ones_like(new), new])
        if finite is not False:
            change = tf.logical_and(change, tf.logical_not(finite))
            more *= tf.where(finite, tf.constant([1, 0, 0], tf.int64), tf.ones([3], tf.int64))
        return [
            self.stretches.assign(tf.where(change[:, None], entry, stretches)),
            self.counts.assign(counts + more),
        ]

    def _value(self, variable: Any) -> Any:
        if not self.in_graph:
            return tf.convert_to_tensor(variable)
        started = tf.compat.v1.is_variable_initialized(variable)
        return tf.cond(started, variable.read_value, lambda: tf.zeros(variable.shape, variable.dtype))

    def _numbers(self, variable: Any) -> Any:
        if not self.in_graph:
            return read(variable)
        return tf.compat.v1.get_default_session().run(self._reads[id(variable)])

    def restart(self) -> None:
        """Read from the beginning next: another session has variables of its own."""
        self._seen = 0, 0, 0

    def grew(self) -> bool:
        """Return whether traces made steps since `read`. Sync: one."""
        return int(self._numbers(self.counts)[0]) != self._seen[0]

    def read(self) -> Missed:
        """Return what traces did since the last call. Sync: one; with overflows since, two."""
        steps, overflows, number = self._numbers(self.counts).tolist()
        before, overflows_before, number_before = self._seen
        self._seen = steps, overflows, number
        if overflows == overflows_before:
            return Missed(steps - before, [], 0)
        ring = self._numbers(self.stretches)
        oldest = max(number_before - 1, 0)  # which may have gone on
        lost = max(number - STRETCHES - oldest, 0)
        stretches = []
        for entry in range(oldest + lost, number):
            first, length = ring[entry % STRETCHES].tolist()
            first, end = max(first, before + 1), first + length
            if first < end:
                stretches.append((first - before, end - first))
        return Missed(steps - before, stretches, lost)


class LossHistory:
    """The log of steps that traces made with losses of several ids: what each found. No checkpoint saves it.

    Attributes:
        latest: Float vector, of the last step: the next loss scale of the lowest loss id, and the most skipped steps
            in a row of any.
    """

    def __init__(self) -> None:
        """Make the variables."""
        self.latest = tf.Variable([0.0, 0.0], trainable=False)
        self._count = tf.Variable(0, trainable=False, dtype=tf.int64)  # entries so far
        # Written in a ring: number of the step, loss id, and whether its gradients were finite.
        self._entries = tf.Variable(tf.zeros([STRETCHES, 3], tf.int64), trainable=False)
        self._seen = 0

    def note(self, step: Any, finite: Mapping[int, Any]) -> None:
        """Note a step in a trace, by its number and what it found by loss id; those of id 0 alone are in `History`."""
        if set(finite) == {0}:
            return
        count, entries = tf.convert_to_tensor(self._count), tf.convert_to_tensor(self._entries)
        for loss_id, flag in finite.items():
            change = tf.equal(tf.range(STRETCHES, dtype=tf.int64), count % STRETCHES)
            entry = tf.stack([step, tf.constant(loss_id, tf.int64), tf.cast(flag, tf.int64)])
            entries = tf.where(change[:, None], entry, entries)
            count += 1
        self._entries.assign(entries)
        self._count.assign(count)

    def grew(self) -> bool:
        """Return whether traces made steps since `read`. Sync: one."""
        return int(read(self._count)) != self._seen

    def read(self) -> tuple[dict[int, dict[int, bool]], int]:
        """Return the steps since the last call, by number, and how many entries were overwritten. Sync: one or two."""
        count, before = int(read(self._count)), self._seen
        self._seen = count
        steps: dict[int, dict[int, bool]] = {}
        if count != before:
            ring = read(self._entries)
            for entry in range(max(before, count - STRETCHES), count):
                step, loss_id, finite = ring[entry % STRETCHES].tolist()
                steps.setdefault(step, {})[loss_id] = bool(finite)
        return steps, max(count - STRETCHES - before, 0)


class _Looks:
    """When the host looks: it counts calls, and how many steps they make."""

    def __init__(self) -> None:
        self.watched: weakref.WeakSet[ScaleGroup] = weakref.WeakSet()
        self.left = self.interval = LOOK_EVERY

    def count_call(self) -> None:
        """Look if it is time."""
        self.left -= 1
        if self.left <= 0:
            self.look()

    def look(self) -> None:
        """Let all loss scales follow their traces and send their events."""
        before, calls = self.steps(), self.interval - self.left
        self.left = self.interval  # a listener may call functions
        try:
            for group in list(self.watched):
                ledger: Any = group.ledger
                ledger.look(group)
        finally:  # a listener may raise
            steps = self.steps() - before
            observer = ScaleGroup.observer
            every = LOOK_EVERY if observer is None else min([LOOK_EVERY, *observer.intervals])
            self.interval = max(1, min(every, every * max(calls, 1) // max(steps, 1)))
            self.left = self.interval

    def steps(self) -> int:
        return sum(group.steps for group in self.watched)


_looks: Final = _Looks()
look: Final[Callable[[], None]] = _looks.look
atexit.register(look)
retracing.before_calls(_looks.count_call)


def watch(group: ScaleGroup) -> None:
    """Look at a loss scale from now on, as long as it lives; its ledger has a `look`."""
    _looks.watched.add(group)
