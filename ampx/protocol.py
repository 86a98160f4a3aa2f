"""One loss scale, the optimizers that share it, and the order in which calls may come.

This is host-side bookkeeping without any framework. A backend that keeps the scale on a device gives the
group its own `Ledger`; the bookkeeping stays the same.

The protocol is closed: `stage`, `factors` and `result` of a `Member` are written here and nowhere else; everybody
calls its verbs. And it is written ahead: whatever cannot be done twice (dividing gradients, the update, moving the
scale) happens while the stage is "changing", which the next stage replaces afterwards. So an exception between any
two lines, a Ctrl-C say, leaves a stage in which calls are refused until `zero_grad` starts over.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final, Literal, NoReturn, TypeAlias

from .errors import NestedScaleError, NotScaledError, ProtocolError
from .events import Event, ScaleChanged, ScaleCollapsed, StepResult, StepSkipped
from .scale_state import LossScale, LossScaleState, Scalar, next_state

UNREACHED_STEPS: Final = 3  # so many in a row are no accident
WAITING_STEPS: Final = 50  # nor is it that a loss scale waits so long for one of those who share it


class NotCopied:
    """State of a wrapper that belongs to the running process: a copy of the wrapper makes its own."""

    __slots__ = ()


class StepObserver(abc.ABC):
    """Looks on at the steps of an optimizer, which do not know what for; changes nothing."""

    @abc.abstractmethod
    def before(self, optimizer: Any) -> bool:
        """Look at a wrapped optimizer whose step begins, before it divides; return whether to look `after` it, too."""

    @abc.abstractmethod
    def after(self, optimizer: Any, finite: Mapping[int, Any]) -> None:
        """Look at it after the step, when the scale has moved and events were sent.

        Args:
            optimizer: The wrapped optimizer.
            finite: Finiteness by loss id, as `Member.finish` got it: where one is not, the step was skipped.
        """


class MoveObserver(abc.ABC):
    """Looks on at loss scales every so many steps, once the host knows how they moved; changes nothing.

    Attributes:
        intervals: The numbers of steps.
    """

    intervals: Sequence[int]

    def is_due(self, step: int, since: int | None = None) -> bool:
        """Return whether it looks at a step.

        Args:
            step: Its number.
            since: The last step that the host knew of; by default the one before.
        """
        before = step - 1 if since is None else since
        return any(step // every > before // every for every in self.intervals)

    @abc.abstractmethod
    def moved(
        self, group: ScaleGroup, before: Mapping[int, LossScaleState], window: Sequence[Outcome]
    ) -> Iterator[Event]:
        """Look at a step that is due; return events to send after those of the move itself.

        Args:
            group: The loss scale, after the move.
            before: Its states before, by loss id.
            window: The steps of its members since it last moved.
        """


class Ledger(abc.ABC):
    """Keeps a group's scale and settles its windows. The host default settles at once.

    Attributes:
        on_device: The scale is a tensor that no step waits for.
    """

    on_device: ClassVar[bool] = False

    @abc.abstractmethod
    def factor(self, group: ScaleGroup, loss_id: int) -> Scalar:
        """Return the scale for a loss: a Python float, or a float32 scalar on the device."""

    @abc.abstractmethod
    def settle(self, group: ScaleGroup, window: Sequence[Outcome]) -> None:
        """Move the scale after a window's last member stepped. Sync: as the backend says."""

    @abc.abstractmethod
    def resolve(self, group: ScaleGroup) -> None:
        """Bring the host's view up to date. Sync: allowed."""

    def pace(self, group: ScaleGroup) -> None:
        """Note that the group's observer changed, where steps wait until the host looks at them. Sync: allowed."""

    def close(self, group: ScaleGroup) -> None:
        """Bring the host's view up to date for the last time, because the session ends. Sync: allowed."""
        group.resolve()

    @abc.abstractmethod
    def read(self, outcome: Outcome) -> dict[int, bool]:
        """Return the finiteness by loss id of a step whose window is not settled yet. Sync: allowed."""

    @abc.abstractmethod
    def reload(self, group: ScaleGroup) -> None:
        """Take over the group's states after they were loaded. Sync: allowed."""


