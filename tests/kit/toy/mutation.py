"""How mutants are made: the toy with one verb, one method, or one call of the core replaced by a wrong one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import ampx
from ampx.backend import Contract, Device, Unscaled
from ampx.protocol import HostLedger, Outcome, ScaleGroup
from ampx.run import Run
from ampx.testing.harness import Harness
from toy import framework
from toy.explicit import BareToy, ExplicitToy
from toy.framework import CastingState, Tensor
from toy.harness import BareToyHarness, ExplicitToyHarness, ImplicitToyHarness
from toy.implicit import ImplicitToy, ToyOptimizer
from toy.verbs import ToyVerbs

Patches = Callable[[], Sequence[AbstractContextManager[Any]]]


@dataclass(frozen=True)
class Mutant:
    """A backend, the harness that shows it to the kit, and what is patched while it is judged."""

    name: str
    backend: type[ToyVerbs] = ImplicitToy
    harness: type[Harness] = ImplicitToyHarness
    patches: Patches = tuple


def verbs(mutant: str, base: type[ToyVerbs] = ImplicitToy, **wrong: Any) -> Mutant:
    """Make a mutant by replacing verbs of a backend."""
    harness: type[Harness] = ImplicitToyHarness
    if issubclass(base, ExplicitToy):
        harness = BareToyHarness if issubclass(base, BareToy) else ExplicitToyHarness
    return Mutant(mutant, type(mutant, (base,), wrong), harness)


def room(mutant: str, contract: type[Contract], **wrong: Any) -> Mutant:
    """Make a mutant by replacing methods of what the backend offers to a feature."""
    return verbs(mutant, offers={**ImplicitToy.offers, contract.name: type(mutant, (contract,), wrong)})


def wrapper(mutant: str, **wrong: Any) -> Mutant:
    """Make a mutant by replacing methods of the wrapped optimizer."""
    return spoiled(mutant, lambda optimizer: setattr(optimizer, "__class__", type(mutant, (ToyOptimizer,), wrong)))


def spoiled(mutant: str, spoil: Callable[[ToyOptimizer], object]) -> Mutant:
    """Make a mutant by spoiling every wrapped optimizer once it is made."""

    def wrap(self: ImplicitToy, *args: Any) -> ToyOptimizer:
        wrapped = ImplicitToy.wrap_optimizer(self, *args)
        spoil(wrapped)
        return wrapped

    return verbs(mutant, wrap_optimizer=wrap)


def configured(mutant: str, **fields: Any) -> Mutant:
    """Make a mutant that ignores fields of the loss scale's configuration, behind the user's back."""

    class Ignores(HostLedger):
        def settle(self, group: ScaleGroup, window: Sequence[Outcome]) -> None:
            true = group.config
            group.config = replace(true, **fields)
            group.advance(window)
            group.send_events()
            group.config = true

    return spoiled(mutant, lambda optimizer: setattr(optimizer.ampx_member.group, "ledger", Ignores()))


class Late(HostLedger):
    """Moves the scale one step late, as MXNet does."""

    def __init__(self) -> None:
        self.waiting: Sequence[Outcome] = ()

    def settle(self, group: ScaleGroup, window: Sequence[Outcome]) -> None:
        """Settle the window before this one."""
        if self.waiting:
            group.advance(self.waiting)
        self.waiting = window


class ForgetsTracker(HostLedger):
    """Takes over the scale and nothing else."""

    def reload(self, group: ScaleGroup) -> None:
        """Lose the trackers."""
        group.states = {key: replace(state, growth_tracker=0) for key, state in group.states.items()}


class ReportsNumbers(HostLedger):
    """Fills the results with ones and zeros."""

    def settle(self, group: ScaleGroup, window: Sequence[Outcome]) -> None:
        """Make integers of the booleans."""
        group.advance(window)
        for outcome in window:
            result = outcome.member.result
            if result is not None:
                numbers = replace(result, applied=int(result.applied))  # type: ignore[arg-type]
                outcome.member.note_result(numbers)


def ledger(mutant: str, kind: type[HostLedger]) -> Mutant:
    """Make a mutant whose scale moves otherwise."""
    return spoiled(mutant, lambda optimizer: setattr(optimizer.ampx_member.group, "ledger", kind()))


def _divide(grads: Sequence[Tensor | None], factor: float) -> None:
    for grad in grads:
        if grad is not None:
            grad.data = Tensor([value / factor for value in grad.data]).data


def never_skips(self: ToyOptimizer, grads: Any = None) -> None:
    """Apply gradients that are not finite, too."""
    pending = self._pending.unscaled is None and self.ampx_member.stage == "scaled"
    if pending:
        self.ampx_unscale()
    if self._pending.unscaled is not None and not self._pending.unscaled.finite:
        self.optimizer.step()
    ToyOptimizer.step(self, grads)


def counts_skips(self: ToyOptimizer, grads: Any = None) -> None:
    """Move the optimizer's counter on skipped steps."""
    ToyOptimizer.step(self, grads)
    self.optimizer.steps += self.ampx_member.result is not None and not self.ampx_member.result.applied


