"""A Ctrl-C or a signal handler's time-out at any line of ampx: what follows is right or is refused.

Right is what momentum by hand does with the same gradients, which are known: losses are linear in the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Final

import pytest

import ampx
from ampx.session import Amp
from ampx.testing.base import KitTests
from ampx.testing.bench import START, Bench
from interruptions import THOROUGH, Interruption, interrupted_everywhere, sampled

SCALE: Final = 1024.0
HISTORY: Final = (1.0, 2.0)
CLIPS_ABOVE: Final = 5.5  # gradients are clipped of which each element is more: 6 and 7, but not 5


class Training:
    """Optimizers after two steps; the third is interrupted, of gradients of which every element is the same.

    Args:
        suite: Makes the optimizers.
        amp: The session.
        count: How many optimizers, wrapped as one list.
        by: How the third step goes: "step", "unscale" (and clip) before it, "twice" (two backwards), "closure".
        losses: How many losses with scales of their own.
        third: The gradients of the third step.
        clears: Whether gradients are cleared before each step.
        clip: The option of `wrap_optimizer` that clips at `CLIPS_ABOVE`.
        options: More of `wrap_optimizer`.

    Attributes:
        elements: How many elements the parameters of an optimizer have.
    """

    elements: ClassVar[int] = sum(map(len, START))

    def __init__(
        self,
        suite: InterruptedSuite,
        amp: Amp,
        *,
        count: int = 1,
        by: str = "step",
        losses: int = 1,
        third: float = 3.0,
        clears: bool = True,
        clip: str | None = None,
        **options: Any,
    ) -> None:
        self.suite, self.subject, self.amp = suite, suite.subject, amp
        self.by, self.losses, self.third, self.clears, self.clip = by, losses, third, clears, clip
        if clip is not None:
            options[clip] = self.max_norm if clip == "max_grad_norm" else CLIPS_ABOVE
        self.benches = [self.make() for _ in range(count)]
        scale = ampx.LossScale(init_scale=SCALE, growth_interval=100)
        opts = amp.wrap_optimizer([bench.raw for bench in self.benches], loss_scale=scale, **options)
        for bench, opt in zip(self.benches, opts, strict=True):
            bench.join(amp, opt)
        self.start = [self.values(bench) for bench in self.benches]
        self.history: list[float] = []
        for size in HISTORY:
            self.train(size)
            self.history.append(size if clears else size + sum(self.history))

    # What a framework may do otherwise.

    def make(self) -> Bench:
        """Make an optimizer that is not wrapped yet."""
        return self.suite.plain(momentum=True)

    def values(self, bench: Bench) -> list[list[float]]:
        """Read what an optimizer updates."""
        return bench.values()

    def scaled_backward(self, loss: Any, loss_id: int, parameters: list[Any]) -> list[Any] | None:
        """Scale a loss and run its backward."""
        with self.amp.scale_loss(loss, [bench.opt for bench in self.benches], loss_id=loss_id) as scaled:
            return self.subject.backward(scaled, parameters)

    def unscale(self, bench: Bench) -> None:
        """Unscale and clip before the step."""
        self.amp.unscale(bench.opt)
        self.amp.clip_grad_norm(bench.opt, self.max_norm)

    def apply(self, bench: Bench, opt: Any) -> None:
        """Step an optimizer, wrapped or raw, with the gradients of a bench."""
        self.subject.step(opt, bench.pending)

    def plainly(self, *gradients: float) -> float:
        """Return how far every weight is from its start after the steps so far and these."""
        weight = speed = 0.0
        for gradient in (*self.history, *gradients):
            speed = 0.5 * speed + (min(gradient, CLIPS_ABOVE) if self.clip else gradient)
            weight -= 0.5 * speed
        return weight

    def look_after(self, place: str) -> None:
        """Look at what else training must leave in order."""

    # Training.

    def loss(self, size: float) -> tuple[Any, list[Any]]:
        """Compute a loss of all parameters, and return them, too."""
        parameters = [parameter for bench in self.benches for parameter in bench.parameters]
        slopes = [[size] * len(vector) for _ in self.benches for vector in START]
        return self.subject.loss(parameters, slopes), parameters

    def backward(self, size: float) -> None:
        for loss_id in range(self.losses):
            loss, parameters = self.loss(size / self.losses)
            gradients = self.scaled_backward(loss, loss_id, parameters)
            for place, bench in enumerate(self.benches):
                bench.receive(gradients and gradients[place * len(START) : (place + 1) * len(START)])

    def zero_grad(self) -> None:
        for bench in self.benches:
            bench.pending = None
            self.subject.zero_grad(bench.opt)

    def evaluate(self, size: float) -> Any:
        """Clear, run backward and return the loss, as closures do."""
        self.zero_grad()
        self.backward(size)
        return self.loss(size)[0]

    def step(self, size: float) -> None:
        for bench in self.benches:
            if self.by == "closure":
                self.subject.step_closure(bench.opt, lambda: self.evaluate(size))
                continue
            if self.by == "unscale":
                self.unscale(bench)
            self.apply(bench, bench.opt)

    def train(self, size: float) -> None:
        if self.clears:
            self.zero_grad()
        for bench in self.benches:
            bench.pending = None
        if size == self.third and self.by == "twice":
            self.backward(size / 2)
            self.backward(size / 2)
        elif self.by != "closure":
            self.backward(size)
        self.step(size)

    def act(self) -> None:
        self.train(self.third)

    def again(self) -> None:
        """Step once more, with the gradients that are there."""
        for bench in self.benches:
            if bench.pending is not None or not self.suite.declares("explicit gradients"):
                try:
                    self.apply(bench, bench.opt)
                except self.suite.refusals:
                    continue

    def step_raw(self) -> None:
        """Step the raw optimizers."""
        for bench in self.benches:
            try:
                self.subject.plain_step(bench.raw, None)
            except (ampx.RawStepError, *self.suite.refusals[1:]):
                continue

    # Where it stands.

    @property
    def max_norm(self) -> float:
        """The norm of gradients at which they are clipped."""
        return CLIPS_ABOVE * math.sqrt(self.elements)

    def applied(self, size: float) -> float:
        """Return what a step that is not interrupted applies of gradients."""
        return min(size, CLIPS_ABOVE) if self.by == "unscale" or self.clip else size

    @property
    def whole(self) -> float:
        """The gradients that the third step applies."""
        return self.applied(self.third if self.clears else self.third + self.history[-1])

    @property
    def parts(self) -> list[float]:
        """What the backwards of the third step add up to, one after the other."""
        backwards = self.losses * (2 if self.by == "twice" else 1)
        return [self.third * part / backwards for part in range(1, backwards + 1)] if self.is_finite else []

    @property
    def is_finite(self) -> bool:
        """Whether the third step is applied."""
        return math.isfinite(self.third)

    def done(self) -> list[float]:
        """Return where weights are before the third step, and after it."""
        return [self.plainly(), *([self.plainly(self.whole)] if self.is_finite else [])]

    def stands_at(self, place: int, *choices: float, tolerance: float = 1e-5, apart: bool = False) -> bool:
        """Return whether all weights of an optimizer are one of some distances from their start; `apart`: any."""
        pairs = [
            (now, start)
            for vector, other in zip(self.values(self.benches[place]), self.start[place], strict=True)
            for now, start in zip(vector, other, strict=True)
        ]
        reached = [{c for c in choices if abs(now - start - c) < tolerance} for now, start in pairs]
        return all(reached) if apart else bool(set.intersection(*reached))

    def stand_at(self, *choices: float) -> bool:
        """Return whether each optimizer's weights are at one of some distances; those of others may differ."""
        return all(self.stands_at(place, *choices) for place in range(len(self.benches)))

    def stepped(self) -> list[bool]:
        """Return which optimizers have stepped."""
        return [not self.stands_at(place, self.plainly()) for place in range(len(self.benches))]