class HostLedger(Ledger):
    """The scale is a Python number and moves as soon as the last member stepped."""

    def factor(self, group: ScaleGroup, loss_id: int) -> float:
        """Return the scale for a loss."""
        scale: float = group.state_of(loss_id).scale
        return scale

    def settle(self, group: ScaleGroup, window: Sequence[Outcome]) -> None:
        """Move the scale at once."""
        group.advance(window)

    def resolve(self, group: ScaleGroup) -> None:
        """Do nothing: the host's view is the only one."""

    def read(self, outcome: Outcome) -> dict[int, bool]:
        """Return what the host knew at once."""
        return outcome.finite

    def reload(self, group: ScaleGroup) -> None:
        """Do nothing: the group's states are the scale."""


HOST_LEDGER: Final = HostLedger()


# idle: no scaled gradients. inside: a scale_loss body runs. scaled: gradients carry the scale.
# unscaled: gradients are so, and wait for the step. changing: a verb changes gradients, weights or the scale; the next
# call finds this stage only where an exception ended the verb half-way. interrupted: a change was broken off.
Stage: TypeAlias = Literal["idle", "inside", "scaled", "unscaled", "changing", "interrupted"]
Emit: TypeAlias = Callable[[str, Event], None]
# What one scale_loss body found and brings: stage and factors before, its own factor and loss id. Known by identity.
Region: TypeAlias = tuple[Stage, dict[int, Scalar], Scalar, int]


@dataclass(eq=False)
class Outcome:
    """What one step of one member found; completed when the group's scale moves."""

    member: Member
    finite: dict[int, Any]  # finiteness by loss id; bools, or device scalars until a `Ledger` resolves them
    scale: Scalar  # the loss scale that the gradients carried
    grad_norm: Any = None  # norm of the unscaled gradients, a number or a device scalar, or None
    latest: bool = True  # no step of the member without gradients came since, of which `last_step` tells


