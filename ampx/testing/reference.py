"""Training and the order of calls, restated in plain Python. It shares no line with the code that it judges.

Numbers are float32: every operation rounds once, as on a device. Learning rate and momentum are 0.5, so it does not
matter where an optimizer keeps their product with a gradient, nor which of the two it multiplies first.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from .oracle import Oracle, Row

# One list a parameter; None where a parameter has no gradient.
Gradients: TypeAlias = list[list[float] | None]
# applied, finite, scale, next_scale, consecutive_skips, grad_norm
Result: TypeAlias = tuple[bool, bool | None, float, float, int, float | None]
# kind, group, loss_id, step, scale, next_scale, consecutive_skips
EventRow: TypeAlias = tuple[str, int, int, int, float, float, int]

UNCHECKED: Final[Result] = (True, None, 1.0, 1.0, 0, None)


def float32(value: float) -> float:
    """Return the nearest float32; inf beyond the largest."""
    return array("f", [value])[0]


def each(function: Callable[..., float], *operands: Gradients) -> Gradients:
    """Apply a function to the elements of gradients, rounding once; a missing one takes no part."""
    result: Gradients = []
    for vectors in zip(*operands, strict=True):
        present = [vector for vector in vectors if vector is not None]
        if len(present) == len(operands):
            result.append([float32(function(*elements)) for elements in zip(*present, strict=True)])
        else:
            result.append(list(present[0]) if present else None)
    return result


def product(gradients: Gradients, factor: float) -> Gradients:
    """Multiply every element."""
    return each(lambda element: element * factor, gradients)


def quotient(gradients: Gradients, divisor: float) -> Gradients:
    """Divide every element."""
    return each(lambda element: element / divisor, gradients)


def total(gradients: Iterable[Gradients], parameters: int) -> Gradients:
    """Return the sum, added in order."""
    result: Gradients = [None] * parameters
    for gradient in gradients:
        result = each(lambda a, b: a + b, result, gradient)
    return result


def elements(gradients: Gradients) -> list[float]:
    """Return all elements as one list."""
    return [element for vector in gradients if vector is not None for element in vector]


def is_finite(gradients: Gradients) -> bool:
    """Return whether no element is inf or NaN."""
    return all(math.isfinite(element) for element in elements(gradients))


def norm_of(gradients: Gradients) -> float:
    """Return the L2 norm over all elements."""
    return float32(math.sqrt(math.fsum(element * element for element in elements(gradients))))


class ReferenceScale:
    """One loss scale for each loss id, and the optimizers that share it."""

    def __init__(self, config: Mapping[str, Any], index: int, enabled: bool, events: list[EventRow]) -> None:
        self.config = dict(config)  # the configuration, as a dictionary of its fields
        self.index = index  # position in the order of wrapping
        self.enabled = enabled  # whether the session that wrapped the optimizers was
        self.events = events  # where events are noted, oldest first
        self.members: list[ReferenceOptimizer] = []
        self.steps = 0
        self._oracles = {0: Oracle(self.config)}
        # The member that reports it, finiteness by loss id, scale, norm.
        self._window: list[tuple[ReferenceOptimizer | None, dict[int, bool], float, float | None]] = []

    def oracle(self, loss_id: int) -> Oracle:
        """Return the scale of one loss; it starts with its first use."""
        return self._oracles.setdefault(loss_id, Oracle(self.config))

    def scale(self, loss_id: int = 0) -> float:
        """Return the current scale of one loss."""
        return self._row(loss_id).scale

    def _row(self, loss_id: int) -> Row:
        return self._oracles.get(loss_id, Oracle(self.config)).row

    def rows(self) -> dict[int, dict[str, Any]]:
        """Return the four numbers of each loss."""
        return {loss_id: dict(vars(oracle.row)) for loss_id, oracle in self._oracles.items()}

    def load(self, config: Mapping[str, Any], rows: Mapping[int, Mapping[str, Any]]) -> None:
        """Take over a saved state; pending gradients keep the scale that they carry."""
        self.config = dict(config)
        if not config["dynamic"]:  # it is what the state says, for each loss
            (self.config["init_scale"],) = {row["scale"] for row in rows.values()}
        self._oracles = {loss_id: Oracle(self.config, row) for loss_id, row in rows.items()}
        self.oracle(0)

    def fork(self) -> ReferenceScale | None:
        """Return a copy without members; None while some have stepped and others not."""
        if self._window:
            return None
        other = ReferenceScale(self.config, self.index, self.enabled, self.events)
        other.load(self.config, self.rows())
        other.steps = self.steps
        return other

    def close(self) -> None:
        """Move the scale, once, if no member is pending any more."""
        if any(member.phase != "idle" for member in self.members) or not self._window:
            return
        window, self._window = self._window, []
        self.steps += 1
        verdicts: dict[int, bool] = {}
        for _, finite, _, _ in window:
            for loss_id, verdict in finite.items():
                verdicts[loss_id] = verdicts.get(loss_id, True) and verdict
        events = [event for loss_id, verdict in verdicts.items() for event in self._move(loss_id, verdict)]
        for member, finite, scale, norm in window:
            skips = max(self.oracle(loss_id).row.consecutive_skips for loss_id in finite)
            applied = all(finite.values())
            if member is not None:
                member.told = (applied, applied, scale, self.scale(min(finite)), skips, norm if applied else None)
        self.events += events

    def _move(self, loss_id: int, finite: bool) -> list[EventRow]:
        """Move the scale of one loss; return the events."""
        oracle = self.oracle(loss_id)
        before, after = oracle.row.scale, oracle.step(not finite)
        kinds = [] if finite else ["StepSkipped"]
        if after.scale != before:
            kinds.append("ScaleChanged")
        if not finite and after.consecutive_skips == self.config["max_consecutive_skips"]:
            kinds.append("ScaleCollapsed")
        numbers = (self.index, loss_id, self.steps, before, after.scale, after.consecutive_skips)
        return [(kind, *numbers) for kind in kinds]

    def step(self, member: ReferenceOptimizer, finite: dict[int, bool], scale: float, norm: float | None) -> None:
        """Note one member's step."""
        self._window.append((member, finite, scale, norm))
        member.told = None
        self.close()

    def step_without_gradients(self, member: ReferenceOptimizer) -> None:
        """Note a step that is not counted; those before it are no longer reported."""
        row = self.oracle(0).row
        self._window = [
            (None if other is member else other, finite, scale, norm) for other, finite, scale, norm in self._window
        ]
        self.close()
        member.told = (False, True, row.scale, row.scale, row.consecutive_skips, None)

    def result_of(self, member: ReferenceOptimizer) -> Result | None:
        """Return what a member's last step tells; until the others have stepped, what is known of it."""
        waiting = [outcome for outcome in self._window if outcome[0] is member]
        if member.told is not None or not waiting:
            return member.told
        _, finite, scale, norm = waiting[-1]
        first, applied = self._row(min(finite)), all(finite.values())
        skips = 0 if applied else first.consecutive_skips + 1
        return applied, applied, scale, first.scale, skips, norm if applied else None


