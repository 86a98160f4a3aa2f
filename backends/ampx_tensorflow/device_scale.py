"""The loss scale in variables: any trace moves it by the specification, and the host follows by reading a history."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import tensorflow as tf

from ampx.errors import AmpxWarning
from ampx.events import StepResult
from ampx.protocol import Ledger, Member, Outcome, ScaleGroup
from ampx.scale_state import LossScale, LossScaleState, next_state, round_to_float32

from . import history, retracing
from .contexts import Contexts, on_host
from .meter import TracedMeter
from .replicas import several


class Slots(NamedTuple):
    """What one optimizer keeps in variables."""

    pending: Any  # the scale that waiting gradients carry; 0 where none wait
    # Of the last step: the scale its gradients carried, whether they were finite, and their norm (NaN where none was
    # measured). All 0 before the first.
    last: Any


class VariableLedger(Ledger):
    """Keeps one group's scale in variables."""

    def __init__(self, group: ScaleGroup, scale: Any, counters: Any) -> None:
        """Take the scale, and a vector: growth_tracker, hysteresis_tracker, consecutive_skips, counted steps."""
        self.scale = scale
        self.counters = counters
        self.history = history.History()
        self.given: Any = None  # what `factor` gave last
        self.slots: list[Slots] = []
        self.meters: list[TracedMeter] = []
        self.contexts = Contexts(group)
        self._following = threading.Lock()
        self._moved = False
        self._pinned = False
        if group.enabled:
            history.watch(group)

    def join(self) -> int:
        """Make the variables of one more optimizer, which nothing tracks or saves; gives its position."""
        with tf.init_scope():
            self.slots.append(Slots(tf.Variable(0.0, trainable=False), tf.Variable([0.0] * 3, trainable=False)))
        return len(self.slots) - 1

    def factor(self, group: ScaleGroup, loss_id: int) -> Any:
        """Return the scale that waiting gradients carry, or else the current one: see `pin` for when they differ."""
        if is_one(group.config):
            self.given = tf.constant(1.0)
            return self.given
        retracing.depend()
        self.given = tf.convert_to_tensor(self.scale)
        # On the host each optimizer of a list knows its own, and what another function scaled for it cannot be stepped.
        if self._pinned and not (len(self.slots) > 1 and on_host()):
            waiting = tf.reduce_max(tf.stack([tf.convert_to_tensor(slots.pending) for slots in self.slots]))
            self.given = tf.where(waiting > 0, waiting, self.given)
        return self.given

    def pin(self) -> None:
        """Note that waiting gradients may carry another scale than the current one from now on."""
        if not self._pinned:
            self._pinned = True
            _configurations.changed += 1

    def settle(self, group: ScaleGroup, window: Sequence[Outcome]) -> None:
        """Move the scale; on the host at once with its events, in a trace by operations. Sync: on the host, one."""
        if on_host():
            self._settle_on_host(group, window)
        else:
            self._settle_in_trace(group, window)
        moved, self._moved = self._moved, False
        for outcome in () if moved else window:
            self._note(group, outcome)

    def _settle_on_host(self, group: ScaleGroup, window: Sequence[Outcome]) -> None:
        self.resolve(group)
        for outcome in window:
            outcome.finite = {0: bool(outcome.finite[0])}
            outcome.scale = float(outcome.scale)
        try:
            group.advance(window)
        finally:  # a listener may raise; the step is counted all the same
            self._write(group.states[0], group.steps)

    def _settle_in_trace(self, group: ScaleGroup, window: Sequence[Outcome]) -> None:
        retracing.depend()
        if self._moved:
            return
        flags = [outcome.finite[0] for outcome in window]
        self._move(group, flags[0] if len(flags) == 1 else tf.reduce_all(tf.stack(flags)))

    def moves_alone(self, group: ScaleGroup) -> bool:
        """Return whether one optimizer's step in a trace moves the scale, on one device."""
        return len(group.members) == 1 and not tf.executing_eagerly() and not several()

    def next_step(self) -> Any:
        """Return, in a trace, the number of the step that is being made, from 1 on."""
        return tf.unstack(tf.convert_to_tensor(self.counters))[3] + 1

    def move(self, group: ScaleGroup, finite: bool, scale: Any, norm: Any) -> None:
        """Do what `settle` does, which then finds it done, in a branch of a trace where the finiteness is known.

        It takes a third of the operations, which is what small steps feel.
        """
        retracing.depend()  # the host looks when the function is called
        self._move(group, finite)
        self._note(group, Outcome(group.members[0], {0: finite}, scale, norm))
        self._moved = True

    def _move(self, group: ScaleGroup, finite: Any) -> None:
        counters = tf.unstack(tf.convert_to_tensor(self.counters))
        state = LossScaleState(tf.convert_to_tensor(self.scale), *counters[:3])
        after = next_state(group.config, state, finite, where)
        if group.config.dynamic:
            self.scale.assign(after.scale)
        trackers = after.growth_tracker, after.hysteresis_tracker, after.consecutive_skips
        self.counters.assign(tf.stack([*trackers, counters[3] + 1]))
        self.history.note(finite)

    def _note(self, group: ScaleGroup, outcome: Outcome) -> None:
        norm = float("nan") if outcome.grad_norm is None else tf.cast(outcome.grad_norm, tf.float32)
        finite, scale = tf.cast(outcome.finite[0], tf.float32), tf.cast(outcome.scale, tf.float32)
        self.slots[group.members.index(outcome.member)].last.assign(tf.stack([scale, finite, norm]))

    def resolve(self, group: ScaleGroup) -> None:
        """Follow the steps that traces have made, and send their events. Sync: one."""
        # Not waited for: listeners look as well, and one that waits for a thread that looks would wait for ever.
        if not on_host() or not self._following.acquire(blocking=False):
            return
        try:
            growth, hysteresis, skips, steps = self.counters.numpy().tolist()
            state = LossScaleState(float(self.scale.numpy()), growth, hysteresis, skips)
            missed = self.history.read()
            if missed.steps or state != group.states[0] or steps != group.steps:
                self._follow(group, missed, state, steps)
            if missed.steps:
                for meter in self.meters:
                    meter.look(group)
        finally:
            self._following.release()

    def _follow(self, group: ScaleGroup, missed: history.Missed, state: LossScaleState, steps: int) -> None:
        try:
            follow(group, missed, state)
        finally:  # or a checkpoint was restored
            group.steps, group.states[0] = steps, state
            for member, slots in zip(group.members, self.slots, strict=True):
                if missed.steps:
                    _take_over(member, slots, state)

    def pace(self, group: ScaleGroup) -> None:
        """Look as often as somebody wants to hear. Sync: one; two more if traces made steps."""
        history.look()

    def look(self, group: ScaleGroup) -> None:
        """Follow traces, if they made steps, and send the events. Sync: one; two more if they did."""
        if on_host() and self.history.grew():
            group.resolve()

    def read(self, outcome: Outcome) -> dict[int, bool]:
        """Look at the flags. Sync: one."""
        return {loss_id: bool(finite) for loss_id, finite in outcome.finite.items()}

    def reload(self, group: ScaleGroup) -> None:
        """Write the group's states into the variables; a trace holds the configuration, so there are new ones now.

        Sync: one.
        """
        _configurations.changed += 1
        if any(float(slots.pending.numpy()) > 0 for slots in self.slots):
            self.pin()
        self._write(group.states[0], group.steps)

    def _write(self, state: LossScaleState, steps: int) -> None:
        self.scale.assign(round_to_float32(state.scale))
        self.counters.assign([state.growth_tracker, state.hysteresis_tracker, state.consecutive_skips, steps])

    def result(self, position: int, measured: bool) -> StepResult:
        """Return, in a trace, what the last step did, as tensors; the norm where it is measured."""
        scale, finite, norm = tf.unstack(tf.convert_to_tensor(self.slots[position].last))
        skips = tf.convert_to_tensor(self.counters)[2]
        return StepResult(
            finite > 0, finite > 0, scale, tf.convert_to_tensor(self.scale), skips, norm if measured else None
        )