@dataclass(eq=False)
class ScaleGroup:
    """One loss scale (one per loss id) and its members."""

    observer: ClassVar[MoveObserver | None] = None  # of all groups of the process; None while nobody looks on
    framework: str  # name of the framework, for events
    config: LossScale  # the loss scale's configuration
    enabled: bool = True  # False makes every call transparent
    index: int = 0  # position in `amp.state_dict()`
    steps: int = 0  # counted steps
    ledger: Ledger = HOST_LEDGER  # where the scale lives
    # Host view of the state by loss id; read it after `resolve`.
    states: dict[int, LossScaleState] = field(default_factory=dict)
    members: list[Member] = field(default_factory=list)
    window: list[Outcome] = field(default_factory=list)
    emit: Emit | None = None  # receives the framework's name and an event; None for nobody
    meter_every: int = 0  # every so many steps the meter looks at an update; 0 for never
    meter_asked: bool = False  # whether somebody said so, and not the default
    skipped: dict[int, int] = field(default_factory=dict)  # skipped steps by loss id
    _due: list[Iterator[Event]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.states.setdefault(0, self.config.initial_state())

    def add_member(self) -> Member:
        """Return a new member of this group."""
        member = Member(self)
        self.members.append(member)
        return member

    def state_of(self, loss_id: int) -> LossScaleState:
        """Return the state of one loss: the first where it had no part in a step yet."""
        return self.states.get(loss_id) or self.config.initial_state()

    def resolve(self) -> None:
        """Bring `states` and the members' results up to date, and send the events. Sync: as the ledger needs."""
        self.ledger.resolve(self)
        if self._due:
            self.send_events()

    def load(self, config: LossScale, states: dict[int, LossScaleState]) -> None:
        """Take over a configuration and states. Sync: as the ledger needs."""
        self.resolve()
        self.config = config
        self.states = dict(states)
        self.states.setdefault(0, config.initial_state())
        self.ledger.reload(self)

    def unsettled(self, member: Member) -> StepResult | None:
        """Return what a member's step did while the group waits for other members; None where it waits for none.

        The scale moves with the last member's step, so `next_scale` is the present one.

        Sync: as the ledger's `read`.
        """
        for outcome in reversed(self.window):
            if outcome.member is member and outcome.latest:
                finite_by_loss = self.ledger.read(outcome)
                finite = all(finite_by_loss.values())
                state = self.state_of(min(finite_by_loss))
                skips = 0 if finite else state.consecutive_skips + 1
                norm = outcome.grad_norm if finite else None
                return StepResult(finite, finite, float(outcome.scale), state.scale, skips, norm)
        return None

    def close(self, outcome: Outcome | None) -> None:
        """Take one member's step (None: it had nothing to step); settle when no member is pending.

        Sync: as the ledger.
        """
        closing = None
        if outcome is not None:
            closing = outcome.member
            self.window.append(outcome)
        for member in self.members:
            if member.stage != "idle" and member is not closing and not member.is_abandoned:
                return
        if self.window:
            window, self.window = self.window, []
            self.ledger.settle(self, window)

    def advance(self, window: Sequence[Outcome]) -> None:
        """Move the states by one window whose finiteness is known and fill in the results; events become due.

        Args:
            window: The steps of the members since the scale last moved; `finite` holds bools.
        """
        self.steps += 1
        finite_by_loss = window[0].finite if len(window) == 1 else _merged(window)
        observer = self.observer
        if observer is not None and not observer.is_due(self.steps):
            observer = None
        states = self.states if observer is None else dict(self.states)
        for loss_id, finite in finite_by_loss.items():
            before = self.state_of(loss_id)
            after = self.states[loss_id] = next_state(self.config, before, finite)
            if not finite:
                self.skipped[loss_id] = self.skipped.get(loss_id, 0) + 1
            if not finite or after.scale != before.scale:
                labels = (self.framework, self.index, loss_id, self.steps)
                self._due.append(self.events_of(labels, before, after, finite))
        for outcome in window:
            first = self.states[min(outcome.finite)]  # as `scale`, which is that of the lowest loss id
            finite = False not in outcome.finite.values()
            skips = first.consecutive_skips
            if len(outcome.finite) > 1:
                skips = max([self.states[loss_id].consecutive_skips for loss_id in outcome.finite])
            norm = outcome.grad_norm if finite else None
            if outcome.latest:
                result = (finite, finite, float(outcome.scale), first.scale, skips, norm)
                outcome.member._result = result  # a StepResult once somebody looks: here every step would wait for it
        if observer is not None:
            self._due.append(observer.moved(self, states, window))

    def send_events(self) -> None:
        """Send the events of moves that were not told yet. Sync: none, unless a listener does.

        Last in every call, because listeners may look at everything, call back, or raise.
        """
        due, self._due = self._due, []  # a listener that looks must not be told twice
        try:
            while due:
                self._send_each(due.pop(0))
        finally:
            self._due[:0] = due

    def _send_each(self, events: Iterator[Event]) -> None:
        try:
            for event in events:
                self.send(event)
        except Exception:  # of a listener: the events that are left are sent all the same
            self._send_each(events)
            raise

    def send(self, event: Event) -> None:
        """Send one event to the session of the framework, and to plugins."""
        if self.emit is not None:
            self.emit(self.framework, event)

    def events_of(
        self, labels: tuple[str, int, int, int], before: LossScaleState, after: LossScaleState, finite: bool
    ) -> Iterator[Event]:
        """Return the events of one move; `labels` is framework, group, loss id and step."""
        numbers = (before.scale, after.scale, after.consecutive_skips)
        if not finite:
            yield StepSkipped(*labels, *numbers)
        if after.scale != before.scale:
            yield ScaleChanged(*labels, *numbers)
        if after.consecutive_skips == self.config.max_consecutive_skips and not finite:
            yield ScaleCollapsed(
                *labels, *numbers, tuple(name for member in self.members for name in member.culprits())
            )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to the running process; the host's view is brought up to date first."""
        self.resolve()
        return {**self.__dict__, "ledger": HOST_LEDGER}


def _merged(window: Sequence[Outcome]) -> dict[int, bool]:
    """Return by loss id whether all members that used it found finite gradients."""
    finite_by_loss: dict[int, bool] = {}
    for outcome in window:
        for loss_id, finite in outcome.finite.items():
            finite_by_loss[loss_id] = finite and finite_by_loss.get(loss_id, True)
    return finite_by_loss


class Handle(abc.ABC):
    """What the calls of a session take: a wrapped optimizer, or an optimizer state that is a value.

    Where a framework's optimizer state is a value that the user carries, the loss scale is in it: such a backend makes
    a handle of a state in `Backend.state_handle`.

    Attributes:
        loss_scale: The current loss scale; a tensor where the state is traced. Sync: where it lives on the device.
        last_step: What the last step did; None before the first. Sync: likewise.
        ampx_group: The host's bookkeeping, for events, saving and loading.
        ampx_enabled: False where the session that wrapped was disabled.
    """

    @property
    @abc.abstractmethod
    def loss_scale(self) -> Any:
        """See the class."""

    @property
    @abc.abstractmethod
    def last_step(self) -> StepResult | None:
        """See the class."""

    @property
    @abc.abstractmethod
    def ampx_group(self) -> ScaleGroup:
        """See the class."""

    @property
    @abc.abstractmethod
    def ampx_enabled(self) -> bool:
        """See the class."""

    @abc.abstractmethod
    def ampx_unscale(self) -> None:
        """Unscale the pending gradients; idempotent until the next step."""

    @abc.abstractmethod
    def ampx_clip_grad_norm(self, max_norm: float) -> Any:
        """Unscale, clip the unscaled gradients by global L2 norm and return the norm before clipping."""

    @property
    def meter(self) -> Any:
        """What the last metered update did; None where the backend does not meter."""
        return None

    def ampx_observe(self, sent: dict[int, int]) -> StepResult | None:
        """Send the events of the last step, unless they were sent, and return its result.

        Args:
            sent: By position of the group, the last step whose events this session has sent.
        """
        return self.last_step

    def ampx_reloaded(self) -> Any:
        """Return what stands for this after `ampx_group` was loaded."""
        return self


def refuse_values(call: str, backend: str, sees: str) -> NoReturn:
    """Raise for a call that has nothing to work on, since gradients are values.

    Args:
        call: Its name, `unscale` or `clip_grad_norm`.
        backend: The backend's name.
        sees: The one call that is handed the gradients.
    """
    raise ProtocolError(
        f"{call} was called, but backend {backend!r} has gradients as values, which only {sees} sees; accepted: "
        f"wrap_optimizer(opt, max_grad_norm=…). Pass it there."
    )


class Member:
    """One optimizer's place in the protocol of its group."""

    def __init__(self, group: ScaleGroup) -> None:
        self.group = group
        self.stage: Stage = "idle"  # where the optimizer is between two steps
        # The scale that pending gradients carry, by loss id. Frozen until the step; replaced, never changed.
        self.factors: dict[int, Scalar] = {}
        self.counted = True  # the last step found gradients, or there was none yet
        self.mixes = False  # the wrapper keeps true and scaled gradients apart, so `scale_loss` may follow `unscale`
        self._unreached = 0  # steps in a row that found no gradient, although a loss was scaled for each
        self._dropped_at = -1  # how many steps were counted when scaled gradients were cleared and no step came since
        self._result: StepResult | tuple[Any, ...] | None = None
        # The latest scaled losses, if they cannot be weakly referenced: until the step they are known by this.
        self.held: list[Any] = []
        # Functions that return whether backward was called on the scaled losses; kept until it was, or a step
        # found gradients.
        self.sees_backward = False
        self.backwards: list[Callable[[], bool | None]] = []
        # The body that runs. It stays when zero_grad clears the gradients inside it: the stage is "idle" then.
        self._region: Region | None = None
        self._after: Stage = "idle"  # what `end_change` goes to
        self._owner: Callable[[], Any] | None = None
        self.observers: tuple[StepObserver, ...] = ()
        self._looking: list[Callable[[Mapping[int, Any]], None]] = []  # of those of them that look after the step, too

    def belong_to(self, optimizer: Any) -> None:
        """Note whose member this is; the scale does not wait for the step of an optimizer that is gone."""
        self._owner = weakref.ref(optimizer)

    def owner_of(self, optimizer: Any) -> Any:
        """Return the optimizer of this member, or the object of another library that derives from it in its place.

        What such an object (Fabric's, Lightning's) were told would stay with it, and its optimizer would not know.
        """
        if self._owner is None or "ampx_member" in getattr(optimizer, "__dict__", ()):
            return optimizer
        return self._owner() or optimizer

    @property
    def is_abandoned(self) -> bool:
        """Whether the optimizer is gone, or was not copied with the others that share the scale."""
        return self._owner is not None and self._owner() is None

    def culprits(self) -> tuple[str, ...]:
        """Return the names of the parameters whose gradients are not finite, as far as its optimizer can tell."""
        optimizer = None if self._owner is None else self._owner()
        return () if optimizer is None else tuple(optimizer.ampx_culprits())

    @property
    def result(self) -> StepResult | None:
        """The last step's result as far as the host knows it."""
        result = self._result
        if result is None or isinstance(result, StepResult):
            return result
        self._result = StepResult(*result)
        return self._result

    @property
    def factor(self) -> Scalar:
        """The scale that the pending gradients carry (of the first loss id); None while there are none."""
        return next(iter(self.factors.values()), None)

    @property
    def pending(self) -> bool:
        """Whether gradients may hang on the parameters that carry a scale or wait for the step."""
        return self.stage != "idle" or self._region is not None

    # -- questions that raise --------------------------------------------------------------------------

    def check_enter(self) -> None:
        """Raise unless a `scale_loss` body may start.

        Raises:
            NestedScaleError: A body for this optimizer is running.
            ProtocolError: The gradients were unscaled already and no step has come since, or a call was interrupted.
        """
        if self.stage == "inside":
            raise NestedScaleError(
                "scale_loss was entered again for an optimizer whose scale_loss body is still running; the "
                "gradients would be scaled twice. Leave the first block before entering the next (if an exception "
                "kept it from being left, call opt.zero_grad())."
            )
        if self.stage == "unscaled" and not self.mixes:
            raise ProtocolError(
                "scale_loss was called after unscale (or clip_grad_norm) and before step: true and scaled "
                "gradients would be added. Call opt.step() or opt.zero_grad() first, or unscale only after the "
                "last backward."
            )
        self._check_interrupted("scale_loss")

    def check_prepare(self) -> None:
        """Raise where gradients are pending, for what replaces the parameters.

        Raises:
            ProtocolError: There are some.
        """
        if self.pending:
            raise ProtocolError(
                "prepare was called while gradients of scale_loss are pending, which belong to the parameters as they "
                "were; accepted: between steps. Step first, or call the optimizer's zero_grad to forget them."
            )

    def check_step(
        self,
        written: str = (
            "Call backward inside `with ampx.scale_loss(loss, opt) as scaled:` before opt.step(), unscale or "
            "clip_grad_norm."
        ),
    ) -> None:
        """Raise unless scaled or unscaled gradients are pending, for a step or what may come right before it.

        Args:
            written: What the framework's users write before it.

        Raises:
            NotScaledError: No `scale_loss` came since the last step.
            NestedScaleError: A `scale_loss` body is still running.
            ProtocolError: A call was interrupted.
        """
        if self.stage in ("scaled", "unscaled"):
            return
        if self.stage == "idle" and self._region is None:
            raise NotScaledError(
                "the gradients did not go through scale_loss since the last step; dividing them by the loss scale "
                f"would shrink the update. {written}"
            )
        if self.stage in ("idle", "inside"):
            raise NestedScaleError(
                "step, unscale or clip_grad_norm was called inside a scale_loss body; the gradients are not complete "
                "there. Call it after the with block (if an exception kept it from being left, call opt.zero_grad())."
            )
        self._check_interrupted("step, unscale or clip_grad_norm")

    def watch_backward(self, answers: Sequence[Callable[[], bool | None]]) -> None:
        """Keep functions that return whether backward was called on losses; they hold the graphs until one was seen."""
        if not self._note_backward():
            self.backwards += answers

    def _note_backward(self) -> bool:
        if any(answer() for answer in self.backwards):
            self.sees_backward, self.backwards = True, []
        return self.sees_backward

    def check_backward(self, written: str = "`with ampx.scale_loss(loss, opt) as scaled: scaled.backward()`") -> None:
        """Raise where there are gradients of the loss itself and not of the scaled one; a wrapper with gradients asks.

        Args:
            written: How the framework's users write it.

        Raises:
            NotScaledError: Backward was called on what was passed to `scale_loss`, not on what its block yields.
        """
        if not self._note_backward() and any(answer() is False for answer in self.backwards):
            raise NotScaledError(
                f"the gradients are those of the loss that was passed to scale_loss, not of the scaled loss that its "
                f"block yields; dividing them by the loss scale would shrink the update. Call opt.zero_grad(), and "
                f"write {written}."
            )
        # Gradients that neither loss was asked for are made in another way, as in every step from here on.
        self.sees_backward, self.backwards = True, []

    def _check_interrupted(self, call: str) -> None:
        if self.stage in ("changing", "interrupted"):
            raise ProtocolError(
                f"{call} was called after an exception had interrupted the call before it (or two scale_loss bodies "
                f"overlapped): gradients may be divided or not, and applied or not; accepted: zero_grad, which starts "
                f"over. Call opt.zero_grad() and go on with the next batch."
            )

    # -- a scale_loss body -----------------------------------------------------------------------------

    def enter(self, factor: Scalar, loss_id: int) -> Region:
        """Note that a `scale_loss` body starts with this factor; `check_enter` comes first.

        Returns:
            What `leave` is given when the body ends.
        """
        before = self._after if self.stage == "changing" else self.stage
        region = (before, self.factors, factor, loss_id)
        self.stage, self._after = "changing", "interrupted"
        self.factors = {**self.factors, loss_id: factor}
        self._region = region
        self.stage = "inside"
        return region

    def leave(self, region: Region, completed: bool) -> bool | None:
        """Note that a body ended; the stage is "changing" until the wrapper tidied up and called `end_change`.

        Args:
            region: What `enter` returned.
            completed: Whether it ended without an exception; after one the stage will be what it was before.

        Returns:
            Whether its gradients count. None: the body was given up, by `zero_grad` and another body; nothing is to
            be tidied up.
        """
        if self._region is not region:
            if completed:  # its gradients were added to those of another body
                self.begin_change("interrupted")
            return None
        stage, factors, factor, loss_id = region
        if self.stage in ("changing", "interrupted"):  # a call in the body was broken off
            completed, stage = False, "interrupted"
        elif self.stage == "idle":  # the gradients were cleared in the body
            stage, factors = "idle", {}
        self.stage, self._after = "changing", "scaled" if completed else stage
        self.factors = {**factors, loss_id: factor} if completed else factors
        self._region = None
        return completed

    # -- changes ---------------------------------------------------------------------------------------

    def begin_change(self, after: Stage | None = None) -> None:
        """Note that something is about to be done that cannot be done twice.

        `note_scaled`, `note_unscaled`, `finish` and `forget` tell what came of it; `end_change` that the stage is as
        noted here.

        Args:
            after: The stage that `end_change` goes to; None for the present one.
        """
        self._after = self.stage if after is None else after
        self.stage = "changing"

    def end_change(self) -> None:
        """Go to the stage that `begin_change` noted: nothing was changed, or all is tidied up."""
        if self.stage == "changing":
            self.stage = self._after

    def begin_clear(self) -> None:
        """Note that the gradients are about to be cleared, which is a change where a step waits for them."""
        if self.stage not in ("idle", "inside"):
            self.begin_change()

    def end_clear(self) -> None:
        """Note that they are cleared: what was pending is forgotten."""
        if self.stage != "idle":
            self.forget()

    def note_scaled(self, factor: Scalar, loss_id: int = 0) -> None:
        """Note that all gradients carry this scale, whatever they carried before."""
        self.factors = {loss_id: factor}
        self.stage = "scaled"

    def note_unscaled(self, factor: Scalar = None) -> None:
        """Note that the gradients are unscaled and wait for the step.

        Args:
            factor: The scale (of loss id 0) that the step tells, where they never went through a body.
        """
        if factor is not None:
            self.factors = {0: factor}
        self.stage = "unscaled"

    def drop_factors(self) -> None:
        """Forget the scales of gradients that are gone, or kept elsewhere; the stage stays."""
        self.factors = {}

    def restart(self) -> None:
        """Forget pending gradients that others replace within the same step: the group is not told."""
        self._reset()

    def begin_step(self, optimizer: Any) -> None:
        """Have the observers look at a step that begins; `finish` has them look again. Sync: as they need."""
        self._looking = []
        for observer in self.observers:
            if observer.before(optimizer):
                self._looking.append(partial(observer.after, optimizer))

    def note_result(self, result: StepResult) -> None:
        """Note what a step did that was not counted here."""
        self._result = result

    def finish(self, finite: dict[int, Any], grad_norm: Any = None, scale: Scalar = None) -> None:
        """Close this member's step and, with the last member of the group, move the scale.

        Args:
            finite: Finiteness by loss id; device scalars where the group's ledger resolves them.
            grad_norm: Norm of the unscaled gradients, or None.
            scale: The scale that they carried; None for that of the lowest loss id, as noted or as it is now.

        Sync: as the group's ledger.
        """
        group = self.group
        self.counted = True
        if scale is None:
            lowest = min(finite) if len(finite) > 1 else next(iter(finite))
            scale = self.factors.get(lowest)
            if scale is None:
                scale = self.factor if self.factors else group.ledger.factor(group, lowest)
        self.stage = "changing"
        group.close(Outcome(self, finite, scale, grad_norm))
        self._reset()
        if group._due:
            group.send_events()
        if len(group.window) == WAITING_STEPS and group.config.dynamic and self._owner is not None:
            self._owner().ampx_warn_waiting(WAITING_STEPS)
        if self._looking:
            looking, self._looking = self._looking, []
            for look in looking:
                look(finite)

    def finish_empty(self, applied: bool = False) -> None:
        """Close a step that found no gradients: it is not counted, and the scale stays.

        Args:
            applied: The raw optimizer was stepped all the same.

        Sync: as the group's ledger.
        """
        self.group.resolve()
        optimizer: Any = None if self._owner is None else self._owner()
        stage = self._after if self.stage == "changing" else self.stage  # before the raw optimizer was stepped
        scaled = stage != "idle" or self._dropped_at == self.group.steps
        if self.counted or applied:  # reset here: steps that find gradients must not pay for it
            self._unreached = 0
        unreached = scaled and not applied and optimizer is not None and not optimizer.ampx_is_frozen()
        self._unreached += unreached
        self.counted, self._dropped_at = applied, -1
        state = self.group.states[0]
        self.forget(StepResult(applied, True, state.scale, state.scale, state.consecutive_skips))
        if unreached and self._unreached == UNREACHED_STEPS:
            optimizer.ampx_warn_unreached(UNREACHED_STEPS)

    def forget(self, result: StepResult | None = None) -> None:
        """Drop pending gradients without counting a step; inside a body, those so far.

        Args:
            result: What `last_step` shall say, where a step was asked for.

        Sync: as the group's ledger.
        """
        if result is None:
            if self.stage != "idle":  # PyTorch's wrapper forgets at every zero_grad, scaled gradients or not
                self._dropped_at = self.group.steps
        else:
            self._result = result
            for outcome in self.group.window:
                outcome.latest = outcome.latest and outcome.member is not self
        region = self._region if self.stage in ("inside", "idle") else None
        self._reset()
        self._region = region
        if region is None:
            self.group.close(None)
            if self.group._due:
                self.group.send_events()

    def _reset(self) -> None:
        self.stage = "changing"
        self.factors = {}
        self.held = []
        self.backwards = []
        self._region = None
        self.stage = "idle"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the body that runs, which a copy is never in, and the optimizer: its copy says that it is there.

        So do its observers.
        """
        kept = {**self.__dict__, "_region": None, "backwards": [], "observers": (), "_looking": []}
        return {**kept, "_owner": None if self._owner is None else _nobody}


def _nobody() -> None:
    """Stand in for an optimizer that was not copied with its member."""