class ReferenceOptimizer:
    """Gradient descent on a loss that was scaled, as it has to come out."""

    def __init__(
        self,
        scale: ReferenceScale,
        start: Sequence[Sequence[float]],
        momentum: bool,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
    ) -> None:
        self.scale = scale
        scale.members.append(self)
        self.weights = [list(vector) for vector in start]
        # Their momentum buffers; None without momentum.
        self.momenta = [[0.0] * len(vector) for vector in start] if momentum else None
        self.max_grad_norm, self.max_grad_value = max_grad_norm, max_grad_value
        # Idle: no scaled gradients. scaled: gradients carry the scale. unscaled: they are true.
        self.phase: Literal["idle", "scaled", "unscaled"] = "idle"
        self.carried: dict[int, float] = {}  # the scale that pending gradients carry, by loss id
        self.mixed = False  # a body of one loss began while gradients of another were pending
        self.scaled: dict[int, Gradients] = {}  # pending gradients by loss id, as they carry the scale
        # Unscaled gradients that came without this optimizer's `scale_loss`: left from the step before,
        # of another optimizer's loss, of a body that raised, written by hand.
        self.extra = self._none()
        self.true: Gradients | None = None  # the sum of all, once it was unscaled; somebody may write to it
        # By loss id, whether the gradients were finite when they were unscaled; an overflow stays one.
        self.finite: dict[int, bool] = {}
        self.norm: float | None = None  # what clipping measured first
        # What the last step did; None before the first, and while the scale waits for other members.
        self.told: Result | None = None

    def _none(self) -> Gradients:
        return [None] * len(self.weights)

    @property
    def is_small(self) -> bool:
        """Whether there is room for a large gradient: none was applied yet."""
        numbers = [*self.weights, *(self.momenta or [])]
        return all(abs(number) < 2.0**60 for vector in numbers for number in vector)

    def enter(self, loss_id: int, factor: float) -> None:
        """Note that a `scale_loss` body for this optimizer ended well."""
        if self.true is not None:
            self.extra, self.true = self.true, None
        if not elements(total([*self.scaled.values(), self.extra], len(self.weights))):
            self.carried = {
                key: factor for key, factor in self.carried.items() if key == loss_id
            }  # nothing came of others
        self.carried.setdefault(loss_id, factor)
        self.phase = "scaled"

    def receive(self, loss_id: int, slopes: Gradients) -> None:
        """Add what one backward of a scaled loss gives."""
        arriving = product(slopes, self.carried[loss_id])
        self.scaled[loss_id] = total([self.scaled.get(loss_id, self._none()), arriving], len(self.weights))

    def sum(self) -> tuple[Gradients, dict[int, bool]]:
        """Return the unscaled gradients, and by loss id whether they are finite."""
        finite, parts = dict(self.finite), []
        for loss_id, gradients in self.scaled.items():
            part = quotient(gradients, self.carried[loss_id])
            finite[loss_id] = finite.get(loss_id, True) and is_finite(part)
            parts.append(part)
        whole = total([*parts, self.extra], len(self.weights)) if self.true is None else self.true
        finite = finite or dict.fromkeys(self.carried, True)
        if not is_finite(whole) and all(finite.values()):
            finite = dict.fromkeys(finite, False)  # finite one by one, but not their sum: nobody alone is to blame
        return whole, finite

    def unscale(self) -> None:
        """Make pending gradients true."""
        self.true, self.finite = self.sum()
        self.scaled, self.extra, self.phase = {}, self._none(), "unscaled"

    def clip(self, max_norm: float | None, max_value: float | None) -> float | None:
        """Clip unscaled gradients by value, then by norm; return the norm before that, NaN after an overflow."""
        gradients = self.extra if self.true is None else self.true
        norm = None
        if not all(self.sum()[1].values()):
            self.norm = math.nan
            return self.norm
        if max_value is not None:
            gradients = each(lambda value: max(-max_value, min(max_value, value)), gradients)
        if max_norm is not None:
            norm = norm_of(gradients)
            if norm > max_norm:
                gradients = product(gradients, float32(max_norm / norm))
        if self.true is None:
            self.extra = gradients
        else:
            self.true = gradients
        self.norm = norm if self.norm is None else self.norm
        return norm

    def step(self) -> Gradients:
        """Close the window: apply or skip, and move the scale where this is the last member.

        Returns:
            The gradients that stay on the parameters until somebody clears them.
        """
        self.true, self.finite = self.sum()
        applied = all(self.finite.values())
        if applied:
            self.clip(self.max_grad_norm, self.max_grad_value)
            self.move(self.true or [])
        left, finite, norm, factors = self.true or [], self.finite, self.norm, self.carried
        self._reset()
        if not self.scale.enabled:
            self.told = UNCHECKED
        elif not elements(left):
            self.scale.step_without_gradients(self)
        else:
            self.scale.step(self, finite, factors[min(finite)], norm)
        return left

    def move(self, gradients: Gradients) -> None:
        """Update the weights."""
        for position, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if self.momenta is not None:
                gradient = [float32(0.5 * old + new) for old, new in zip(self.momenta[position], gradient, strict=True)]
                self.momenta[position] = gradient
            self.weights[position] = [
                float32(weight - 0.5 * new) for weight, new in zip(self.weights[position], gradient, strict=True)
            ]

    def drop(self, left: Gradients) -> None:
        """Forget the gradients, but not that some are pending: the wrapper was not asked."""
        self.scaled, self.extra = {}, self._none()
        if self.true is None:
            self.extra = left
        else:
            self.true = left

    def fork(self) -> ReferenceOptimizer | None:
        """Return a copy with a scale of its own and nothing pending; None while the scale waits for others."""
        scale = self.scale.fork()
        if scale is None:
            return None
        other = ReferenceOptimizer(scale, self.weights, False, self.max_grad_norm, self.max_grad_value)
        other.momenta = None if self.momenta is None else [list(vector) for vector in self.momenta]
        other.told = self.told
        return other

    def forget(self) -> None:
        """Drop pending gradients; no step is counted."""
        self._reset()
        self.scale.close()

    def _reset(self) -> None:
        self.phase, self.carried, self.mixed, self.scaled = "idle", {}, False, {}
        self.extra, self.true, self.finite, self.norm = self._none(), None, {}, None
