"""Calls in any order, right and wrong, against arithmetic.

A state machine trains optimizers of the backend with gradients of its choice, in whatever order of calls comes up, and
compares every number with `ampx.testing.reference`. A call either does what plain float32 training would do, or it
raises the error that the manual names and changes nothing.
"""

from __future__ import annotations

import copy
import math
import os
import pickle
import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass, fields
from functools import partial
from typing import Any, ClassVar, Final, TypeAlias

import pytest
from hypothesis import HealthCheck, note, seed, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import ampx
from ampx.testing.base import KitTests
from ampx.testing.bench import START, Bench
from ampx.testing.checks import json_copy
from ampx.testing.harness import Harness, ValueHarness
from ampx.testing.reference import (
    EventRow,
    Gradients,
    ReferenceOptimizer,
    ReferenceScale,
    Result,
    elements,
    is_finite,
    norm_of,
    product,
    total,
)

# Optimizer steps of a run, and with AMPX_TEST_ALL in the environment.
STEPS: Final = 200
STEPS_OF_ALL: Final = 2000
# From here on a float32 number absorbs all the small ones of a test.
LARGE: Final = 2.0**60
# torch adds 1e-6 to a norm before it divides by it; from here on float32 does not notice.
COUNTED_NORM: Final = 32.0
# More than any norm of a test, and a float32.
UNREACHED: Final = 3e38


# See TURN.
Turn: TypeAlias = tuple[list[tuple[Gradients, int]], str, bool]


class PlannedError(Exception):
    """What the machine raises where a user's code may raise."""


class Scheduler:
    """Counts its steps."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        """Count."""
        self.steps += 1


# -- what is drawn -----------------------------------------------------------------------------------------


def _small(drawn: tuple[float, float, float]) -> Gradients:
    return [[drawn[0], drawn[1]], [drawn[2]]]


def _triple(factor: float) -> Gradients:
    """Return gradients whose norms, of each parameter and of both, are exact: 5, 12 and 13 times the factor."""
    return [[3 * factor, 4 * factor], [12 * factor]]


def _spoilt(drawn: tuple[Gradients, int, float]) -> Gradients:
    gradients, position, value = drawn
    flat = elements(gradients)
    flat[position] = value
    return [flat[:2], flat[2:]]


def _config(drawn: dict[str, Any]) -> ampx.LossScale:
    low, start, high = sorted(drawn["exponents"])
    others = {name: value for name, value in drawn.items() if name != "exponents"}
    return ampx.LossScale(min_scale=2.0**low, init_scale=2.0**start, max_scale=2.0**high, **others)


# Numbers of few bits: sums, and products with powers of two, are exact, so that weights are compared bit for bit.
DYADIC = st.integers(-64, 64).map(lambda number: number / 8)
SMALL = st.tuples(DYADIC, DYADIC, DYADIC).map(_small)
TRIPLES = st.integers(-3, 6).map(lambda exponent: _triple(2.0**exponent))
# Up to 1.5 * 2**126: two of these can be added, three cannot. Sums of different ones are exact.
HUGE = st.sampled_from([104, 113, 123]).map(lambda exponent: _triple(2.0**exponent))
BROKEN = st.tuples(SMALL, st.integers(0, 2), st.sampled_from([math.inf, -math.inf, math.nan])).map(_spoilt)
SLOPES = st.one_of(SMALL, TRIPLES, SMALL, TRIPLES, HUGE, BROKEN)

EXPONENTS = st.sampled_from([-40, -14, -1, 0, 1, 3, 8, 16, 24, 24, 60, 100])
SCALES = EXPONENTS.map(lambda exponent: 2.0**exponent)
CONFIGS = st.fixed_dictionaries(
    {
        "exponents": st.tuples(EXPONENTS, EXPONENTS, EXPONENTS),
        "growth_factor": st.sampled_from([2.0, 2.0, 4.0, 1.0, 2.0**30]),
        "backoff_factor": st.sampled_from([0.5, 0.5, 0.25, 1.0, 2.0**-30]),
        "growth_interval": st.sampled_from([1, 2, 3, 2000]),
        "hysteresis": st.sampled_from([1, 1, 2, 3]),
        "dynamic": st.sampled_from([True, True, True, False]),
        "max_consecutive_skips": st.sampled_from([1, 2, 3, 50]),
    }
).map(_config)
BOUNDS = st.sampled_from(
    [{}, {}, {}, {"max_grad_norm": 26.0}, {"max_grad_norm": 104.0}, {"max_grad_value": 4.0}],
)
WHICH = st.integers(0, 2)
SUBSETS = st.sets(WHICH, min_size=1, max_size=3)
LOSS_IDS = st.sampled_from([0, 0, 0, 1, 2])
# One pass of a training loop: losses with their ids, calls before the step, and whether gradients are cleared.
TURN = st.tuples(
    st.lists(st.tuples(SLOPES, LOSS_IDS), min_size=1, max_size=3),
    st.sampled_from(["nothing", "nothing", "nothing", "unscale", "clip"]),
    st.sampled_from([True, True, False]),
)
BODIES = st.sampled_from(
    [*["plain"] * 8, "raises before", "raises after", "steps", "nests", "clears", "steps the raw optimizer"]
)


class Trainee:
    """One optimizer: as the backend trains it, and as it has to come out."""

    def __init__(self, bench: Bench, reference: ReferenceOptimizer) -> None:
        self.bench = bench  # the backend's
        self.reference = reference  # what it is compared with
        self.watched = False  # the raw optimizer's update asks whether to raise
        self.fails = False  # the raw optimizer's next update raises
        self.doubtful = False  # calls came in an order that ampx may refuse, or get right
        self.spent: list[Any] | None = None  # the gradient values of the last step

    def update_runs(self) -> None:
        """Raise where the machine wants the raw optimizer's update to raise."""
        if self.fails:
            self.fails = False
            raise PlannedError("update")


