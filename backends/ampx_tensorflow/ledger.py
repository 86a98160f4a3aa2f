"""The loss scale in variables: any trace moves it by the specification, and the host follows by reading a history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import tensorflow as tf

from ampx.events import StepResult
from ampx.group import Member, Outcome, ScaleGroup
from ampx.ledger import Ledger
from ampx.scale_state import LossScale, LossScaleState, next_state, round_to_float32

from . import retracing
from .contexts import Contexts, on_host

# So many steps of traces between two looks of the host send their events; of more, none do.
REMEMBERED: Final = 63


class Slots(NamedTuple):
    """What one optimizer keeps in variables.

    Attributes:
        pending: The scale that waiting gradients carry; 0 where none wait.
        last: Of the last step: the scale its gradients carried, whether they were finite, and their norm (NaN
            where none was measured). All 0 before the first.
    """

    pending: Any
    last: Any


class VariableLedger(Ledger):
    """Keeps one group's scale in variables."""

    def __init__(self, group: ScaleGroup, scale: Any, counters: Any, traced: Any) -> None:
        """Take the variables.

        Args:
            group: The group on the host.
            scale: Float32 scalar.
            counters: Int64 vector: growth_tracker, hysteresis_tracker, consecutive_skips, counted steps.
            traced: Int64 vector that no checkpoint restores: the steps that traces made in this process, and the
                finiteness of the last of them as bits, the last step lowest, 1 for an overflow.
        """
        self.scale = scale
        self.counters = counters
        self.traced = traced
        self.given: Any = None  # what `factor` gave last
        self._seen = 0
        self.slots: list[Slots] = []
        self.contexts = Contexts(group)
        self._resolving = False

    def join(self, slots: Slots) -> int:
        """Take the variables of one more optimizer; gives its position. Sync: none."""
        self.slots.append(slots)
        return len(self.slots) - 1

    def factor(self, group: ScaleGroup, loss_id: int) -> Any:
        """Give the scale that waiting gradients carry, or else the current one. Sync: none."""
        if is_one(group.config):
            self.given = tf.constant(1.0)
            return self.given
        scale = tf.convert_to_tensor(self.scale)
        pending = [tf.convert_to_tensor(slots.pending) for slots in self.slots]
        waiting = pending[0] if len(pending) == 1 else tf.reduce_max(tf.stack(pending))
        self.given = tf.where(waiting > 0, waiting, scale)
        return self.given

    def settle(self, group: ScaleGroup, window: Sequence[Outcome]) -> None:
        """Move the scale; on the host at once with its events, in a trace by operations. Sync: on the host, one."""
        if on_host():
            self._settle_on_host(group, window)
        else:
            self._settle_in_trace(group, window)
        for outcome in window:
            self._note(group, outcome)

    def _settle_on_host(self, group: ScaleGroup, window: Sequence[Outcome]) -> None:
        self.resolve(group)
        for outcome in window:
            outcome.finite = {loss_id: bool(finite) for loss_id, finite in outcome.finite.items()}
            outcome.scale = float(outcome.scale)
        try:
            group.advance(window)
        finally:  # a listener may raise; the step is counted all the same
            self._write(group.states[0], group.steps)

    def _settle_in_trace(self, group: ScaleGroup, window: Sequence[Outcome]) -> None:
        retracing.depend()
        flags = [finite for outcome in window for finite in outcome.finite.values()]
        finite = flags[0] if len(flags) == 1 else tf.reduce_all(tf.stack(flags))
        counters = tf.unstack(tf.convert_to_tensor(self.counters))
        state = LossScaleState(tf.convert_to_tensor(self.scale), *counters[:3])
        after = next_state(group.config, state, finite, where)
        self.scale.assign(after.scale)
        self.counters.assign(tf.stack([*_trackers(after), counters[3] + 1]))
        count, bits = tf.unstack(tf.convert_to_tensor(self.traced))
        self.traced.assign(tf.stack([count + 1, bits * 2 + tf.cast(~finite, tf.int64)]))

    def _note(self, group: ScaleGroup, outcome: Outcome) -> None:
        (finite,) = outcome.finite.values()
        norm = float("nan") if outcome.grad_norm is None else outcome.grad_norm
        numbers = [tf.cast(one, tf.float32) for one in (outcome.scale, finite, norm)]
        self.slots[group.members.index(outcome.member)].last.assign(tf.stack(numbers))

    def resolve(self, group: ScaleGroup) -> None:
        """Follow the steps that traces have made, and send their events. Sync: one."""
        if self._resolving or not on_host():
            return
        self._resolving = True
        try:
            self._follow(group)
        finally:
            self._resolving = False

    def _follow(self, group: ScaleGroup) -> None:
        *trackers, steps = (int(number) for number in self.counters.numpy())
        state = LossScaleState(float(self.scale.numpy()), *trackers)
        count, history = (int(number) for number in self.traced.numpy())
        missed, self._seen = count - self._seen, count
        if missed == 0 and state == group.states[0] and steps == group.steps:
            return
        bits = [history >> place & 1 == 1 for place in reversed(range(min(missed, REMEMBERED)))]
        try:
            if missed <= REMEMBERED and _replay(group, bits) == state:
                for bad in bits:
                    scale = group.states[0].scale
                    group.advance([Outcome(group.members[0], {0: not bad}, scale)])
        finally:  # a listener may raise; or there were too many steps, or a checkpoint was restored
            group.steps, group.states[0] = steps, state
            for member, slots in zip(group.members, self.slots, strict=True):
                if missed:
                    _take_over(member, slots, state)

    def read(self, outcome: Outcome) -> dict[int, bool]:
        """Look at the flags. Sync: one."""
        return {loss_id: bool(finite) for loss_id, finite in outcome.finite.items()}

    def reload(self, group: ScaleGroup) -> None:
        """Write the group's states into the variables; a trace holds the configuration, so there are new ones now.

        Sync: one.
        """
        _configurations.loaded += 1
        self._write(group.states[0], group.steps)

    def _write(self, state: LossScaleState, steps: int) -> None:
        self.scale.assign(round_to_float32(state.scale))
        self.counters.assign([*_trackers(state), steps])

    def result(self, position: int, measured: bool) -> StepResult:
        """Tell in a trace what the last step did, as tensors; the norm where it is measured. Sync: none."""
        scale, finite, norm = tf.unstack(tf.convert_to_tensor(self.slots[position].last))
        skips = tf.convert_to_tensor(self.counters)[2]
        return StepResult(
            finite > 0, finite > 0, scale, tf.convert_to_tensor(self.scale), skips, norm if measured else None
        )


