"""One loss scale, the optimizers that share it, and the order in which calls may come.

This is host-side bookkeeping without any framework. A backend that keeps the scale on a device gives the
group its own `Ledger`; the bookkeeping stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from .errors import NestedScaleError, NotScaledError, ProtocolError
from .events import Event, ScaleChanged, ScaleCollapsed, StepResult, StepSkipped
from .ledger import HOST_LEDGER, Ledger
from .scale_state import LossScale, LossScaleState, Scalar, next_state

# idle: no scaled gradients. inside: a scale_loss body runs. scaled: gradients carry the scale.
# unscaled: gradients are true and wait for the step.
Stage: TypeAlias = Literal["idle", "inside", "scaled", "unscaled"]
Emit: TypeAlias = Callable[[str, Event], None]


@dataclass(eq=False)
class Outcome:
    """What one step of one member found; completed when the group's scale moves.

    Attributes:
        member: Who stepped.
        finite: Finiteness by loss id; bools, or device scalars until a `Ledger` resolves them.
        scale: The loss scale that the gradients carried.
        grad_norm: Norm of the true gradients, a number or a device scalar, or None.
    """

    member: Member
    finite: dict[int, Any]
    scale: Scalar
    grad_norm: Any = None


@dataclass(eq=False)
class ScaleGroup:
    """One loss scale (one per loss id) and its members.

    Attributes:
        framework: Name of the framework, for events.
        config: The loss scale's configuration.
        enabled: False makes every call transparent.
        states: Host view of the state by loss id; read it after `resolve`.
        index: Position in `amp.state_dict()`.
        steps: Counted steps.
        ledger: Where the scale lives.
        culprits: Gives the names of parameters with non-finite gradients, for `ScaleCollapsed`.
        emit: Receives the framework's name and an event.
    """

    framework: str
    config: LossScale
    enabled: bool = True
    index: int = 0
    steps: int = 0
    ledger: Ledger = HOST_LEDGER
    states: dict[int, LossScaleState] = field(default_factory=dict)
    members: list[Member] = field(default_factory=list)
    window: list[Outcome] = field(default_factory=list)
    culprits: Callable[[], tuple[str, ...]] | None = None
    emit: Emit | None = None

    def __post_init__(self) -> None:
        """Start the state of loss id 0."""
        self.states.setdefault(0, self.config.initial_state())

    def add_member(self) -> Member:
        """Give a new member of this group."""
        member = Member(self)
        self.members.append(member)
        return member

    def state_of(self, loss_id: int) -> LossScaleState:
        """Give the state of one loss, starting it where it is new. Sync: none."""
        state = self.states.get(loss_id)
        if state is None:
            state = self.states[loss_id] = self.config.initial_state()
        return state

    def resolve(self) -> None:
        """Bring `states` and the members' results up to date. Sync: as the ledger needs."""
        self.ledger.resolve(self)

    def load(self, config: LossScale, states: dict[int, LossScaleState]) -> None:
        """Take over a configuration and states. Sync: as the ledger needs."""
        self.resolve()
        self.config = config
        self.states = dict(states)
        self.states.setdefault(0, config.initial_state())
        self.ledger.reload(self)

    def unsettled(self, member: Member) -> StepResult | None:
        """Tell what a member's step did while the group still waits for others; None where it waits for nobody.

        The scale moves with the last member's step, so `next_scale` is the present one.

        Sync: as the ledger's `read`.
        """
        for outcome in reversed(self.window):
            if outcome.member is member:
                found = self.ledger.read(outcome)
                finite = all(found.values())
                state = self.state_of(next(iter(found)))
                skips = 0 if finite else state.consecutive_skips + 1
                norm = outcome.grad_norm if finite else None
                return StepResult(finite, finite, float(outcome.scale), state.scale, skips, norm)
        return None

    def close(self, outcome: Outcome | None) -> None:
        """Take one member's step (None: it had nothing to step); settle when no member is pending."""
        if outcome is not None:
            self.window.append(outcome)
        for member in self.members:
            if member.stage != "idle":
                return
        if self.window:
            window, self.window = self.window, []
            self.ledger.settle(self, window)

    def advance(self, window: Sequence[Outcome]) -> None:
        """Move the states by one window whose finiteness is known, fill in the results, send the events.

        Args:
            window: The steps of the members since the scale last moved; `finite` holds bools.

        Sync: none.
        """
        self.steps += 1
        moves: list[tuple[int, LossScaleState, LossScaleState, bool]] = []
        found = window[0].finite if len(window) == 1 else _merged(window)
        for loss_id, finite in found.items():
            before = self.state_of(loss_id)
            after = self.states[loss_id] = next_state(self.config, before, finite)
            if not finite or after.scale != before.scale:
                moves.append((loss_id, before, after, finite))
        for outcome in window:
            first = self.states[next(iter(outcome.finite))]
            finite = False not in outcome.finite.values()
            skips = first.consecutive_skips
            if len(outcome.finite) > 1:
                skips = max([self.states[loss_id].consecutive_skips for loss_id in outcome.finite])
            norm = outcome.grad_norm if finite else None
            outcome.member.result = StepResult(finite, finite, float(outcome.scale), first.scale, skips, norm)
        # Last, because listeners may look at everything above, call back, or raise.
        if self.emit is not None:
            steps = self.steps
            for loss_id, before, after, finite in moves:
                told = (self.framework, self.index, loss_id, steps)
                for event in self.events_of(told, before, after, finite):
                    self.emit(self.framework, event)

    def events_of(
        self, told: tuple[str, int, int, int], before: LossScaleState, after: LossScaleState, finite: bool
    ) -> Iterator[Event]:
        """Give the events of one move; `told` is framework, group, loss id and step. Sync: none."""
        numbers = (before.scale, after.scale, after.consecutive_skips)
        if not finite:
            yield StepSkipped(*told, *numbers)
        if after.scale != before.scale:
            yield ScaleChanged(*told, *numbers)
        if after.consecutive_skips == self.config.max_consecutive_skips and not finite:
            yield ScaleCollapsed(*told, *numbers, self.culprits() if self.culprits is not None else ())

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to the running process; the host's view is brought up to date first."""
        self.resolve()
        return {**self.__dict__, "emit": None, "culprits": None, "ledger": HOST_LEDGER}