@dataclass(frozen=True)
class Block:
    """One `scale_loss` block."""

    receivers: list[Trainee]  # whose loss it is
    reached: list[Trainee]  # whose parameters it depends on
    loss_id: int
    transparent: bool  # the loss is not scaled: a session is disabled

    @property
    def references(self) -> list[ReferenceOptimizer]:
        """The receivers, as they have to come out."""
        return [trainee.reference for trainee in self.receivers]

    @property
    def cleared(self) -> list[ReferenceOptimizer]:
        """Receivers that were unscaled without gradients."""
        return [
            reference
            for reference in self.references
            if reference.phase == "unscaled" and not any(elements(reference.true or []))
        ]

    @property
    def frozen(self) -> list[float]:
        """The scales that pending gradients of the same loss carry; an optimizer that counts as cleared has none."""
        carrying = [reference for reference in self.references if reference not in self.cleared]
        return [reference.carried[self.loss_id] for reference in carrying if self.loss_id in reference.carried]

    @property
    def factor(self) -> float:
        """The scale that its loss gets: that of pending gradients, else the smallest current one."""
        if self.transparent:
            return 1.0
        return next(iter(self.frozen), min(reference.scale.scale(self.loss_id) for reference in self.references))

    @property
    def mixes(self) -> bool:
        """Whether gradients of another loss are pending."""
        return any(set(reference.carried) - {self.loss_id} for reference in self.references)

    @property
    def is_promised(self) -> bool:
        """Whether the documentation says what happens then."""
        # With several losses it is unknown which of them left the gradients.
        if any(trainee.doubtful and set(trainee.reference.carried) - {self.loss_id} for trainee in self.receivers):
            return False
        # Backends differ in whether zeros are gradients of the other loss.
        if any(
            reference.carried and self.loss_id not in reference.carried and not any(elements(reference.sum()[0]))
            for reference in self.references
            if reference not in self.cleared
        ):
            return False
        # Wrappers may multiply what is there by the scale, and large numbers overflow then.
        return self.transparent or not any(
            _has_large(reference.extra) or _has_large(reference.true or []) for reference in self.references
        )

    def counts(self, body: str) -> bool:
        """Return whether gradients of such a body are scaled ones of its receivers."""
        return not self.transparent and body != "raises after"