def is_one(config: LossScale) -> bool:
    """Return whether a loss scale is 1 for ever, so that there is nothing to multiply or divide."""
    return not config.dynamic and config.init_scale == 1.0


class _Configurations:
    """How often something changed that traces hold: a configuration, or whether a scale is pinned."""

    def __init__(self) -> None:
        self.changed = 0


_configurations: Final = _Configurations()


@retracing.decided_by
def configurations() -> int:
    """Return how often something changed that traces hold."""
    return _configurations.changed


def where(condition: Any, if_true: Any, if_false: Any) -> Any:
    """Choose in a trace; a Python number takes the dtype of what it meets."""
    if isinstance(condition, bool):
        return if_true if condition else if_false
    dtype = next((branch.dtype for branch in (if_true, if_false) if tf.is_tensor(branch)), None)
    return tf.where(condition, tf.convert_to_tensor(if_true, dtype), tf.convert_to_tensor(if_false, dtype))


def follow(group: ScaleGroup, missed: history.Missed, state: LossScaleState) -> None:
    """Repeat on the host the steps that traces made, so that their events become due.

    Where the variables' state is another one, somebody wrote it, as a checkpoint does: no events then.
    """
    if missed.lost:
        warnings.warn(
            f"{missed.steps} steps came in one call of a function, with overflows in more than {history.STRETCHES} "
            f"stretches, of which {missed.lost} are not known one by one: none of these steps sends events. The loss "
            f"scale is {state.scale:g}, after {state.consecutive_skips} skipped steps in a row. Call the function for "
            f"fewer steps at a time.",
            AmpxWarning,
            stacklevel=2,
        )
    elif _replay(group.config, group.states[0], missed) == state:
        for bad, count in _runs(missed):
            if not bad:
                _advance_finite(group, count)
                continue
            for _ in range(count):
                group.advance([Outcome(group.members[0], {0: False}, group.states[0].scale)])


