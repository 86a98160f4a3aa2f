"""A Ctrl-C or a signal handler's time-out at any line of ampx: what follows is right or is refused.

Right is what plain PyTorch does with the same weights, optimizer state and gradients.
"""

import copy
import math
import os

import pytest
import torch

import ampx
from ampx_torch.casting import lstm
from interruptions import Interruption, interrupted_everywhere

PACKAGES = ("ampx", "ampx_apex", "ampx_torch")
THOROUGH = bool(os.environ.get("AMPX_TEST_ALL"))  # every line and call; else a sixteenth of the lines
LARGE = 2**16  # elements from which on a gradient is read before the kernel divides it
SCALE = 1024.0


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.5)


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=2)


def parameters_of(raw):
    return [parameter for group in raw.param_groups for parameter in group["params"]]


class Subject:
    """Parameters with losses that are linear in them, so that every gradient is known; two steps are done."""

    def __init__(
        self, *, shape=(3,), number=1, make=sgd, losses=1, level="O1", clips=None, closure=False, by_hand=False,
        hooks=False, third=3.0, process_wide=False, **options,
    ):  # fmt: skip
        self.amp = ampx.init(
            "torch", dtype="bfloat16", level=level, process_wide=process_wide, device="cpu", nan_loss="skip",
            loss_scale=ampx.LossScale(init_scale=SCALE, growth_interval=100),
        )  # fmt: skip
        self.models = [torch.nn.ParameterList([torch.zeros(shape), torch.zeros(2)]) for _ in range(number)]
        self.raws = [make(model.parameters()) for model in self.models]
        if level == "O2":
            self.amp.prepare(list(self.models), self.raws)
        self.opts = self.amp.wrap_optimizer(self.raws, max_grad_norm=clips, **options)
        for raw in self.raws if hooks else ():
            raw.register_step_pre_hook(lambda *_: None)
        self.losses, self.clips, self.closure, self.by_hand, self.third = losses, clips, closure, by_hand, third
        self.train(1.0)
        self.train(2.0)
        self.before = self.weights()
        self.after = [self.plainly(part * third) for part in range(1, losses + 1)] if math.isfinite(third) else []

    def loss(self, size):
        return sum((own.float() * size).sum() for model in self.models for own in model.parameters())

    def backward(self, size):
        for loss_id in range(self.losses):
            with ampx.scale_loss(self.loss(size), self.opts, loss_id=loss_id) as scaled:
                scaled.backward()

    def zero_grad(self):
        for opt in self.opts:
            opt.zero_grad()

    def step(self, size):
        for opt in self.opts:
            if self.closure:
                opt.step(lambda: self.evaluate(size))
                continue
            if self.by_hand:
                ampx.unscale(opt)
                ampx.clip_grad_norm(opt, 1e6)
            opt.step()

    def evaluate(self, size):
        self.zero_grad()
        self.backward(size)
        return self.loss(size).detach()

    def train(self, size):
        self.zero_grad()
        if not self.closure:
            self.backward(size)
        self.step(size)

    def act(self):
        self.train(self.third)

    def weights(self):
        """What each optimizer holds: a list of tensors for each."""
        return [[own.detach().clone() for own in parameters_of(raw)] for raw in self.raws]

    def plainly(self, *gradients):
        """The weights after steps of plain PyTorch from here, on gradients of which every element is the same."""
        weights = []
        for raw in self.raws:
            twin = type(raw)([torch.nn.Parameter(own.detach().clone()) for own in parameters_of(raw)], lr=0.5)
            twin.load_state_dict(copy.deepcopy(raw.state_dict()))
            twin.param_groups[0].update(fused=None, foreach=None)
            for gradient in gradients:
                step_plainly(twin, gradient, self.clips)
            weights.append([own.detach() for own in parameters_of(twin)])
        return weights


def step_plainly(raw, gradient, clips):
    def closure():
        for own in parameters_of(raw):
            own.grad = torch.full_like(own, gradient)
        if clips is not None:
            torch.nn.utils.clip_grad_norm_(parameters_of(raw), clips)
        return sum((own.detach() * gradient).sum() for own in parameters_of(raw))

    raw.step(closure)


def same(left, right):
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(left, right, strict=True))


def stands_at(weights, choices):
    """Whether each optimizer's weights are one of those that could be, which the others' need not be."""
    return all(any(same(own, choice[place]) for choice in choices) for place, own in enumerate(weights))


SUBJECTS = {
    "plain": {},
    "overflow": {"third": math.inf},
    "by hand": {"by_hand": True},
    "clipped": {"clips": 0.5},
    "hooks": {"hooks": True, "clips": 0.5},
    "fused": {"fused": "auto"},
    "fused on the device": {"fused": "auto", "device_scale": True},
    "fused on the device, overflow": {"fused": "auto", "device_scale": True, "third": math.inf},
    "folded": {"shape": (LARGE,), "fused": "auto"},
    "folded and clipped": {"shape": (LARGE,), "fused": "auto", "clips": 0.5},
    "folded and clipped on the device": {"fused": "auto", "device_scale": True, "clips": 0.5},
    "losses": {"losses": 2},
    "losses, overflow": {"losses": 2, "third": math.inf},
    "list": {"number": 2},
    "list, overflow": {"number": 2, "third": math.inf},
    "closure": {"closure": True},
    "LBFGS": {"closure": True, "make": lbfgs},
    "LBFGS, overflow": {"closure": True, "make": lbfgs, "third": math.inf},
    "masters": {"level": "O2"},
    "masters, overflow": {"level": "O2", "third": math.inf},
}