class Training(RuleBasedStateMachine):
    """The calls of a training script, in any order."""

    suite: ClassVar[FuzzSuite]
    number: ClassVar[int]

    def __init__(self) -> None:
        super().__init__()
        note(f"seed {self.number}")
        suite = self.suite
        suite.setup_method()
        self.harness: Harness = suite.subject
        self.values = not suite.declares("optimizer objects")
        self.implicit = suite.declares("implicit gradients")
        self.trainees: list[Trainee] = []
        self.saved: list[tuple[Any, dict[str, Any], dict[int, dict[str, Any]]]] = []
        self.events: list[EventRow] = []
        self.expected_events: list[EventRow] = []
        self.raising_event: int | None = None
        self.watchful = True
        self.heard = 0
        self.collapses = 0
        self._warnings = warnings.catch_warnings(record=True)
        self.warned: Any = self._warnings.__enter__()
        warnings.simplefilter("ignore")  # what else a framework warns of is no matter of this test
        warnings.simplefilter("always", ampx.AmpxWarning)

    def teardown(self) -> None:
        """End the session."""
        self._warnings.__exit__(None, None, None)
        self.suite.teardown_method()

    # -- sessions --------------------------------------------------------------------------------------

    @initialize(
        config=CONFIGS,
        enabled=st.sampled_from([True] * 9 + [False]),
        casts=st.sampled_from([False, False, False, True]),
        watchful=st.booleans(),
        momentum=st.booleans(),
        bounds=BOUNDS,
        pair=st.booleans(),
        turns=st.lists(TURN, min_size=2, max_size=4),
    )
    def start(
        self,
        config: ampx.LossScale,
        enabled: bool,
        casts: bool,
        watchful: bool,
        momentum: bool,
        bounds: dict[str, float],
        pair: bool,
        turns: list[Turn],
    ) -> None:
        """Start a session, wrap the first optimizers, and train; a watchful script looks after every call."""
        self.watchful, self.casts = watchful, casts
        self._init(config, enabled)
        self._wrap(None, momentum, bounds, pair)
        self._train(self.trainees[0], turns)

    def _init(self, config: ampx.LossScale, enabled: bool) -> None:
        options = {} if self.casts else {"dtype": "float32", "level": "O0"}
        self.amp = self.suite.start(config, enabled=enabled, **options)
        self.config, self.active, self.scales = config, True, 0
        self.inside = self.harness.casting()
        self.amp.on_event(self._listen)

    def _listen(self, event: ampx.Event) -> None:
        framework, *numbers = astuple(event)[: len(fields(ampx.Event))]
        assert framework == self.harness.framework
        self.events.append((type(event).__name__, *numbers))
        if len(self.events) == self.raising_event:
            raise PlannedError("listener")

    @rule(config=st.none() | CONFIGS, momentum=st.booleans(), bounds=BOUNDS, pair=st.booleans())
    @precondition(lambda self: len(self.trainees) < 3 and self.active)
    def wrap(self, config: ampx.LossScale | None, momentum: bool, bounds: dict[str, float], pair: bool) -> None:
        """Wrap one more optimizer, or two that share a scale."""
        self._wrap(config, momentum, bounds, pair and len(self.trainees) < 2)
        self._verify()

    def _wrap(self, config: ampx.LossScale | None, momentum: bool, bounds: dict[str, float], pair: bool) -> None:
        pair = pair and not self.values
        bounds = bounds if self.suite.declares("clipping") else {}
        benches = [self.suite.plain(momentum) for _ in range(2 if pair else 1)]
        raws = [bench.raw for bench in benches]
        wrapped = self.amp.wrap_optimizer(raws if pair else raws[0], loss_scale=config, **bounds)
        numbers = asdict(self.config if config is None else config)
        scale = ReferenceScale(numbers, self.scales, self.amp.enabled, self.expected_events)
        self.scales += 1
        for bench, opt in zip(benches, wrapped if pair else [wrapped], strict=True):
            bench.join(self.amp, opt)
            self.trainees.append(Trainee(bench, ReferenceOptimizer(scale, START, momentum, **bounds)))

    @rule(config=CONFIGS, enabled=st.sampled_from([True] * 4 + [False]), shut=st.booleans())
    def restart(self, config: ampx.LossScale, enabled: bool, shut: bool) -> None:
        """End the session, or start another over it; what is pending goes on."""
        if shut and self.active:
            self.amp.shutdown()
            self.active = False
        else:
            self._init(config, enabled)
        self._verify()

    # -- gradients -------------------------------------------------------------------------------------

    @rule(
        named=SUBSETS, reached=st.sets(WHICH), loss_id=LOSS_IDS, slopes=st.tuples(SLOPES, SLOPES, SLOPES), body=BODIES
    )
    def backward(
        self, named: set[int], reached: set[int], loss_id: int, slopes: tuple[Gradients, ...], body: str
    ) -> None:
        """Scale a loss for some optimizers and run backward; it may depend on others' parameters, or not on all."""
        receivers = self._some(named)
        others = self.implicit and (self.harness.watches_others or not self.amp.enabled)
        watches_true = self.harness.watches_true or not self.amp.enabled
        reaches = [
            trainee
            for trainee in (self._some(reached) if self.implicit else receivers)
            if trainee in receivers or (others and (watches_true or trainee.reference.phase != "unscaled"))
        ]
        self._backward(receivers, reaches or receivers, loss_id, slopes, body)
        self._verify()

    @rule(which=WHICH, turns=st.lists(TURN, min_size=1, max_size=3))
    def train(self, which: int, turns: list[Turn]) -> None:
        """Do what scripts do."""
        self._train(self._one(which), turns)

    def _train(self, trainee: Trainee, turns: list[Turn]) -> None:
        for losses, before_step, clears in turns:
            for slopes, loss_id in losses:
                drawn = loss_id if self.suite.declares("per_loss_scales") else 0
                self._backward([trainee], [trainee], drawn, (slopes,), "plain")
                self._verify()
            if before_step == "unscale":
                self._unscale(trainee)
            elif before_step == "clip":
                self._clip(trainee, 26.0)
            self._step(trainee, "nothing")
            if clears:
                self._clear(trainee)
            self._verify()

    def _backward(
        self, receivers: list[Trainee], reached: list[Trainee], loss_id: int, wishes: Sequence[Gradients], body: str
    ) -> bool:
        """Run one body; return whether it ended well."""
        block = self._block(receivers, reached, loss_id)
        if not block.is_promised or self._is_unseen(block):
            return False
        left = {id(trainee): self._cleared(trainee) for trainee in block.receivers} if self.implicit else {}
        must, may = self._refusals(block)
        body = "plain" if must or may else self._body(body, block)
        factor = block.factor if block.counts(body) and not block.cleared else None
        slopes = [
            self._tamed(trainee, wish, loss_id, factor if trainee in block.receivers else None)
            for trainee, wish in zip(block.reached, wishes, strict=False)
        ]
        run = partial(self._differentiate if self.values else self._run_body, block, slopes, body)
        if must is not None:
            self._refused(must, run)
            return False
        return self._allowed(may, run) and self._follow(block, slopes, body, left)

    def _block(self, receivers: list[Trainee], reached: list[Trainee], loss_id: int) -> Block:
        if self.values:
            receivers, reached = receivers[:1], receivers[:1]
        transparent = not self.amp.enabled or any(not trainee.reference.scale.enabled for trainee in receivers)
        # An optimizer of a disabled session is a raw one: ampx does not watch what a scaled loss does to it.
        reached = [trainee for trainee in reached if transparent or trainee.reference.scale.enabled] or receivers
        return Block(receivers, reached, loss_id, transparent)

    def _is_unseen(self, block: Block) -> bool:
        """Return whether unscaled gradients are added to scaled ones that wait, which not every backend sees."""
        others = [trainee.reference for trainee in block.reached if trainee not in block.receivers]
        waits = any(reference.phase == "scaled" for reference in others)
        return block.transparent and waits and not self.harness.watches_true

    def _follow(self, block: Block, slopes: list[Gradients], body: str, left: dict[int, Gradients]) -> bool:
        """Do in arithmetic what a body did; return whether it ended well."""
        for reference in block.cleared:
            reference.forget()  # there were no gradients, so another window begins
        for reference in block.references:
            reference.mixed = reference.mixed or bool(set(reference.carried) - {block.loss_id})
        if body == "raises before":
            return False
        factor = block.factor
        for trainee in block.receivers:
            if body == "clears":
                trainee.reference.drop(left[id(trainee)])
                trainee.doubtful = False
            if block.counts(body):
                trainee.reference.enter(block.loss_id, factor)
        for trainee, gradients in zip(block.reached, slopes, strict=True):
            scaled = trainee in block.receivers and not block.transparent
            self._reach(trainee, gradients, factor, block.loss_id, scaled)
        return body != "raises after"

    def _body(self, body: str, block: Block) -> str:
        """Return the action of the body: the one drawn, or a legal one in its place."""
        if body == "raises after" and (block.mixes or not self.implicit):
            return "raises before"
        scaled = not block.transparent
        sensible = {
            "steps": scaled and not self.values,
            "nests": scaled and not self.values,
            "clears": scaled and self.implicit and not block.mixes,
            "steps the raw optimizer": scaled and self.harness.guards_raw_steps,
        }
        return body if sensible.get(body, True) else "plain"

    def _run_body(self, block: Block, slopes: list[Gradients], body: str) -> None:
        harness = self.harness
        parameters = [parameter for trainee in block.reached for parameter in trainee.bench.parameters]
        loss = harness.loss(parameters, _flat(slopes))
        opts = [trainee.bench.opt for trainee in block.receivers]
        with (
            pytest.raises(PlannedError, match="body") if body.startswith("raises") else nullcontext(),
            ampx.scale_loss(loss, opts[0] if len(opts) == 1 else opts, loss_id=block.loss_id) as scaled,
        ):
            if body == "raises before":
                raise PlannedError("body")
            if body == "clears":
                for opt in opts:
                    harness.zero_grad(opt)
            grads = harness.backward(scaled, parameters)
            self._misuse(block.receivers[0], parameters, grads, body)
        if not body.startswith("raises") and grads is not None:
            for position, trainee in enumerate(block.reached):
                trainee.bench.receive(grads[2 * position : 2 * position + 2])

    def _misuse(self, trainee: Trainee, parameters: list[Any], grads: list[Any] | None, body: str) -> None:
        """Do what a script must not do in a body that has run backward."""
        if body == "steps":
            self._refused(ampx.NestedScaleError, lambda: self._call_step(trainee, grads))
        elif body == "nests":
            again = self.harness.loss(parameters, _flat([_triple(1.0)] * (len(parameters) // len(START))))
            self._refused(ampx.NestedScaleError, lambda: ampx.scale_loss(again, trainee.bench.opt).__enter__())
        elif body == "steps the raw optimizer":
            self._refused(ampx.RawStepError, lambda: self.harness.plain_step(trainee.bench.raw, grads))
        elif body == "raises after":
            raise PlannedError("body")

    def _differentiate(self, block: Block, slopes: list[Gradients], body: str) -> None:
        """Do the same where gradients are those of a function."""
        harness, bench = self.harness, block.receivers[0].bench
        assert isinstance(harness, ValueHarness)

        def scaled_loss(parameters: list[Any]) -> Any:
            loss = harness.loss(parameters, _flat(slopes))
            with ampx.scale_loss(loss, bench.opt, loss_id=block.loss_id) as scaled:
                if body.startswith("raises"):
                    raise PlannedError("body")
                return scaled

        with pytest.raises(PlannedError, match="body") if body.startswith("raises") else nullcontext():
            bench.receive(harness.differentiate(scaled_loss, bench.parameters))

    def _refusals(self, block: Block) -> tuple[type[Exception] | None, type[Exception] | None]:
        """Return two errors of `scale_loss`: one that it must raise, and one that it may raise."""
        if not self.active:
            return ampx.NotInitializedError, None
        if block.transparent:
            pending = any(
                reference.phase != "idle" or (self.values and reference.scale.enabled) for reference in block.references
            )
            return (ampx.ProtocolError if pending else None), None
        if block.loss_id and not self.suite.declares("per_loss_scales"):
            return ampx.UnsupportedByBackendError, None
        if self.values:
            return None, None
        if len(set(block.frozen)) > 1 or any(map(self._is_unscaled, block.receivers)):
            return ampx.ProtocolError, None
        doubtful = any(trainee.doubtful or trainee.reference.phase == "unscaled" for trainee in block.receivers)
        return None, ampx.ProtocolError if doubtful else None

    def _is_unscaled(self, trainee: Trainee) -> bool:
        """Return whether there are surely unscaled gradients, to which no scaled ones may be added."""
        certain = trainee.reference.phase == "unscaled" and not trainee.doubtful
        # Zeros may be taken for no gradients.
        return certain and not trainee.bench.opt.ampx_member.mixes and any(elements(trainee.reference.true or []))

    def _reach(self, trainee: Trainee, slopes: Gradients, factor: float, loss_id: int, scaled: bool) -> None:
        """Note gradients that reached an optimizer's parameters."""
        reference = trainee.reference
        if scaled and reference.carried.get(loss_id) == factor:
            reference.receive(loss_id, slopes)
        elif not self.implicit and reference.scale.enabled:
            trainee.bench.pending = None  # unscaled gradients: nobody would step with them
        else:
            if reference.true is None:
                reference.extra = total([reference.extra, slopes], 2)
            else:
                reference.true = total([reference.true, slopes], 2)
            trainee.doubtful = reference.scale.enabled

    def _tamed(self, trainee: Trainee, wish: Gradients, loss_id: int, factor: float | None) -> Gradients:
        """Return the gradients wished for, or smaller ones where more would not be exact or is not promised."""
        plain = factor is None or trainee.doubtful
        if not is_finite(wish):
            return _triple(0.25) if plain else wish
        if _has_large(wish):
            return _triple(0.25) if plain or not self._bears_large(trainee.reference, loss_id, factor) else wish
        # Zeros that were never scaled may count as no gradients.
        return wish if any(elements(wish)) or not plain else _triple(0.5)

    def _bears_large(self, reference: ReferenceOptimizer, loss_id: int, factor: float | None) -> bool:
        """Return whether sums with large gradients are exact.

        Several losses may be added scaled or unscaled; that comes to the same only far from the largest number. Where
        gradients are values, only their sum is seen, which carries one scale.
        """
        if not reference.is_small or not set(reference.carried) - {loss_id}:
            return reference.is_small
        factors = {factor, *reference.carried.values()}
        return self.implicit and all(factor and not 1 < factor < 2.0**30 for factor in factors)

    @rule(which=WHICH, behind=st.booleans())
    def clear(self, which: int, behind: bool) -> None:
        """Clear gradients: by the wrapped optimizer, or on the parameters, as `model.zero_grad()` does."""
        trainee = self._one(which)
        # With several losses the first was perhaps looked at already: what is then told of it is not promised.
        if behind and self.implicit and not trainee.reference.mixed:
            self.harness.zero_grad(trainee.bench.raw)
            trainee.reference.drop(self._cleared(trainee))
        else:
            self._clear(trainee)
        self._verify()

    def _clear(self, trainee: Trainee) -> None:
        reference = trainee.reference
        trainee.bench.pending = None
        if self.implicit:
            left = self._cleared(trainee)
            self.harness.zero_grad(trainee.bench.opt)
            reference.forget()
            reference.extra, trainee.doubtful = left, False
        elif self.values:
            reference.forget()
        elif len(reference.carried) > 1:  # a wrapper that is not told takes it that each loss had its gradients
            self.harness.zero_grad(trainee.bench.opt)
            reference.forget()
        else:
            reference.drop([None, None])  # nobody told the wrapper

    def _cleared(self, trainee: Trainee) -> Gradients:
        """Return what clearing leaves on the parameters."""
        if not self.harness.clears_to_zero:
            return [None, None]
        measured = self.harness.gradients(trainee.bench.parameters)
        return [None if vector is None else [0.0] * len(vector) for vector in measured]

    @rule(which=WHICH, slopes=SLOPES)
    @precondition(lambda self: self.implicit)
    def write(self, which: int, slopes: Gradients) -> None:
        """Write gradients by hand: scaled ones, true ones after `unscale`, or where none are pending."""
        trainee = self._one(which)
        bench, reference = trainee.bench, trainee.reference
        if trainee.doubtful or not reference.scale.enabled or bench.opt.ampx_member.mixes:
            return  # of several losses the gradients are unscaled between their backwards
        if reference.norm is not None and (math.isnan(reference.norm) or not elements(reference.true or [])):
            return  # an overflow was clipped, or nothing at all
        factor = next(iter(reference.carried.values()), None)
        slopes = self._tamed(trainee, slopes, 0, factor)
        if reference.phase == "scaled":
            slopes = product(slopes, factor or 1.0)
            reference.scaled, reference.extra = dict.fromkeys(reference.carried, slopes), [None, None]
        self.harness.write_gradients(bench.raw, bench.parameters, _flat([slopes]))
        if reference.phase == "unscaled":
            reference.true = slopes
        elif reference.phase == "idle":
            self._step_without_gradients(trainee)  # where the framework does not know them for gradients
            self._clear(trainee)
        self._verify()

    # -- unscaled gradients ----------------------------------------------------------------------------

    @rule(which=WHICH)
    @precondition(lambda self: self.implicit)
    def unscale(self, which: int) -> None:
        """Unscale gradients between backward and step, perhaps again."""
        self._unscale(self._one(which))
        self._verify()

    def _unscale(self, trainee: Trainee) -> None:
        if self.implicit and self._looks(trainee, lambda: ampx.unscale(trainee.bench.opt)):
            self._check_gradients(trainee)

    @rule(which=WHICH, bound=st.sampled_from([26.0, 52.0, UNREACHED]))
    @precondition(lambda self: self.suite.declares("clip_grad_norm"))
    def clip(self, which: int, bound: float) -> None:
        """Clip between backward and step, perhaps again."""
        self._clip(self._one(which), bound)
        self._verify()

    def _clip(self, trainee: Trainee, bound: float) -> None:
        reference = trainee.reference
        if not self.suite.declares("clip_grad_norm"):
            return
        if not _clips_exactly(reference.sum()[0], bound):
            bound = UNREACHED
        measured: list[Any] = []
        if self._looks(trainee, lambda: measured.append(ampx.clip_grad_norm(trainee.bench.opt, bound))):
            expected, (measured_norm,) = reference.clip(bound, None), map(float, measured)
            if expected == expected:
                assert math.isclose(measured_norm, expected or 0.0, rel_tol=1e-6)
                self._check_gradients(trainee)
            elif not is_finite(reference.true or []):
                assert not math.isfinite(measured_norm)

    def _looks(self, trainee: Trainee, look: Callable[[], object]) -> bool:
        """Call what unscales; return whether there are unscaled gradients now."""
        reference = trainee.reference
        if not self.active:
            self._refused(ampx.NotInitializedError, look)
        elif reference.scale.enabled and reference.phase == "idle":
            self._refused(ampx.ProtocolError, look)
        elif self._allowed(ampx.ProtocolError if trainee.doubtful else None, look):
            if reference.phase == "scaled":
                reference.unscale()
            return True
        return False

    def _check_gradients(self, trainee: Trainee) -> None:
        """Compare unscaled gradients with those on the parameters."""
        reference = trainee.reference
        if not all(reference.sum()[1].values()):
            return  # frameworks differ in what they leave of an overflow
        zeros = [[0.0] * len(vector) for vector in START]
        measured = self.harness.gradients(trainee.bench.parameters)
        expected = reference.extra if reference.true is None else reference.true
        pairs = [[value or zero for value, zero in zip(two, zeros, strict=True)] for two in (measured, expected)]
        assert pairs[0] == pairs[1]

    # -- steps -----------------------------------------------------------------------------------------

    @rule(which=WHICH, interruption=st.sampled_from(["nothing"] * 4 + ["update", "listener"]), clears=st.booleans())
    def step(self, which: int, interruption: str, clears: bool) -> None:
        """Step, perhaps with nothing to step with, perhaps without clearing; the user's code may raise in it."""
        trainee = self._one(which)
        self._step(trainee, interruption)
        if clears:
            self._clear(trainee)
        self._verify()

    def _step(self, trainee: Trainee, interruption: str) -> None:
        reference = trainee.reference
        gradients, finite = reference.sum()
        applies = all(finite.values()) and _has_any(gradients)
        if reference.scale.enabled and reference.phase == "idle":
            self._step_idle(trainee)
        elif not reference.scale.enabled and not elements(gradients):
            pass  # the raw optimizer's own affair
        elif applies and not _clips_exactly(gradients, reference.max_grad_norm or math.inf):
            self._clear(trainee)
        elif interruption == "update" and applies and not self.values:
            self._interrupt(trainee)
        else:
            self._step_pending(trainee, interruption, applies)

    def _step_pending(self, trainee: Trainee, interruption: str, applies: bool) -> None:
        """Step with pending gradients; where they overflowed, or there are none, nothing changes."""
        bench, reference, grads = trainee.bench, trainee.reference, trainee.bench.pending
        counts = _has_any(reference.sum()[0])
        before = bench.snapshot()
        if trainee.doubtful:
            if not self._allowed(ampx.ProtocolError, lambda: self._call_step(trainee, grads)):
                return
            left = reference.step()
        else:
            left = reference.step()
            if interruption == "listener":
                self._step_for_a_listener_that_raises(trainee, grads)
            else:
                self._call_step(trainee, grads)
        assert applies or bench.snapshot() == before
        self.suite.executed += counts
        bench.pending, trainee.spent = None, grads
        if self.implicit and not reference.scale.enabled:
            self._clear(trainee)
        elif self.implicit:
            reference.extra, trainee.doubtful = left, counts

    def _step_for_a_listener_that_raises(self, trainee: Trainee, grads: list[Any] | None) -> None:
        """Step; the listener raises at the last event, when everything is complete."""
        comes = self.active and len(self.expected_events) > self.heard
        self.raising_event = len(self.expected_events) if comes else None
        with pytest.raises(PlannedError, match="listener") if comes else nullcontext():
            self._call_step(trainee, grads)
        self.raising_event = None

    def _step_idle(self, trainee: Trainee) -> None:
        """Step where no gradients are pending: nothing happens, or it is refused."""
        reference, spent = trainee.reference, trainee.spent
        if self.values:
            self._call_step(trainee, None)
            reference.step()
        elif not self.implicit:
            if spent is not None:
                self._refused(ampx.NotScaledError, lambda: self._call_step(trainee, spent))
        elif any(elements(reference.extra)):
            self._refused(ampx.ProtocolError, lambda: self._call_step(trainee, None))
        elif not self.harness.clears_to_zero and elements(reference.extra):
            pass  # zeros that nobody cleared may be taken for gradients or not
        else:
            self._step_without_gradients(trainee)

    def _step_without_gradients(self, trainee: Trainee) -> None:
        """Step where nothing is to be applied; stale gradients, cleared or not, are an error in some frameworks."""
        if self._allowed(ampx.ProtocolError, lambda: self._call_step(trainee, None)):
            trainee.reference.scale.step_without_gradients(trainee.reference)

    def _interrupt(self, trainee: Trainee) -> None:
        """Step, and have the raw optimizer's update raise before it changes anything."""
        bench, grads = trainee.bench, trainee.bench.pending
        if not trainee.watched:
            trainee.watched = True
            self.harness.watch_update(bench.raw, trainee.update_runs)
        before = bench.values()
        trainee.fails = True

        def step() -> None:
            with pytest.raises(PlannedError, match="update"):
                self._call_step(trainee, grads)

        if not self._allowed(ampx.ProtocolError if trainee.doubtful else None, step):
            trainee.fails = False
            return
        assert bench.values() == before
        if not trainee.reference.scale.enabled:
            self._clear(trainee)  # they were clipped, or not
            return
        if self.implicit:
            trainee.doubtful = True
            return
        # Gradients that are values are tried again at once, or given up.
        if self._allowed(ampx.ProtocolError, lambda: self._call_step(trainee, grads)):
            trainee.reference.step()
        else:
            self.harness.zero_grad(bench.opt)
            trainee.reference.forget()
        bench.pending = None

    def _call_step(self, trainee: Trainee, grads: list[Any] | None) -> None:
        if self.values:
            trainee.bench.step()
        else:
            self.harness.step(trainee.bench.opt, grads if self.implicit else grads or [])

    @rule(which=WHICH, slopes=st.one_of(SMALL, TRIPLES))
    @precondition(lambda self: not self.values)
    def step_raw(self, which: int, slopes: Gradients) -> None:
        """Step the raw optimizer: on a loss that was not scaled, or by mistake while scaled gradients are pending."""
        trainee = self._one(which)
        bench, reference, harness = trainee.bench, trainee.reference, self.harness
        if reference.phase != "idle":
            if harness.guards_raw_steps and any(elements(reference.sum()[0])):
                self._refused(ampx.RawStepError, lambda: harness.plain_step(bench.raw, bench.pending))
            return
        if self.implicit:
            self._clear(trainee)
        harness.plain_step(bench.raw, harness.backward(bench.loss(_flat([slopes])), bench.parameters))
        reference.move(slopes)
        if self.implicit:
            self._clear(trainee)
        self._verify()

    @rule(which=WHICH, slopes=st.one_of(SMALL, TRIPLES, BROKEN))
    @precondition(lambda self: self.implicit and self.suite.declares("closures") and self.active and self.amp.enabled)
    def step_with_closure(self, which: int, slopes: Gradients) -> None:
        """Step with a closure that clears, scales the loss and runs backward."""
        trainee = self._one(which)
        bench, reference, harness = trainee.bench, trainee.reference, self.harness
        if reference.phase != "idle" or not reference.scale.enabled or reference.max_grad_norm:
            return

        def closure() -> Any:
            harness.zero_grad(bench.opt)
            loss = bench.loss(_flat([slopes]))
            with ampx.scale_loss(loss, bench.opt) as scaled:
                harness.backward(scaled, bench.parameters)
            return loss

        harness.step_closure(bench.opt, closure)
        reference.forget()
        reference.enter(0, reference.scale.scale())
        reference.receive(0, slopes)
        reference.step()
        self.suite.executed += 1
        self._clear(trainee)
        self._verify()

    # -- states and copies -----------------------------------------------------------------------------

    @rule(which=WHICH)
    def save(self, which: int) -> None:
        """Save one loss scale, perhaps in mid-window."""
        trainee = self._one(which)
        scale = trainee.reference.scale
        if scale.enabled:
            self.saved.append((json_copy(self.amp.state_dict(trainee.bench.opt)), dict(scale.config), scale.rows()))

    @rule(which=WHICH, saved=st.integers(0, 5))
    @precondition(lambda self: self.saved)
    def load(self, which: int, saved: int) -> None:
        """Load what was saved, of this optimizer or another, of this session or one before."""
        self._load(self._one(which), *self.saved[saved % len(self.saved)])
        self._verify()

    @rule(which=WHICH, config=CONFIGS, scale=SCALES, trackers=st.tuples(*[st.integers(0, 3)] * 3))
    def load_another(self, which: int, config: ampx.LossScale, scale: float, trackers: tuple[int, ...]) -> None:
        """Load a state from elsewhere."""
        names = ("growth_tracker", "hysteresis_tracker", "consecutive_skips")
        row = {"scale": scale, **dict(zip(names, trackers, strict=True))}
        group = {"config": asdict(config), "losses": [{"loss_id": 0, **row}]}
        state = {"schema": "ampx.loss_scale/1", "framework": "another", "groups": [group]}
        self._load(self._one(which), state, asdict(config), {0: row})
        self._verify()

    @rule(which=WHICH, scale=SCALES, interval=st.integers(1, 3))
    def import_scaler(self, which: int, scale: float, interval: int) -> None:
        """Load the state of a scaler of PyTorch."""
        numbers = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": interval}
        state = ampx.import_state({"scale": scale, **numbers, "_growth_tracker": 0})
        bounds = {"min_scale": min(1.0, scale), "max_scale": max(2.0**24, scale)}
        row = {"scale": scale, "growth_tracker": 0, "hysteresis_tracker": 1, "consecutive_skips": 0}
        self._load(self._one(which), state, {**asdict(ampx.LossScale()), **numbers, **bounds}, {0: row})
        self._verify()

    def _load(self, trainee: Trainee, state: Any, config: dict[str, Any], rows: dict[int, dict[str, Any]]) -> None:
        scale, bench = trainee.reference.scale, trainee.bench
        if not self.amp.enabled or not scale.enabled:
            return
        if self.values and bench.pending is not None:
            return  # there the scale is in the state, and gradients are values: see docs/how-to/use-jax.md
        before = len(self.warned)
        loaded = self.amp.load_state_dict(state, bench.opt)
        if self.values:
            bench.opt = loaded
        if config["dynamic"] == scale.config["dynamic"]:
            scale.load(config, rows)
            if self.values and trainee.reference.told is not None:
                # What the last step did is read from the same state.
                applied, finite, carried, _, _, norm = trainee.reference.told
                row = rows[0]
                trainee.reference.told = applied, finite, carried, row["scale"], row["consecutive_skips"], norm
        else:
            assert "the current loss scale" in str(self.warned[before].message)
            del self.warned[before]

    @rule(which=WHICH, pickles=st.booleans(), slopes=st.one_of(SMALL, TRIPLES))
    @precondition(lambda self: self.harness.copies and self.active and self.amp.enabled)
    def copy_one(self, which: int, pickles: bool, slopes: Gradients) -> None:
        """Copy an optimizer with its parameters; the copy trains alone, and the original does not notice."""
        trainee = self._one(which)
        bench, harness = trainee.bench, self.harness
        reference = trainee.reference.fork()
        if trainee.watched or reference is None or not _clips_exactly(slopes, reference.max_grad_norm or math.inf):
            return
        copied: list[Any] = []

        def copy_both() -> None:
            both = (bench.opt, bench.parameters)
            pickled = pickles and "pickle" in harness.copies
            copied[:] = pickle.loads(pickle.dumps(both)) if pickled else copy.deepcopy(both)

        if not self._allowed(ampx.UnsupportedByBackendError, copy_both):
            return
        opt, parameters = copied
        harness.zero_grad(opt)  # gradients may have travelled, or what was pending
        loss = harness.loss(parameters, _flat([slopes]))
        with ampx.scale_loss(loss, opt) as scaled:
            grads = harness.backward(scaled, parameters)
        harness.step(opt, grads)
        if reference.scale.enabled:
            reference.enter(0, reference.scale.scale())
            reference.receive(0, slopes)
        else:
            reference.extra = slopes
        reference.step()
        assert [harness.numbers(parameter) for parameter in parameters] == reference.weights
        self._verify_closely(opt, reference)
        self._verify()

    # -- looking ---------------------------------------------------------------------------------------

    @rule(named=SUBSETS)
    def gate(self, named: set[int]) -> None:
        """Ask whether a scheduler would step."""
        trainees, scheduler = self._some(named), Scheduler()
        gate = self.amp.gate(scheduler, [trainee.bench.handle for trainee in trainees])
        results = [trainee.reference.scale.result_of(trainee.reference) for trainee in trainees]
        expected = all(result is not None and result[0] for result in results)
        assert gate.step() is expected
        assert scheduler.steps == int(expected)

    @rule()
    @precondition(lambda self: not self.watchful)
    def look(self) -> None:
        """Compare everything."""
        self._verify(closely=True)

    def _one(self, which: int) -> Trainee:
        return self.trainees[which % len(self.trainees)]

    def _some(self, which: Iterable[int]) -> list[Trainee]:
        return [self.trainees[position] for position in sorted({number % len(self.trainees) for number in which})]

    def _refused(self, error: type[Exception], call: Callable[[], object]) -> None:
        """Expect an error that changes nothing."""
        before = self._snapshot()
        with pytest.raises(error):
            call()
        assert self._snapshot() == before

    def _allowed(self, error: type[Exception] | None, call: Callable[[], object]) -> bool:
        """Call what may raise this error and then changes nothing; return whether it did not."""
        if error is None:
            call()
            return True
        before = self._snapshot()
        try:
            call()
        except error:
            assert self._snapshot() == before
            return False
        return True

    def _snapshot(self) -> Any:
        """Read everything that an error must not change."""
        harness = self.harness
        return harness.casting(), [
            (
                trainee.bench.snapshot(),
                str(self.amp.state_dict(trainee.bench.opt)),
                str(self.amp.last_step(trainee.bench.opt)),
                str(harness.gradients(trainee.bench.parameters)) if self.implicit else None,
            )
            for trainee in self.trainees
        ]

    def _verify(self, closely: bool = False) -> None:
        """Compare what the backend holds with what it has to hold."""
        self.collapses += sum(event[0] == "ScaleCollapsed" for event in self.expected_events[self.heard :])
        if not self.active:  # nobody listens
            del self.expected_events[self.heard :]
        self.heard = len(self.expected_events)
        for trainee in self.trainees:
            assert trainee.bench.values() == trainee.reference.weights
        if not self.watchful and not closely:
            return
        for trainee in self.trainees:
            self._verify_closely(trainee.bench.opt, trainee.reference)
        assert self.events == self.expected_events
        assert [warning.category for warning in self.warned] == [ampx.ScaleCollapsedWarning] * self.collapses
        if self.trainees:
            assert self.harness.casting() == (self.inside if self.active else self.suite.outside)

    def _verify_closely(self, opt: Any, reference: ReferenceOptimizer) -> None:
        self._verify_result(self.amp.last_step(opt), reference.scale.result_of(reference))
        groups = self.amp.state_dict(opt)["groups"]
        if not reference.scale.enabled:
            assert groups == []
            return
        assert self.amp.loss_scale(opt) == reference.scale.scale()
        losses = [{"loss_id": loss_id, **row} for loss_id, row in sorted(reference.scale.rows().items())]
        assert groups == [{"config": reference.scale.config, "losses": losses}]

    def _verify_result(self, result: ampx.StepResult | None, row: Result | None) -> None:
        if result is None or row is None:
            assert result is None
            assert row is None
            return
        *numbers, norm = astuple(result)
        *expected, expected_norm = row
        assert numbers == expected
        assert (norm is None) == (expected_norm is None)
        assert norm is None or math.isclose(norm, expected_norm or 0.0, rel_tol=1e-6)


def _flat(slopes: Iterable[Gradients]) -> list[list[float]]:
    """Return the gradients of several optimizers as one list."""
    return [vector for gradients in slopes for vector in gradients if vector is not None]


def _has_any(gradients: Gradients) -> bool:
    return any(vector is not None for vector in gradients)


def _has_large(gradients: Gradients) -> bool:
    return any(LARGE <= abs(element) < math.inf for element in elements(gradients))


def _clips_exactly(gradients: Gradients, bound: float) -> bool:
    """Return whether clipping to a norm gives the same bits, however a framework computes it."""
    if not is_finite(gradients):
        return True
    norm = norm_of(gradients)
    if norm < 0.999 * bound:
        return True
    squares = [norm_of([vector]) ** 2 for vector in gradients]
    return norm >= COUNTED_NORM and math.fsum(squares) == norm**2 and math.frexp(bound / norm)[0] == 0.5


class FuzzSuite(KitTests):
    """Random training scripts; subclass it as `TestFuzz`.

    Attributes:
        harness: The harness's class.
        hypothesis: The scripts of one seed, and the calls of a script. One seed follows another.
        seed: The first seed. None, which AMPX_TEST_ALL in the environment stands for as well: a random one. A failure
            shows the seed that repeats it.
        steps: Optimizer steps to execute, at least; with AMPX_TEST_ALL they are 2,000.
        executed: Optimizer steps that were executed up to now.
    """

    hypothesis: ClassVar[settings] = settings(
        max_examples=10,
        stateful_step_count=30,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    seed: ClassVar[int | None] = 0
    steps: ClassVar[int] = STEPS
    executed = 0

    def test_any_order_of_calls_trains_as_arithmetic_says(self) -> None:
        """Every number is right after every call, or the call is refused and changes nothing."""
        thorough = bool(os.environ.get("AMPX_TEST_ALL"))
        number = random.SystemRandom().randrange(2**32) if thorough or self.seed is None else self.seed
        wanted = STEPS_OF_ALL if thorough else self.steps
        self.executed = 0
        while self.executed < wanted:
            before = self.executed
            machine = type("Script", (Training,), {"suite": self, "number": number})
            run_state_machine_as_test(seed(number)(machine), settings=self.hypothesis)
            assert self.executed > before, "no optimizer stepped"
            number += 1