def unscales_again(self: ToyOptimizer) -> None:
    """Divide again when asked again."""
    again = self.ampx_member.stage == "unscaled"
    ToyOptimizer.ampx_unscale(self)
    if again:
        _divide([parameter.grad for parameter in self.optimizer.parameters], 2.0)


def forgets_overflow(self: ToyOptimizer) -> None:
    """Unscale, and forget what was seen."""
    ToyOptimizer.ampx_unscale(self)
    if self._pending.unscaled is not None:
        self._pending.unscaled = Unscaled(self._pending.unscaled.grads, True)


def own_group(wrapped: ToyOptimizer) -> None:
    """Let a member have a scale of its own."""
    shared = wrapped.ampx_member.group
    wrapped.ampx_member.group = ScaleGroup(shared.framework, shared.config, shared.enabled, emit=shared.emit)
    wrapped.ampx_member.group.members.append(wrapped.ampx_member)


class SharesOneScale(ImplicitToy):
    """Gives every optimizer the first one's group."""

    def wrap_optimizer(self, *args: Any) -> ToyOptimizer:
        """Wrap."""
        wrapped = super().wrap_optimizer(*args)
        first = self.__dict__.setdefault("first", wrapped.ampx_member.group)
        wrapped.ampx_member.group = first
        return wrapped


class MarksEverySecondLoss(ImplicitToy):
    """Scales every second loss only."""

    def scale(self, loss: Tensor, scale: float) -> Tensor:
        """Scale, or not."""
        self.__dict__["calls"] = self.__dict__.get("calls", 0) + 1
        return super().scale(loss, scale if self.__dict__["calls"] % 2 else 1.0)


class DiesWithItsSession(ImplicitToy):
    """Cannot unscale once casting was switched off for the process."""

    def deactivate(self, plan: ampx.CastPlan) -> None:
        """Switch off for good."""
        super().deactivate(plan)
        self.__dict__["dead"] = True

    def activate(self, plan: ampx.CastPlan) -> None:
        """Switch on."""
        super().activate(plan)
        self.__dict__["dead"] = False

    def unscale(self, grads: Sequence[Tensor | None], scale: float) -> Unscaled:
        """Unscale while alive."""
        return super().unscale(grads, 1.0 if self.__dict__.get("dead") else scale)


class HalfToy(ImplicitToy):
    """No mutant: a toy on a device without bfloat16."""

    def device(self, name: str) -> Device:
        """Describe the device."""
        return replace(super().device(name), native=frozenset({"float16"}))


@contextlib.contextmanager
def leaky(state: CastingState, leaks: Callable[[bool], bool]) -> Iterator[None]:
    """Cast in a region that leaks; `leaks` is asked with whether the body raised."""
    before, failed = framework.casting_state(), True
    framework.set_casting(state)
    try:
        yield
        failed = False
    finally:
        if not leaks(failed):
            framework.set_casting(before)


def stays(run: Run) -> Run:
    """Keep a run's session from being ended."""
    run.close = lambda: None  # type: ignore[method-assign]
    return run


def cast_everything(self: ToyVerbs, tree: Any, dtype: Any) -> Any:
    """Cast integers and booleans, too."""
    if isinstance(tree, (list, tuple)):
        return type(tree)(self.cast(value, dtype) for value in tree)
    if isinstance(tree, dict):
        return {key: self.cast(value, dtype) for key, value in tree.items()}
    return tree.to(dtype) if isinstance(tree, Tensor) else tree


def blind(mutant: str, **wrong: Any) -> Mutant:
    """Make a mutant of the harness."""
    return Mutant(mutant, ImplicitToy, type(mutant, (ImplicitToyHarness,), wrong))


def patched(
    mutant: str, owner: Any, name: str, wrong: Callable[..., Any], base: type[ToyVerbs] = ImplicitToy
) -> Mutant:
    """Make a mutant of the core: `wrong` is called with the true function in front of its arguments."""
    true = getattr(owner, name)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrong(true, *args, **kwargs)

    return replace(verbs(mutant, base), patches=lambda: [mock.patch.object(owner, name, replacement)])


def quiet(true: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Swallow the errors of a call."""
    try:
        return true(*args, **kwargs)
    except ampx.AmpxError:
        return None