def interruptions(name, first, error=Interruption):
    """What is left of each interrupted third step; its weights are those before or after it, and never others."""
    places = 0
    options = {"after_calls": True} if THOROUGH else {"stride": 16, "first": first}
    for subject, place in interrupted_everywhere(
        lambda: Subject(**SUBJECTS[name]), Subject.act, PACKAGES, error=error, **options
    ):
        assert stands_at(subject.weights(), [subject.before, *subject.after]), place
        places += 1
        yield subject, place
    assert places > 5


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_second_step_after_an_interruption_is_the_step_or_is_refused(name):
    for subject, place in interruptions(name, 1):
        weights = subject.weights()
        try:
            for opt in subject.opts:
                opt.step(*[lambda: torch.zeros(())] if "LBFGS" in name else [])  # a closure without gradients
        except ampx.AmpxError:
            pass
        choices = [subject.before] if stands_at(weights, [subject.before]) else [weights]
        assert stands_at(subject.weights(), [*choices, *subject.after]), place


@pytest.mark.parametrize(("error", "first"), [(Interruption, 3), (TimeoutError, 5)])
@pytest.mark.parametrize("name", SUBJECTS)
def test_zero_grad_after_an_interruption_starts_over(name, error, first):
    for subject, place in interruptions(name, first, error):
        subject.zero_grad()
        expected = subject.plainly(5.0 * subject.losses, 7.0 * subject.losses)
        for size in (5.0, 7.0):
            subject.train(size)
            assert all(opt.last_step.applied for opt in subject.opts), place
        assert stands_at(subject.weights(), [expected]), place
        assert {opt.loss_scale for opt in subject.opts} <= {SCALE, SCALE / 2}, place
        for opt in subject.opts:
            for own, master in () if opt.masters is None else opt.masters.pairs:
                assert torch.equal(own, master.to(own.dtype)), place


@pytest.mark.parametrize("name", [name for name in SUBJECTS if "closure" not in SUBJECTS[name]])
def test_a_new_scale_loss_after_an_interruption_adds_up_or_is_refused(name):
    for subject, place in interruptions(name, 7):
        weights, new = subject.weights(), 5.0 * subject.losses
        left = [0.0, 2.0 * subject.losses, *(part * subject.third for part in range(1, subject.losses + 1))]
        choices = [subject.plainly(new + size) for size in left if math.isfinite(size)]
        try:
            subject.backward(5.0)
            subject.step(5.0)
        except ampx.AmpxError:
            choices.append(weights)
        if not all(opt.last_step.applied for opt in subject.opts):
            choices.append(weights)
        assert stands_at(subject.weights(), choices), place


REGIONS = {
    "scale_loss and step": lambda subject: subject.act(),
    "autocast off": lambda subject: in_region(subject.amp.autocast(enabled=False), subject),
    "autocast on": lambda subject: in_region(subject.amp.autocast(), subject),
    "a decorated function": lambda subject: subject.amp.float_function(subject.loss)(1.0),
}


@pytest.fixture
def own_lstm_kernel(monkeypatch):
    """Take away what interruptions leave in force of the LSTM's kernel, which computes nothing else than torch's."""
    installed = lstm._Installed()
    monkeypatch.setattr(lstm, "_installed", installed)
    yield
    if installed.library is not None:
        installed.library._destroy()


def in_region(region, subject):
    with region:
        subject.loss(1.0)


OPTIONS = [{}, {"clips": 0.5, "hooks": True}, {"number": 2}, {"closure": True}]
CASES = [(name, {}) for name in REGIONS] + [("scale_loss and step", options) for options in OPTIONS[1:] if THOROUGH]


@pytest.mark.parametrize(("region", "options"), CASES)
@pytest.mark.parametrize("process_wide", [True, False])
def test_after_an_interruption_at_any_line_casting_is_as_it_was(region, process_wide, options, own_lstm_kernel):
    weights, places = torch.ones(4, 4), 0
    strides = {"scale_loss and step": 4, "autocast on": 10}  # a region that casts asks what every operation takes
    chosen = {"after_calls": True} if THOROUGH else {"stride": strides.get(region, 1)}
    for _, place in interrupted_everywhere(
        lambda: Subject(process_wide=process_wide, **options), REGIONS[region], PACKAGES, **chosen
    ):
        now = torch.is_autocast_enabled("cpu"), (weights @ weights).dtype
        assert now == (process_wide, torch.bfloat16 if process_wide else torch.float32), place
        places += 1
    assert places > 5
