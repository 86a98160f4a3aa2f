"""The meter of an optimizer: what an update did to a sample of every parameter.

Outside of functions core counts. In a function the counts are one variable, which the host reads when it looks, and a
step takes one of three branches: it is skipped, applied, or applied and looked at. Numbers are compared as bits there:
TensorFlow's kernels and compilers flush small floats to zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import tensorflow as tf

from ampx.errors import UnsupportedByBackendError
from ampx.formats import FORMATS, stride
from ampx.protocol import ScaleGroup
from ampx.rooms import METER_SAMPLES, make_meter

from . import gradients, masters
from .contexts import on_host
from .device_scale import VariableLedger
from .pending import ReceivedGradients
from .replicas import read, several

if TYPE_CHECKING:
    from ampx.numerics.host_meter import HostMeter, Sampled
    from ampx.numerics.meter import Meter

_NUMBERS: Final = 4  # of a parameter: moved, unchanged, flushed, and the bits of the largest magnitude
_MAGNITUDE: Final = 0x7FFFFFFF
_INFINITE: Final = 0x7F800000  # the bits of infinity; those of finite magnitudes are smaller


class Leaf(NamedTuple):
    """A parameter in a step.

    Attributes:
        variable: What is updated.
        gradient: Its dense floating gradient, or None.
        divided: Whether it was divided by the loss scale.
    """

    variable: Any
    gradient: Any
    divided: bool = False


class _Row(NamedTuple):
    name: str
    dtype: str
    elements: int

    @property
    def sampled(self) -> int:
        return -(-self.elements // stride(self.elements, METER_SAMPLES))


class OptimizerMeter:
    """The meter of one optimizer, in functions and outside of them.

    Attributes:
        host: The meter of steps outside of functions, which keeps what that of functions read, too.
        observers: The same, for those steps; none where not every step updates.
    """

    def __init__(self, ledger: VariableLedger, compute: str, received: ReceivedGradients, accumulates: bool) -> None:
        """Begin with no step of this compute dtype; where it `accumulates`, not every step updates."""
        self.host: HostMeter = make_meter(compute, self._sample)
        self.observers = () if accumulates else (self.host,)
        self._ledger, self._compute, self._received = ledger, compute, received
        # Of each list of parameters the variable that functions count in, and which step of it was read last.
        self._numbers: dict[tuple[_Row, ...], Any] = {}
        self._read: dict[tuple[_Row, ...], int] = {}

    def _sample(self, optimizer: object, slopes: bool) -> list[Sampled]:
        """Sample what the running step updates, and its gradients if `slopes`. Sync: one for each of them."""
        variables = [masters.of(variable) for variable in self._received.variables]
        return gradients.meter_samples(self._received.grads, variables, slopes)

    def check(self) -> None:
        """Raise where the meter was asked for, and cannot look."""
        group = self._ledger.contexts.host
        if not (group.meter_asked and group.meter_every):
            return
        reasons = {
            "on several replicas, none of which has the sum of their gradients": several(),
            "and accumulates gradients, of which ampx sees only micro-batches": not self.observers,
            "in a function with others that share its loss scale": not on_host() and len(group.members) > 1,
            "in a function with losses of several loss_ids": not on_host() and bool(self._ledger.others),
        }
        for reason, applies in reasons.items():
            if applies:
                raise UnsupportedByBackendError(
                    f"amp.meter_every is {group.meter_every}, and the optimizer steps {reason}; accepted: one replica, "
                    f"one optimizer with one loss scale of its own, and no gradient_accumulation_steps. Set "
                    f"amp.meter_every = 0 before wrap_optimizer."
                )

    def leaves(
        self, variables: Sequence[Any], received: Sequence[Any], unscaled: Sequence[Any], scaled: bool, divided: bool
    ) -> Sequence[Leaf]:
        """List what a step in a trace updates, with gradients that it holds anyway; () where the meter does not look.

        Args:
            variables: What is updated.
            received: The gradients as the step was given them.
            unscaled: The same, divided by the loss scale.
            scaled: Whether those that were received carry the loss scale.
            divided: Whether the unscaled ones were divided by it, here or before.
        """
        if not self._looks(variables) or len(variables) != len(unscaled):  # of which the raw optimizer complains
            return ()
        listed = []
        for variable, before, after in zip(variables, received, unscaled, strict=True):
            if after is None or isinstance(after, tf.IndexedSlices) or not after.dtype.is_floating:
                listed.append(Leaf(variable, None))
            elif scaled and after.dtype in gradients.LOW:  # what flushed when it was divided does not come back
                listed.append(Leaf(variable, before))
            else:
                listed.append(Leaf(variable, after, divided))
        return listed if any(leaf.gradient is not None for leaf in listed) else ()

    def _looks(self, variables: Sequence[Any]) -> bool:
        """Return whether steps in traces that update these variables are metered."""
        group = self._ledger.contexts.host
        if not (group.meter_every and self.observers and self._ledger.moves_alone(group)):
            return False
        # A third branch makes every small step some 1 % slower: only where it was asked for, or updates are lost.
        low = any(tf.as_dtype(variable.dtype).base_dtype in gradients.LOW for variable in variables)
        return group.meter_asked or low

    def choose(
        self, finite: Any, scale: Any, leaves: Sequence[Leaf], skip: Callable[[], None], apply: Callable[[], None]
    ) -> None:
        """Trace a step that is skipped, applied, or applied and counted.

        Args:
            finite: Whether it is applied, a boolean scalar tensor.
            scale: The loss scale of the gradients.
            leaves: What is updated.
            skip: Skips the step.
            apply: Makes the update.
        """
        step, every = self._ledger.next_step(), self._ledger.contexts.host.meter_every
        if self.look not in self._ledger.followers:
            self._ledger.followers.append(self.look)
        rows = tuple(
            _Row(gradients.name(leaf.variable), tf.as_dtype(leaf.variable.dtype).name, math.prod(leaf.variable.shape))
            for leaf in leaves
        )
        counted = [leaf for leaf in leaves if leaf.gradient is not None]
        sizes = [row.sampled if leaf.gradient is not None else 0 for leaf, row in zip(leaves, rows, strict=True)]
        numbers = self._variable(rows)
        update = _function(apply)  # traced once for two branches

        def metered() -> None:
            before = _bits([leaf.variable for leaf in counted])
            update()
            same = tf.equal(before, _bits([leaf.variable for leaf in counted]))
            counts = _counts(_slopes(counted, scale), same, sizes, self._compute)
            first = tf.stack([tf.cast(step, tf.int32), tf.bitcast(tf.cast(scale, tf.float32), tf.int32)])
            numbers.assign(tf.concat([first, counts], 0))

        # What is seldom done is one call, for TensorFlow visits each operation of a branch that is not taken.
        branches = skip, update, _function(metered, _noinline=True)
        turn = tf.cast(tf.equal(step % every, 0), tf.int32)
        tf.switch_case(tf.cast(finite, tf.int32) * (1 + turn), [partial(_done, branch) for branch in branches])

    def _variable(self, rows: tuple[_Row, ...]) -> Any:
        if rows not in self._numbers:
            with tf.init_scope():
                self._numbers[rows] = tf.Variable(tf.zeros([2 + _NUMBERS * len(rows)], tf.int32), trainable=False)
        return self._numbers[rows]

    def look(self, group: ScaleGroup) -> None:
        """Read what functions counted since the last look, and send its events. Sync: one a list of parameters."""
        from ampx.numerics.meter import report  # it may have been taken out; nothing is metered then

        for rows, variable in list(self._numbers.items()):
            bits = read(variable)
            step = int(bits[0])
            if step == self._read.get(rows, 0):
                continue
            self._read[rows] = step
            meter = _reading(bits, self._compute, rows)
            self.host.note(meter)
            report(group, step, meter.lost, meter.flushed, meter.headroom)


def _function(function: Callable[[], None], **attributes: Any) -> Callable[[], None]:
    call: Callable[[], None] = tf.function(function, autograph=False, experimental_attributes=attributes)
    return call


def _done(function: Callable[[], None]) -> Any:
    function()
    return tf.constant(0)


def _sampled(values: Any) -> Any:
    flat = tf.reshape(tf.convert_to_tensor(values), [-1])
    distance = stride(int(flat.shape[0]), METER_SAMPLES)
    return flat if distance == 1 else flat[::distance]  # tracing takes time


def _bits(variables: Sequence[Any]) -> Any:
    """Return integers, of samples of all variables, that are equal where the values are: zeros of either sign are."""
    wide = tf.float64 if any(variable.dtype == tf.float64 for variable in variables) else tf.float32
    bits = tf.bitcast(_joined(map(_sampled, variables), wide), tf.int64 if wide == tf.float64 else tf.int32)
    return tf.where(tf.equal(bits, bits.dtype.min), tf.zeros_like(bits), bits)


def _slopes(leaves: Sequence[Leaf], scale: Any) -> Any:
    """Return samples of all gradients as they were scaled."""
    factor = tf.cast(scale, tf.float32)
    samples = [_sampled(leaf.gradient) for leaf in leaves]
    if all(leaf.divided for leaf in leaves):
        return _joined(samples, tf.float32) * factor
    pairs = zip(leaves, samples, strict=True)
    return _joined(
        [values * tf.cast(factor, values.dtype) if leaf.divided else values for leaf, values in pairs], tf.float32
    )


def _joined(samples: Iterable[Any], dtype: Any) -> Any:
    return tf.concat([values if values.dtype == dtype else tf.cast(values, dtype) for values in samples], 0)


def _counts(slopes: Any, same: Any, sizes: Sequence[int], compute: str) -> Any:
    """Return the numbers of all parameters in a row; those of parameters without a gradient, of size 0, are 0."""
    magnitude = tf.bitwise.bitwise_and(tf.bitcast(slopes, tf.int32), _MAGNITUDE)
    finite = magnitude < _INFINITE
    moved = tf.logical_and(finite, magnitude > 0)
    flushes = int(np.float32(FORMATS[compute].flushes_to).view(np.int32))
    masks = moved, tf.logical_and(moved, same), tf.logical_and(moved, magnitude <= flushes)
    # Which parameter an element belongs to; a constant would be as large as all samples.
    owners = tf.searchsorted(np.cumsum(sizes, dtype=np.int32), tf.range(sum(sizes)), "right")
    counts = tf.math.unsorted_segment_sum(tf.cast(tf.stack(masks, 1), tf.int32), owners, len(sizes))
    largest = tf.math.unsorted_segment_max(tf.where(finite, magnitude, 0), owners, len(sizes))
    return tf.reshape(tf.concat([counts, tf.maximum(largest, 0)[:, None]], 1), [-1])


def _reading(bits: Any, compute: str, rows: Sequence[_Row]) -> Meter:
    from ampx.numerics.meter import Meter, ParameterMeter  # as above

    room = math.log2(FORMATS[compute].largest)
    entries = []
    for row, numbers in zip(rows, bits[2:].reshape(-1, _NUMBERS), strict=True):
        moved, unchanged, flushed, _ = numbers.tolist()
        largest = float(numbers.view(np.float32)[3])
        headroom = room - math.log2(largest) if largest else None
        entries.append(ParameterMeter(row.name, row.dtype, row.sampled, moved, unchanged, flushed, 0, headroom))
    return Meter(int(bits[0]), compute, float(bits[1:2].view(np.float32)[0]), tuple(entries))