def is_one(config: LossScale) -> bool:
    """Tell whether a loss scale is 1 for ever, so that there is nothing to multiply or divide. Sync: none."""
    return not config.dynamic and config.init_scale == 1.0


class _Configurations:
    """How often a configuration was loaded."""

    def __init__(self) -> None:
        self.loaded = 0


_configurations: Final = _Configurations()


@retracing.decided_by
def configurations() -> int:
    """Tell how often a configuration was loaded in this process. Sync: none."""
    return _configurations.loaded


def where(condition: Any, if_true: Any, if_false: Any) -> Any:
    """Choose in a trace; a Python number takes the dtype of what it meets. Sync: none."""
    dtype = next((one.dtype for one in (if_true, if_false) if tf.is_tensor(one)), None)
    return tf.where(condition, tf.convert_to_tensor(if_true, dtype), tf.convert_to_tensor(if_false, dtype))


def _trackers(state: LossScaleState) -> tuple[Any, Any, Any]:
    return state.growth_tracker, state.hysteresis_tracker, state.consecutive_skips


def _replay(group: ScaleGroup, bits: Sequence[bool]) -> LossScaleState:
    state = group.states[0]
    for bad in bits:
        state = next_state(group.config, state, not bad)
    return state


def _take_over(member: Member, slots: Slots, state: LossScaleState) -> None:
    scale, finite, norm = (float(number) for number in slots.last.numpy())
    if scale > 0:
        fine = finite > 0
        member.result = StepResult(
            fine, fine, scale, state.scale, state.consecutive_skips, norm if fine and norm == norm else None
        )
