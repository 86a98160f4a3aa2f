"""The loss scale in variables: any trace moves it by the specification, and the host follows by reading a history."""

from __future__ import annotations

import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final, NamedTuple

import tensorflow as tf

from ampx.errors import AmpxWarning
from ampx.events import StepResult
from ampx.protocol import Ledger, Member, Outcome, ScaleGroup
from ampx.scale_state import LossScale, LossScaleState, is_one, next_state, round_to_float32

from . import history, retracing
from .contexts import Contexts, on_host
from .replicas import read, several, write

_UNMEASURED: Final = -1.0  # stands for a norm


class Slots(NamedTuple):
    """What one optimizer keeps in variables."""

    pending: Any  # the scale that waiting gradients carry; 0 where none wait
    # Of the last step: the scale its gradients carried, whether they were finite, and their norm (`_UNMEASURED` where
    # none was measured). All 0 before the first.
    last: Any


class LossVariables(NamedTuple):
    """The scale of one loss of another id than 0."""

    scale: Any
    counters: Any  # a vector: growth_tracker, hysteresis_tracker, consecutive_skips


class VariableLedger(Ledger):
    """Keeps one group's scale in variables, and those of losses of other ids than 0 from their first use on.

    Attributes:
        others: The variables of those losses, by id.
        followers: Functions that follow the steps of traces, too.
        by_loss: What traces did with several losses; None while all losses are of id 0.
        foreign: Members, of any place, whose waiting gradients carry the scale of a loss of another id than 0.
        written: How many of the counted steps somebody wrote into the variables, as a checkpoint does; may be negative.
    """

    def __init__(self, group: ScaleGroup, scale: Any, counters: Any) -> None:
        """Take the scale, and a vector: growth_tracker, hysteresis_tracker, consecutive_skips, counted steps."""
        self.scale = scale
        self.counters = counters
        self.history = history.History()
        self.last_factor: Any = None  # what `factor` returned last
        self.slots: list[Slots] = []
        self.followers: list[Callable[[ScaleGroup], None]] = []
        self.others: dict[int, LossVariables] = {}
        self.by_loss: history.LossHistory | None = None
        self.foreign: weakref.WeakSet[Member] = weakref.WeakSet()
        self.written = 0
        self.contexts = Contexts(group)
        self._following = threading.Lock()
        self._moved = False
        self._pinned = False
        if group.enabled:
            history.watch(group)

    def join(self) -> int:
        """Make the variables of one more optimizer, which nothing tracks or saves; return its position."""
        with tf.init_scope():
            self.slots.append(Slots(tf.Variable(0.0, trainable=False), tf.Variable([0.0] * 3, trainable=False)))
        return len(self.slots) - 1

    def waits(self, place: int) -> bool:
        """Return whether the variable says that gradients of an optimizer wait; functions write it, too. Sync: one."""
        with tf.init_scope():  # a function that is traced now runs next
            return not several() and float(read(self.slots[place].pending)) > 0

    def factor(self, group: ScaleGroup, loss_id: int) -> Any:
        """Return the scale that waiting gradients carry, or else the current one: see `pin` for when they differ."""
        if is_one(group.config):
            self.last_factor = tf.constant(1.0)
            return self.last_factor
        retracing.depend()
        if loss_id:
            self.last_factor = tf.convert_to_tensor(self.other(loss_id).scale)
            return self.last_factor
        self.last_factor = tf.convert_to_tensor(self.scale)
        # On the host each optimizer of a list knows its own, and what another function scaled for it cannot be stepped.
        foreign = bool(self.foreign) and any(member in self.foreign for member in group.members)
        if self._pinned and not foreign and not (len(self.slots) > 1 and on_host()):
            waiting = tf.reduce_max(tf.stack([tf.convert_to_tensor(slots.pending) for slots in self.slots]))
            self.last_factor = tf.where(waiting > 0, waiting, self.last_factor)
        return self.last_factor

    def other(self, loss_id: int) -> LossVariables:
        """Return the variables of a loss of another id than 0, which its first use makes."""
        if loss_id not in self.others:
            # In a thread of its own: a function that is being traced would take the variables for its own, and may make
            # some in its first trace only.
            with ThreadPoolExecutor(1) as pool:
                pool.submit(self._make_other, loss_id, self.contexts.host.state_of(loss_id)).result()
            _configurations.changed += 1  # traces that step have to move this one, too
        return self.others[loss_id]

    def _make_other(self, loss_id: int, state: LossScaleState) -> None:
        trackers = [state.growth_tracker, state.hysteresis_tracker, state.consecutive_skips]
        self.others[loss_id] = LossVariables(
            tf.Variable(float(state.scale), trainable=False, dtype=tf.float32),
            tf.Variable(trackers, trainable=False, dtype=tf.int64),
        )
        if self.by_loss is None:
            self.by_loss = history.LossHistory()

    def saved_others(self) -> dict[str, Any]:
        """Return the variables of losses of other ids than 0, by the names under which they are saved."""
        return {
            f"loss_{loss_id}_{name}": variable
            for loss_id, other in self.others.items()
            for name, variable in other._asdict().items()
        }

    def find_other(self, name: str) -> Any:
        """Return what `saved_others` has under a name, which makes it where it is new; None for another name."""
        match = re.fullmatch(r"loss_(\d+)_(scale|counters)", name)
        return None if match is None else getattr(self.other(int(match[1])), match[2])

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
            outcome.finite = {loss_id: bool(finite) for loss_id, finite in outcome.finite.items()}
            outcome.scale = float(outcome.scale)
        try:
            group.advance(window)
        finally:  # a listener may raise; the step is counted all the same
            self._write(group)

    def _settle_in_trace(self, group: ScaleGroup, window: Sequence[Outcome]) -> None:
        retracing.depend()
        if self._moved:
            return
        if self.by_loss is not None:
            self._move_losses(group, _merged(window))
            return
        flags = [outcome.finite[0] for outcome in window]
        self._move(group, flags[0] if len(flags) == 1 else tf.reduce_all(tf.stack(flags)))

    def moves_alone(self, group: ScaleGroup) -> bool:
        """Return whether one optimizer's step in a trace moves its only scale, on one device."""
        alone = len(group.members) == 1 and self.by_loss is None
        return alone and not tf.executing_eagerly() and not several()

    def next_step(self) -> Any:
        """Return, in a trace, the number of the step that is being made, from 1 on."""
        return tf.unstack(tf.convert_to_tensor(self.counters))[3] + 1

    def mover(self, group: ScaleGroup, scale: Any, norm: Any) -> Callable[[bool], None]:
        """Return a function that moves the scale in a branch of a trace, where the finiteness is known.

        `settle` then finds it done. It takes a third of the operations, which is what small steps feel. Where
        `moves_alone` is not so, the function leaves it to `settle`.
        """
        if not self.moves_alone(group):
            return lambda finite: None

        def move(finite: bool) -> None:
            retracing.depend()  # the host looks when the function is called
            self._move(group, finite)
            self._note(group, Outcome(group.members[0], {0: finite}, scale, norm))
            self._moved = True

        return move

    def _move(self, group: ScaleGroup, finite: Any) -> None:
        counters = tf.unstack(tf.convert_to_tensor(self.counters))
        state = LossScaleState(tf.convert_to_tensor(self.scale), *counters[:3])
        after = next_state(group.config, state, finite, where)
        if group.config.dynamic:
            self.scale.assign(after.scale)
        trackers = after.growth_tracker, after.hysteresis_tracker, after.consecutive_skips
        self.counters.assign(tf.stack([*trackers, counters[3] + 1]))
        self.history.note(finite)

    def _move_losses(self, group: ScaleGroup, finite: Mapping[int, Any]) -> None:
        """Move the scales of the losses that had a part in a step."""
        by_loss: Any = self.by_loss
        after: dict[int, LossScaleState] = {}
        for loss_id, flag in finite.items():
            if not loss_id:
                self._move(group, flag)
                trackers = tf.unstack(tf.convert_to_tensor(self.counters))[:3]
                after[0] = LossScaleState(tf.convert_to_tensor(self.scale), *trackers)
                continue
            other = self.other(loss_id)
            state = LossScaleState(tf.convert_to_tensor(other.scale), *tf.unstack(tf.convert_to_tensor(other.counters)))
            after[loss_id] = state = next_state(group.config, state, flag, where)
            other.scale.assign(state.scale)
            other.counters.assign(tf.stack([state.growth_tracker, state.hysteresis_tracker, state.consecutive_skips]))
        if 0 not in finite:
            self.counters.assign_add([0, 0, 0, 1])
        by_loss.note(tf.convert_to_tensor(self.counters)[3], finite)
        skips = tf.reduce_max(tf.stack([state.consecutive_skips for state in after.values()]))
        by_loss.latest.assign(tf.stack([after[min(after)].scale, tf.cast(skips, tf.float32)]))

    def _note(self, group: ScaleGroup, outcome: Outcome) -> None:
        # Not NaN, at which `tf.debugging.enable_check_numerics` ends the script.
        norm = _UNMEASURED if outcome.grad_norm is None else tf.cast(outcome.grad_norm, tf.float32)
        flags = [tf.cast(flag, tf.float32) for flag in outcome.finite.values()]
        finite = flags[0] if len(flags) == 1 else tf.reduce_min(tf.stack(flags))
        scale = tf.cast(outcome.scale, tf.float32)
        self.slots[group.members.index(outcome.member)].last.assign(tf.stack([scale, finite, norm]))

    def resolve(self, group: ScaleGroup) -> None:
        """Follow the steps that traces have made, and send their events. Sync: one."""
        # Not waited for: listeners resolve as well, and one that waits for a resolving thread would deadlock.
        if not on_host() or not self._following.acquire(blocking=False):
            return
        try:
            growth, hysteresis, skips, steps = read(self.counters).tolist()
            state = LossScaleState(float(read(self.scale)), growth, hysteresis, skips)
            missed = self.history.read()
            if self.by_loss is not None:
                self._follow_losses(group, missed, {0: state, **self._read_others()}, steps)
            elif missed.steps or state != group.states[0] or steps != group.steps:
                self._follow(group, missed, state, steps)
            if missed.steps:
                for follow_up in self.followers:
                    follow_up(group)
        finally:
            self._following.release()

    def _follow(self, group: ScaleGroup, missed: history.Missed, state: LossScaleState, steps: int) -> None:
        self.written += steps - group.steps - missed.steps
        try:
            follow(group, missed, state)
        finally:  # or a checkpoint was restored
            group.steps, group.states[0] = steps, state
            for member, slots in zip(group.members, self.slots, strict=True):
                if missed.steps:
                    _take_over(member, slots, state.scale, state.consecutive_skips)

    def _read_others(self) -> dict[int, LossScaleState]:
        return {
            loss_id: LossScaleState(float(read(other.scale)), *read(other.counters).tolist())
            for loss_id, other in self.others.items()
        }

    def _follow_losses(
        self, group: ScaleGroup, missed: history.Missed, states: dict[int, LossScaleState], steps: int
    ) -> None:
        by_loss: Any = self.by_loss
        rows, lost = by_loss.read()
        try:
            follow_losses(group, missed, rows, lost, states, steps)
        finally:
            group.steps = steps
            # A loss that never had a part in a step has no state, unless one was written, as a checkpoint does.
            took_part = {0, *group.states, *(key for finite in rows.values() for key in finite)}
            took_part |= {key for key, state in states.items() if state != group.config.initial_state()}
            group.states.update({key: state for key, state in states.items() if key in took_part})
            if missed.steps or rows or lost:
                next_scale, skips = read(by_loss.latest).tolist()
                for member, slots in zip(group.members, self.slots, strict=True):
                    _take_over(member, slots, next_scale, int(skips))

    def pace(self, group: ScaleGroup) -> None:
        """Look as often as the group's observer does from now on. Sync: one; two more if traces made steps."""
        history.look()

    def look(self, group: ScaleGroup) -> None:
        """Follow traces, if they made steps, and send the events. Sync: one; two more if they did."""
        if on_host() and (self.history.grew() or (self.by_loss is not None and self.by_loss.grew())):
            group.resolve()

    def read(self, outcome: Outcome) -> dict[int, bool]:
        """Look at the flags. Sync: one."""
        return {loss_id: bool(finite) for loss_id, finite in outcome.finite.items()}

    def reload(self, group: ScaleGroup) -> None:
        """Write the group's states into the variables; a trace holds the configuration, so there are new ones now.

        Sync: one.
        """
        _configurations.changed += 1
        if any(float(read(slots.pending)) > 0 for slots in self.slots):
            self.pin()
        self._write(group)

    def _write(self, group: ScaleGroup) -> None:
        state = group.states[0]
        write(self.scale, round_to_float32(state.scale))
        trackers = [state.growth_tracker, state.hysteresis_tracker, state.consecutive_skips]
        write(self.counters, [*trackers, group.steps])
        for loss_id, other in self.others.items():
            state = group.state_of(loss_id)
            write(other.scale, round_to_float32(state.scale))
            write(other.counters, [state.growth_tracker, state.hysteresis_tracker, state.consecutive_skips])

    def result(self, position: int, measured: bool) -> StepResult:
        """Return, in a trace, what the last step did, as tensors; the norm where it is measured."""
        scale, finite, norm = tf.unstack(tf.convert_to_tensor(self.slots[position].last))
        next_scale, skips = tf.convert_to_tensor(self.scale), tf.convert_to_tensor(self.counters)[2]
        if self.by_loss is not None:
            next_scale, skips = tf.unstack(tf.convert_to_tensor(self.by_loss.latest))
            skips = tf.cast(skips, tf.int64)
        return StepResult(finite > 0, finite > 0, scale, next_scale, skips, norm if measured else None)


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