def plain_closures(suite: InterruptedSuite, *gradients: float) -> float:
    """Return how far steps of the framework alone move weights, each with a closure."""
    bench = suite.plain(momentum=True)
    start = bench.values()
    for size in gradients:

        def closure(size: float = size) -> Any:
            suite.subject.zero_grad(bench.raw)
            loss = bench.loss([[size] * len(vector) for vector in START])
            suite.subject.backward(loss, bench.parameters)
            return loss

        suite.subject.step_closure(bench.raw, closure)
    return bench.values()[0][0] - start[0][0]


class ClosureTraining(Training):
    """Optimizers that evaluate their closure several times, such as LBFGS: the framework alone is the oracle."""

    def plainly(self, *gradients: float) -> float:
        steps, key = self.suite.plain_steps, (*self.history, *gradients)
        if key not in steps:
            steps[key] = plain_closures(self.suite, *key)
        return steps[key]

    def again(self) -> None:
        for bench in self.benches:
            try:
                self.subject.step_closure(bench.opt, lambda: self.loss(0.0)[0])  # no backward
            except self.suite.refusals:
                continue


def entered(*regions: Any) -> None:
    """Enter regions, one in the other, and leave them."""
    if regions:
        with regions[0]:
            entered(*regions[1:])


class InterruptedSuite(KitTests):
    """What the suites of interruptions share.

    Attributes:
        harness: The harness's class.
        training: How a framework trains.
        cases: Arguments of `training`, by name.
        session: Settings of the session.
        stride: One of so many lines is interrupted.
        thinned: One of so many of these; with AMPX_TEST_ALL every one. Each case and each question begins at another.
        few: So many places at least are interrupted in each step.
        packages: What is interrupted; by itself the core and the plugin.
        refusals: What a step may raise afterwards.
        takes_old_gradients: The raw optimizer steps with gradients that were stepped with, or cleared to zeros.
        copies: What a later backward adds to may be these multiples of what an interrupted step left.
        clears_one_by_one: The plugin clears gradients in a loop, as its framework does: some may be cleared.
        timed_out: So many cases are tried with `TimeoutError`, too, which `except Exception` catches; with
            AMPX_TEST_ALL all.
        region_stride: As `stride`, while a region is entered and left.
    """

    training: ClassVar[type[Training]] = Training
    cases: ClassVar[Mapping[str, dict[str, Any]]] = {
        "plain": {},
        "overflow": {"third": math.inf},
        "unscale and clip by hand": {"by": "unscale", "third": 6.0},
        "clipped": {"clip": "max_grad_norm", "third": 6.0},
        "clipped by value, overflow": {"clip": "max_grad_value", "third": math.inf},
        "accumulated": {"by": "twice"},
        "never cleared": {"clears": False},
        "losses": {"losses": 2},
        "losses, overflow": {"losses": 2, "third": math.inf},
        "losses, accumulated": {"losses": 2, "by": "twice"},
        "list": {"count": 2},
        "list, overflow": {"count": 2, "third": math.inf},
    }
    session: ClassVar[dict[str, Any]] = {}
    stride: ClassVar[int] = 29
    thinned: ClassVar[int] = 3
    few: ClassVar[int] = 2
    packages: ClassVar[tuple[str, ...]] = ()
    refusals: ClassVar[tuple[type[Exception], ...]] = (ampx.AmpxError,)
    takes_old_gradients: ClassVar[bool] = True
    copies: ClassVar[tuple[int, ...]] = (1,)
    clears_one_by_one: ClassVar[bool] = False
    timed_out: ClassVar[int] = 2
    region_stride: ClassVar[int] = 7

    def setup_method(self) -> None:
        super().setup_method()
        self.plain_steps: dict[tuple[float, ...], float] = {}

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Ask each test of each case."""
        if "error" in metafunc.fixturenames:
            timed_out = list(self.cases)[: None if THOROUGH else self.timed_out]
            tried = [(name, Interruption, 3) for name in self.cases] + [(name, TimeoutError, 4) for name in timed_out]
            metafunc.parametrize(("name", "error", "first"), tried)
        elif "name" in metafunc.fixturenames:
            metafunc.parametrize("name", self.cases)

    def interruptions(
        self, name: str, first: int, error: type[BaseException] = Interruption
    ) -> Iterator[tuple[Training, str]]:
        """Yield each interrupted third step, whose weights are those before or after it, and never others."""
        case = self.cases[name]
        if case.get("losses", 1) > 1 and not self.declares("per_loss_scales"):
            pytest.skip(f"backend {self.backend.name!r} has one loss scale an optimizer")
        if not case.get("clears", True) and self.declares("explicit gradients"):
            pytest.skip(f"backend {self.backend.name!r} has gradients as values: nothing is left to be cleared")
        if (
            case.get("by") == "unscale"
            and self.declares("explicit gradients")
            and self.training.unscale is Training.unscale
        ):
            pytest.skip(f"backend {self.backend.name!r} has gradients as values, which the step unscales")
        amp, places = self.start(nan_loss="skip", **self.session), 0
        thinned = 1 if THOROUGH else self.thinned
        first += self.stride * (list(self.cases).index(name) % thinned)
        for training, place in interrupted_everywhere(
            lambda: self.training(self, amp, **case),
            self.training.act,
            self.packages or ("ampx", self.subject.plugin),
            error=error,
            **sampled(self.stride * thinned, first),
        ):
            assert training.stand_at(*training.done()), place
            places += 1
            yield training, place
            training.zero_grad()  # nothing is left pending for the trainings that follow
        assert places >= self.few


class InterruptedStepSuite(InterruptedSuite):
    """Steps that are interrupted; subclass it as `TestInterruptedSteps`."""

    def test_a_second_step_is_the_step_or_is_refused(self, name: str) -> None:
        for training, place in self.interruptions(name, 1):
            stepped = training.stepped()
            training.again()
            after = [training.plainly(part) for part in {*training.parts, *([training.whole] * training.is_finite)}]
            for number, done in enumerate(stepped):
                choices = training.done()[1:] if done else [training.plainly(), *after]
                assert training.stands_at(number, *choices), place

    def test_the_raw_optimizer_steps_rightly_or_is_refused(self, name: str) -> None:
        if not self.subject.guards_raw_steps:
            pytest.skip(f"the harness of {self.backend.name!r} does not say that raw steps are guarded")
        if issubclass(self.training, ClosureTraining):
            pytest.skip(f"optimizers of {self.backend.name!r} that take closures do not ask whether they may step")
        for training, place in self.interruptions(name, 2):
            # Skipped as a whole: what is left, of which nothing is finite, is the user's.
            left_over = [
                self.takes_old_gradients and not training.is_finite and bench.opt.ampx_member.stage == "idle"
                for bench in training.benches
            ]
            training.step_raw()
            choices = training.done()
            if self.takes_old_gradients:  # gradients that were never scaled, or stepped with, are the user's
                befores = [[], *([[training.whole]] if training.is_finite else [])]
                left = [0.0, *training.history, *training.parts, *(size for before in befores for size in before)]
                choices += [training.plainly(*before, part) for before in befores for part in left]
            for number, bench in enumerate(training.benches):
                diverged = all(value == -math.inf for vector in training.values(bench) for value in vector)
                assert (left_over[number] and diverged) or training.stands_at(number, *choices), place

    def test_cleared_gradients_start_over(self, name: str, error: type[BaseException], first: int) -> None:
        for training, place in self.interruptions(name, first, error):
            training.zero_grad()
            stepped, training.clears, whole = training.stepped(), True, training.whole
            for size in (5.0, 7.0):
                training.train(size)
                assert all(self.subject.last_step(bench.opt).applied for bench in training.benches), place
            for number, done in enumerate(stepped):
                expected = training.plainly(*([whole] if done else []), 5.0, training.applied(7.0))
                assert training.stands_at(number, expected, tolerance=1e-4), place
            for bench in training.benches:
                assert float(self.subject.loss_scale(bench.opt)) in (SCALE, SCALE / 2), place
            training.look_after(place)

    def test_going_on_without_clearing_is_right_or_is_refused(self, name: str) -> None:
        """Right: what was interrupted counts, or is gone, or is there still, where the framework adds to it."""
        if self.cases[name].get("by") == "closure":
            pytest.skip("the closure clears")
        explicit = self.declares("explicit gradients")
        for training, place in self.interruptions(name, 5):
            stepped = training.stepped()
            for bench in training.benches:
                bench.pending = None
            try:
                training.backward(5.0)
                for bench in training.benches:
                    training.apply(bench, bench.opt)
            except self.refusals:
                training.zero_grad()
                if not explicit:
                    continue
                training.train(5.0)
            left = {0.0} if explicit else {0.0, training.history[-1], *training.parts, training.whole}
            new = {5.0 + part * times for part in left for times in self.copies if math.isfinite(part)}
            for number, done in enumerate(stepped):
                befores = [[training.whole]] if done else [[]]
                if len(stepped) > 1:  # the first may have stepped before the other was refused
                    befores += [[], [5.0], *([*before, 5.0] for before in befores)]
                choices = [training.plainly(*before, size) for before in befores for size in new]
                if not self.subject.last_step(training.benches[number].opt).applied:
                    choices += [training.plainly(*before) for before in befores]
                assert training.stands_at(number, *choices, apart=self.clears_one_by_one), place


class InterruptedRegionSuite(InterruptedSuite):
    """Regions that are interrupted; subclass it as `TestInterruptedRegions`."""

    acts: ClassVar[tuple[str, ...]] = ("off", "on", "off inside on", "on inside off", "decorated", "step")
    process_wide: ClassVar[tuple[bool, ...]] = (True, False)
    few: ClassVar[int] = 5

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Ask of each region, in sessions of both kinds."""
        metafunc.parametrize("act", self.acts)
        metafunc.parametrize("process_wide", self.process_wide)

    def look(self) -> Any:
        """Read how the framework casts now."""
        return self.subject.casting(), self.subject.computes_in()

    def test_casting_is_as_it_was(self, act: str, process_wide: bool) -> None:
        """No region counts that its `with` statement has left."""
        if not self.declares("regions"):
            pytest.skip(f"backend {self.backend.name!r} has no regions on this device")
        amp, places = self.start(nan_loss="skip", process_wide=process_wide), 0
        before = self.look()
        assert self.subject.computes_in() == (self.subject.dtype if process_wide else "float32")
        acts: dict[str, Callable[[Any], Any]] = {
            "off": lambda _: entered(amp.autocast(enabled=False)),
            "on": lambda _: entered(amp.autocast()),
            "off inside on": lambda _: entered(amp.autocast(), amp.autocast(enabled=False)),
            "on inside off": lambda _: entered(amp.autocast(enabled=False), amp.autocast()),
            "decorated": lambda _: amp.float_function(self.subject.computes_in)(),
            "step": self.training.act,
        }
        for _, place in interrupted_everywhere(
            lambda: self.training(self, amp) if act == "step" else None,
            acts[act],
            self.packages or ("ampx", self.subject.plugin),
            **sampled(self.stride if act == "step" else self.region_stride),
        ):
            assert self.look() == before, place
            places += 1
        assert places >= self.few
        entered(amp.autocast(enabled=False))  # as the next one does
        assert self.look() == before