def _runs(missed: history.Missed) -> Iterator[tuple[bool, int]]:
    """Return the steps in order: whether they overflowed, and how many in a row."""
    done = 0
    for first, length in missed.stretches:
        yield False, first - 1 - done
        yield True, length
        done = first - 1 + length
    yield False, missed.steps - done


def _replay(config: LossScale, state: LossScaleState, missed: history.Missed) -> LossScaleState:
    for bad, count in _runs(missed):
        while count:
            alike = 0 if bad else _alike(config, state, count)
            state = _after(config, state, alike) if alike else next_state(config, state, not bad)
            count -= max(alike, 1)
    return state


def _advance_finite(group: ScaleGroup, count: int) -> None:
    while count:
        alike = _alike(group.config, group.states[0], count)
        if group.intervals:  # a step of which somebody wants to hear is told by itself
            alike = min(alike, *(every - 1 - group.steps % every for every in group.intervals))
        if alike:
            group.states[0] = _after(group.config, group.states[0], alike)
            group.steps += alike
        else:
            group.advance([Outcome(group.members[0], {0: True}, group.states[0].scale)])
        count -= max(alike, 1)


def _alike(config: LossScale, state: LossScaleState, count: int) -> int:
    """Return how many of so many finite steps only count: the scale does not grow."""
    return min(count, config.growth_interval - 1 - int(state.growth_tracker)) if config.dynamic else count


def _after(config: LossScale, state: LossScaleState, count: int) -> LossScaleState:
    """Return the state after so many finite steps that only count."""
    if not config.dynamic:
        return replace(state, consecutive_skips=0)
    return LossScaleState(state.scale, state.growth_tracker + count, config.hysteresis, 0)


def _take_over(member: Member, slots: Slots, state: LossScaleState) -> None:
    scale, finite, norm = slots.last.numpy().tolist()
    if scale > 0:
        fine = finite > 0
        norm_or_none = norm if fine and norm == norm else None
        member.note_result(StepResult(fine, fine, scale, state.scale, state.consecutive_skips, norm_or_none))
