"""A Ctrl-C or a signal handler's time-out at any line of ampx: what follows is right or is refused.

Right is what plain Paddle does with the same gradients, which are known: losses are linear in the weights.
"""

import functools
import math
import os

import numpy as np
import paddle
import pytest

import ampx
from ampx.session import sessions
from ampx_paddle.scaler import GradScaler
from interruptions import Interruption, interrupted_everywhere

# Paddle's LBFGS copies a tensor in a way that Paddle warns of.
pytestmark = pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")

PACKAGES = ("ampx", "ampx_paddle")
THOROUGH = bool(os.environ.get("AMPX_TEST_ALL"))  # a tenth of all lines and calls; else of the lines a 29th
SCALE = 1024.0


def momentum(parameter):
    return paddle.optimizer.Momentum(0.5, 0.5, parameters=[parameter])


def lbfgs(parameter):
    return paddle.optimizer.LBFGS(0.5, max_iter=2, parameters=[parameter])


def zeros():
    return paddle.create_parameter([2], "float32", default_initializer=paddle.nn.initializer.Constant(0.0))


@functools.cache
def plain_steps(make, gradients):
    """The weight after steps of plain Paddle on gradients of which every element is the same."""
    parameter = zeros()
    raw = make(parameter)
    for gradient in gradients:

        def closure(gradient=gradient):
            raw.clear_grad()
            loss = (parameter * gradient).sum()
            loss.backward()
            return loss

        if make is lbfgs:
            raw.step(closure)
        else:
            closure()
            raw.step()
    return parameter[0].item()


class Subject:
    """Optimizers of one parameter each, after two steps; `by` says how the third goes."""

    def __init__(self, *, make=momentum, number=1, losses=1, by="step", third=3.0, clears=True, **options):
        amp = sessions.get("paddle") or ampx.init("paddle", level="O0", nan_loss="skip")
        scale = ampx.LossScale(init_scale=SCALE, growth_interval=100)
        self.make, self.losses, self.by, self.third, self.clears = make, losses, by, third, clears
        self.parameters = [zeros() for _ in range(number)]
        self.raws = [make(parameter) for parameter in self.parameters]
        self.opts = amp.wrap_optimizer(self.raws, loss_scale=scale, **options)
        self.scaler = GradScaler(*self.opts) if by == "scaler" else None
        self.history = []
        for size in (1.0, 2.0):
            self.train(size)
            self.history.append(size if clears else sum(self.history) + size)

    def loss(self, size):
        return sum((parameter * size).sum() for parameter in self.parameters)

    def backward(self, size):
        for loss_id in range(self.losses):
            if self.scaler is not None:
                self.scaler.scale(self.loss(size)).backward()
                continue
            with ampx.scale_loss(self.loss(size / self.losses), self.opts, loss_id=loss_id) as scaled:
                scaled.backward()

    def clear_grad(self):
        for opt in self.opts:
            opt.clear_grad()

    def evaluate(self, size):
        self.clear_grad()
        self.backward(size)
        return self.loss(size).detach()

    def step(self, size):
        for opt in self.opts:
            if self.by == "closure":
                opt.step(lambda: self.evaluate(size))
            elif self.by == "unscale":
                ampx.unscale(opt)
                ampx.clip_grad_norm(opt, 1e6)
                opt.step()
            elif self.scaler is not None:
                self.scaler.step(opt)
                self.scaler.update()
            else:
                opt.step()

    def train(self, size):
        if self.clears:
            self.clear_grad()
        if size == self.third and self.by == "twice":
            self.backward(size / 2)
            self.backward(size / 2)
        elif self.by != "closure":
            self.backward(size)
        self.step(size)

    def act(self):
        self.train(self.third)

    def plainly(self, *gradients):
        return plain_steps(self.make, (*self.history, *gradients))

    def stand_at(self, *choices):
        """Whether each parameter is at one of some values; the parameters may differ."""
        return all(
            any(np.abs(parameter.numpy() - choice).max() < 1e-5 for choice in choices) for parameter in self.parameters
        )

    def could_be(self):
        """Where the third step may have left it: the weights before it, and after it, or after a part of it."""
        if math.isinf(self.third):
            return [self.plainly()]
        parts = {self.third} if self.clears else {self.third + self.history[-1]}
        backwards = self.losses * (2 if self.by == "twice" else 1)
        parts |= {self.third * part / backwards for part in range(1, backwards)}
        return [self.plainly(), *(self.plainly(part) for part in parts)]