def _merged(window: Sequence[Outcome]) -> dict[int, Any]:
    """Return by loss id whether all optimizers that used it found finite gradients."""
    finite: dict[int, Any] = {}
    for outcome in window:
        for loss_id, flag in outcome.finite.items():
            finite[loss_id] = tf.logical_and(finite[loss_id], flag) if loss_id in finite else flag
    return finite


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


def follow_losses(
    group: ScaleGroup,
    missed: history.Missed,
    rows: Mapping[int, Mapping[int, bool]],
    lost: int,
    states: Mapping[int, LossScaleState],
    steps: int,
) -> None:
    """Repeat on the host the steps that traces made with several losses, one by one.

    Args:
        group: What the host knows.
        missed: The steps that loss id 0 had a part in.
        rows: By number of the step, what was found by loss id, of steps with other ids.
        lost: How many of those steps are not known.
        states: The variables' states by loss id: where they are others, somebody wrote them, and no events are due.
        steps: How many steps were counted.
    """
    if missed.lost or lost:
        warnings.warn(
            f"{steps - group.steps} steps came in one call of a function, of which {missed.lost + lost} are not known "
            f"one by one: none of these steps sends events. Call the function for fewer steps at a time.",
            AmpxWarning,
            stacklevel=2,
        )
        return
    verdicts = _verdicts(missed, rows, range(group.steps + 1, steps + 1))
    replayed = dict(group.states)
    for finite in verdicts:
        for loss_id, flag in finite.items():
            replayed[loss_id] = next_state(group.config, replayed.get(loss_id) or group.config.initial_state(), flag)
    if all(replayed.get(key, state) == state for key, state in states.items()):
        for finite in verdicts:
            group.advance([Outcome(group.members[0], finite, group.states[0].scale)])


def _verdicts(
    missed: history.Missed, rows: Mapping[int, Mapping[int, bool]], steps: Sequence[int]
) -> list[dict[int, bool]]:
    """Return by loss id whether each step was finite, in order; empty where a script wrote the counter of steps."""
    first = [not bad for bad, count in _runs(missed) for _ in range(count)]
    verdicts = []
    for step in steps:
        finite = dict(rows.get(step, {}))
        if 0 in finite or not finite:
            if not first:
                return []
            finite[0] = first.pop(0)
        verdicts.append(finite)
    return [] if first else verdicts


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
        if group.observer is not None:  # a step that it looks at is repeated by itself
            alike = min(alike, *(every - 1 - group.steps % every for every in group.observer.intervals))
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


def _take_over(member: Member, slots: Slots, next_scale: float, skips: int) -> None:
    scale, finite, norm = read(slots.last).tolist()
    if scale > 0:
        fine = finite > 0
        norm_or_none = norm if fine and norm != _UNMEASURED else None
        member.note_result(StepResult(fine, fine, scale, next_scale, skips, norm_or_none))