def _merged(window: Sequence[Outcome]) -> dict[int, bool]:
    """Tell by loss id whether all members that used it found finite gradients."""
    found: dict[int, bool] = {}
    for outcome in window:
        for loss_id, finite in outcome.finite.items():
            found[loss_id] = finite and found.get(loss_id, True)
    return found


class Member:
    """One optimizer's place in the protocol of its group.

    Attributes:
        group: The group.
        stage: Where the optimizer is between two steps.
        factors: The scale that pending gradients carry, by loss id. Frozen until the step.
        mixes: The wrapper keeps true and scaled gradients apart, so `scale_loss` may follow `unscale`.
        result: The last step's result as far as the host knows it.
        held: The latest scaled losses, if they cannot be weakly referenced: until the step they are known by this.
    """

    def __init__(self, group: ScaleGroup) -> None:
        """Start idle."""
        self.group = group
        self.stage: Stage = "idle"
        self.factors: dict[int, Scalar] = {}
        self.mixes = False
        self.result: StepResult | None = None
        self.held: list[Any] = []
        self._before: tuple[Stage, dict[int, Scalar]] = ("idle", {})

    @property
    def factor(self) -> Scalar:
        """The scale that the pending gradients carry (of the first loss id); None while there are none."""
        return next(iter(self.factors.values()), None)

    def enter(self, factor: Scalar, loss_id: int) -> None:
        """Note that a `scale_loss` body starts with this factor; `check_enter` comes first. Sync: none."""
        self._before = (self.stage, dict(self.factors))
        self.stage = "inside"
        self.factors[loss_id] = factor

    def check_enter(self) -> None:
        """Raise unless a `scale_loss` body may start.

        Raises:
            NestedScaleError: A body for this optimizer is running.
            ProtocolError: The gradients were unscaled already and no step has come since.

        Sync: none.
        """
        if self.stage == "inside":
            raise NestedScaleError(
                "scale_loss was entered again for an optimizer whose scale_loss body is still running; the "
                "gradients would be scaled twice. Leave the first block before entering the next."
            )
        if self.stage == "unscaled" and not self.mixes:
            raise ProtocolError(
                "scale_loss was called after unscale (or clip_grad_norm) and before step: true and scaled "
                "gradients would be added. Call opt.step() or opt.zero_grad() first, or unscale only after the "
                "last backward."
            )

    def leave(self, completed: bool) -> None:
        """Note that the body ended; after an exception the stage is what it was before. Sync: none."""
        if completed:
            self.stage = "scaled"
        else:
            self.stage, self.factors = self._before

    def check_step(self) -> None:
        """Raise unless scaled or unscaled gradients are pending.

        Raises:
            NotScaledError: No `scale_loss` came since the last step.
            NestedScaleError: A `scale_loss` body is still running.

        Sync: none.
        """
        if self.stage == "idle":
            raise NotScaledError(
                "step was called on gradients whose loss did not go through scale_loss; dividing them by the "
                "loss scale would shrink the update. Call backward inside "
                "`with ampx.scale_loss(loss, opt) as scaled:` before opt.step()."
            )
        if self.stage == "inside":
            raise NestedScaleError(
                "step was called inside a scale_loss body; the gradients are not complete there. Call opt.step() "
                "after the with block."
            )

    def finish(self, finite: dict[int, Any], grad_norm: Any = None) -> None:
        """Close this member's step and, with the last member of the group, move the scale.

        Args:
            finite: Finiteness by loss id; device scalars where the group's ledger resolves them.
            grad_norm: Norm of the true gradients, or None.

        Sync: as the group's ledger.
        """
        # The result tells of the lowest loss id, before and after.
        scale = self.factors.get(min(finite))
        outcome = Outcome(self, finite, self.factor if scale is None else scale, grad_norm)
        self._reset()
        self.group.close(outcome)

    def forget(self, result: StepResult | None = None) -> None:
        """Drop pending gradients without counting a step.

        Args:
            result: What `last_step` shall say, where a step was asked for.

        Sync: as the group's ledger.
        """
        if result is not None:
            self.result = result
        self._reset()
        self.group.close(None)

    def _reset(self) -> None:
        self.stage = "idle"
        self.factors = {}
        self.held = []
