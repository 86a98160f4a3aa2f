"""The meter in functions: what an update did to a sample of every parameter, counted where somebody asked for it.

The counts are one variable, which the host reads when it looks; a step that is not looked at takes the other branch of
two conditions. Numbers are compared as bits: TensorFlow's kernels and compilers flush small floats to zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import tensorflow as tf

from ampx.numerics.formats import FORMATS
from ampx.numerics.host_meter import HostMeter
from ampx.numerics.meter import SAMPLES, Meter, ParameterMeter, report
from ampx.numerics.watching import stride
from ampx.protocol import ScaleGroup

from . import gradients

_NUMBERS: Final = 4  # of a parameter: moved, unchanged, flushed, and the bits of the largest magnitude
_MAGNITUDE: Final = 0x7FFFFFFF
_INFINITE: Final = 0x7F800000  # the bits of infinity; those of finite magnitudes are smaller


class Leaf(NamedTuple):
    """A parameter in a step.

    Attributes:
        variable: What is updated.
        gradient: Its dense floating gradient, or None.
        scale: What makes of it the gradient as it was scaled; None for nothing.
    """

    variable: Any
    gradient: Any
    scale: Any


class _Row(NamedTuple):
    name: str
    dtype: str
    elements: int

    @property
    def sampled(self) -> int:
        return -(-self.elements // stride(self.elements, SAMPLES))


class TracedMeter:
    """Meters the steps that functions make with one optimizer."""

    def __init__(self, compute: str, host: HostMeter) -> None:
        """Begin with no step of this compute dtype; `host` keeps what was read last."""
        self._compute, self._host = compute, host
        # Of each list of parameters the variable, and which step of it was read last.
        self._numbers: dict[tuple[_Row, ...], Any] = {}
        self._read: dict[tuple[_Row, ...], int] = {}

    def update(self, step: Any, every: int, scale: Any, leaves: Sequence[Leaf], update: Callable[[], None]) -> None:
        """Trace an update, and a count of what it does in every so many steps.

        Args:
            step: The step, counted from 1.
            every: In every so many steps it counts.
            scale: The loss scale of the gradients.
            leaves: What is updated.
            update: Makes the update.
        """
        rows = tuple(
            _Row(gradients.name(leaf.variable), tf.as_dtype(leaf.variable.dtype).name, math.prod(leaf.variable.shape))
            for leaf in leaves
        )
        counted = [(leaf, row.sampled) for leaf, row in zip(leaves, rows, strict=True) if leaf.gradient is not None]
        if not counted:
            update()
            return
        numbers = self._variable(rows)
        wide = any(leaf.variable.dtype == tf.float64 for leaf, _ in counted)
        kind = tf.int64 if wide else tf.int32

        def sample() -> Any:
            return _bits([_sampled(leaf.variable) for leaf, _ in counted], kind)

        def count() -> Any:
            columns = _columns(counted, before, sample(), self._compute)
            zeros = tf.zeros([_NUMBERS], tf.int32)
            values = [zeros if leaf.gradient is None else next(columns) for leaf in leaves]
            first = tf.stack([tf.cast(step, tf.int32), tf.bitcast(tf.cast(scale, tf.float32), tf.int32)])
            numbers.assign(tf.concat([first, *values], 0))
            return tf.constant(0)

        turn = tf.equal(step % every, 0)
        total = sum(size for _, size in counted)
        before = _either(turn, sample, lambda: tf.constant(0, kind, [total]))
        update()
        _either(turn, count, lambda: tf.constant(0))

    def _variable(self, rows: tuple[_Row, ...]) -> Any:
        if rows not in self._numbers:
            with tf.init_scope():
                self._numbers[rows] = tf.Variable(tf.zeros([2 + _NUMBERS * len(rows)], tf.int32), trainable=False)
        return self._numbers[rows]

    def look(self, group: ScaleGroup) -> None:
        """Read what functions counted since the last look, and send its events. Sync: one a list of parameters."""
        for rows, variable in list(self._numbers.items()):
            bits = variable.numpy()
            step = int(bits[0])
            if step == self._read.get(rows, 0):
                continue
            self._read[rows] = step
            meter = _reading(bits, self._compute, rows)
            self._host.note(meter)
            report(group, step, meter.lost, meter.flushed, meter.headroom)


def _either(turn: Any, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
    """Choose; what is seldom done is one call, for TensorFlow visits each operation of a branch that is not taken."""
    call = tf.function(if_true, autograph=False, experimental_attributes={"_noinline": True})
    return tf.cond(turn, call, if_false)


def _sampled(values: Any) -> Any:
    flat = tf.reshape(tf.convert_to_tensor(values), [-1])
    distance = stride(int(flat.shape[0]), SAMPLES)
    return flat if distance == 1 else flat[::distance]  # tracing takes time


def _bits(samples: Sequence[Any], kind: Any) -> Any:
    """Return integers, of all samples in a row, that are equal where the values are: zeros of either sign are."""
    wide = tf.float64 if kind == tf.int64 else tf.float32
    bits = tf.bitcast(tf.concat([tf.cast(values, wide) for values in samples], 0), kind)
    return tf.where(tf.equal(bits, kind.min), tf.zeros_like(bits), bits)


def _columns(counted: Sequence[tuple[Leaf, int]], before: Any, after: Any, compute: str) -> Any:
    """Return an iterator over the numbers of each parameter."""
    slopes = []
    for leaf, _ in counted:
        values = tf.cast(_sampled(leaf.gradient), tf.float32)
        slopes.append(values if leaf.scale is None else values * tf.cast(leaf.scale, tf.float32))
    magnitude = tf.bitwise.bitwise_and(tf.bitcast(tf.concat(slopes, 0), tf.int32), _MAGNITUDE)
    finite = magnitude < _INFINITE
    moved = tf.logical_and(finite, magnitude > 0)
    flushes = int(np.float32(FORMATS[compute].flushes_to).view(np.int32))
    masks = moved, tf.logical_and(moved, tf.equal(before, after)), tf.logical_and(moved, magnitude <= flushes)
    sizes = [size for _, size in counted]
    counts = tf.split(tf.cast(tf.stack(masks), tf.int32), sizes, 1)
    magnitudes = tf.split(tf.where(finite, magnitude, tf.zeros_like(magnitude)), sizes)
    return (
        tf.concat([tf.reduce_sum(part, 1), tf.reduce_max(largest)[None]], 0)
        for part, largest in zip(counts, magnitudes, strict=True)
    )


def _reading(bits: Any, compute: str, rows: Sequence[_Row]) -> Meter:
    room = math.log2(FORMATS[compute].largest)
    entries = []
    for row, numbers in zip(rows, bits[2:].reshape(-1, _NUMBERS), strict=True):
        moved, unchanged, flushed, _ = numbers.tolist()
        largest = float(numbers.view(np.float32)[3])
        headroom = room - math.log2(largest) if largest else None
        entries.append(ParameterMeter(row.name, row.dtype, row.sampled, moved, unchanged, flushed, 0, headroom))
    return Meter(int(bits[0]), compute, float(bits[1:2].view(np.float32)[0]), tuple(entries))