SUBJECTS = {
    "plain": {},
    "overflow": {"third": math.inf},
    "unscale and clip by hand": {"by": "unscale"},
    "clipped": {"max_grad_norm": 1e6},
    "clipped by value, overflow": {"max_grad_value": 1e6, "third": math.inf},
    "accumulated": {"by": "twice"},
    "never cleared": {"clears": False},
    "losses": {"losses": 2},
    "losses, overflow": {"losses": 2, "third": math.inf},
    "losses, accumulated": {"losses": 2, "by": "twice"},
    "list": {"number": 2},
    "list, overflow": {"number": 2, "third": math.inf},
    "scaler": {"by": "scaler"},
    "closure": {"by": "closure"},
    "LBFGS": {"by": "closure", "make": lbfgs},
    "LBFGS, overflow": {"by": "closure", "make": lbfgs, "third": math.inf},
}


def interruptions(name, first, error=Interruption):
    """Each interrupted third step: its weights are those before or after it, and never others."""
    places = 0
    options = {"stride": 10, "first": first, "after_calls": True} if THOROUGH else {"stride": 29, "first": first}
    for subject, place in interrupted_everywhere(
        lambda: Subject(**SUBJECTS[name]), Subject.act, PACKAGES, error=error, **options
    ):
        choices = subject.could_be()
        assert subject.stand_at(*choices), place
        places += 1
        yield subject, place, choices
        subject.clear_grad()  # nothing is left pending for the tests that follow
    assert places > 5


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_second_step_after_an_interruption_is_the_step_or_is_refused(name):
    for subject, place, choices in interruptions(name, 1):
        done = not subject.stand_at(choices[0])
        for opt in subject.opts:
            try:
                opt.step(*[lambda: paddle.zeros([])] if subject.make is lbfgs else [])  # a closure without gradients
            except ampx.AmpxError:
                continue
        assert subject.stand_at(*choices), place
        if done and len(subject.opts) == 1:
            assert subject.stand_at(*choices[1:]), place


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_raw_optimizer_after_an_interruption_steps_rightly_or_is_refused(name):
    if SUBJECTS[name].get("make") is lbfgs:
        pytest.skip("Paddle's LBFGS does not ask whether it may step")
    for subject, place, choices in interruptions(name, 2):
        left = [0.0, *subject.history, 1.5]  # gradients that were never scaled, or stepped with, are the user's
        third = subject.third if subject.clears else subject.third + subject.history[-1]
        stepped = [] if subject.stand_at(choices[0]) or math.isinf(third) else [third]
        for raw in subject.raws:
            try:
                raw.step()
            except ampx.RawStepError:
                continue
        again = [subject.plainly(*some, value) for some in ([], stepped) for value in (*left, third)]
        assert subject.stand_at(*choices, *(value for value in again if math.isfinite(value))), place


@pytest.mark.parametrize(("error", "first"), [(Interruption, 3), (TimeoutError, 4)])
@pytest.mark.parametrize("name", SUBJECTS)
def test_clear_grad_after_an_interruption_starts_over(name, error, first):
    for subject, place, choices in interruptions(name, first, error):
        subject.clear_grad()
        parts = [[] if np.abs(own.numpy() - choices[0]).max() < 1e-5 else None for own in subject.parameters]
        subject.clears = True
        for size in (5.0, 7.0):
            subject.train(size)
            assert all(opt.last_step.applied for opt in subject.opts), place
        candidates = {subject.third, subject.third / 2, subject.third + subject.history[-1]}
        for own, part in zip(subject.parameters, parts, strict=True):
            befores = [part] if part is not None else [[candidate] for candidate in candidates]
            expected = [subject.plainly(*before, 5.0, 7.0) for before in befores]
            assert any(np.abs(own.numpy() - value).max() < 1e-4 for value in expected), place
        assert {opt.loss_scale for opt in subject.opts} <= {SCALE, SCALE / 2}, place


@pytest.mark.parametrize("name", [name for name in SUBJECTS if SUBJECTS[name].get("by") != "closure"])
def test_going_on_without_clear_grad_after_an_interruption_is_right_or_is_refused(name):
    """Right: what was interrupted counts, or is gone, or hangs on the parameters still, where Paddle adds to it."""
    for subject, place, choices in interruptions(name, 5):
        stepped = not subject.stand_at(choices[0])
        try:
            subject.backward(5.0)
            for opt in subject.opts:
                opt.step()
        except ampx.AmpxError:
            subject.clear_grad()
            continue
        third = subject.third if math.isfinite(subject.third) else 0.0
        parts = {*(third * part / 4 for part in range(5)), subject.history[-1], third + subject.history[-1]}
        befores = [[part] for part in parts] if stepped or len(subject.opts) > 1 else []
        expected = [subject.plainly(*before, 5.0 + part) for before in (*befores, []) for part in parts]
        skipped = choices if math.isinf(subject.third) else []
        assert subject.stand_at(*expected, *skipped), place
