"""A Ctrl-C or a time-out at any line of ampx in the middle of a block or a step: what follows is right or is refused.

Losses are linear in the weights, so that every gradient is known, and all numbers are small powers of two and sums of
them: right is what SGD's formula gives, bit for bit.
"""

import math

import pytest
import torch
from torch import nn

import ampx
from ampx_torch.apex import amp
from interruptions import THOROUGH, interrupted_everywhere, sampled

PACKAGES = ("ampx", "ampx_apex", "ampx_torch")
RATE, MOMENTUM = 0.5, 0.5


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1, bias=False)
        nn.init.constant_(self.layer.weight, 1.0)

    def forward(self, x):
        return self.layer(x).sum()


class Subject:
    """Models after two steps of gradients 1 and 2; the third step is the one that is interrupted."""

    def __init__(self, opt_level="O1", number=1, blocks=1, delays=None, third=3.0):
        self.models = [Linear() for _ in range(number)]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM) for model in self.models]
        self.blocks, self.delays, self.third = blocks, delays, third
        # Operations need not be cast here; making the op lists would take most of the time.
        patch = False if opt_level == "O1" else None
        amp.initialize(self.models, self.optimizers, opt_level=opt_level, verbosity=0, patch_torch_functions=patch)
        amp._amp_state.loss_scalers[0]._loss_scale = 128.0
        self.train(1.0)
        self.train(2.0)
        self.before = self.weights()
        self.after = self.plainly(third * blocks) if math.isfinite(third) else self.before

    def backward(self, size):
        for block in range(self.blocks):
            delayed = self.delays == "delay_overflow_check" or (self.delays and block < self.blocks - 1)
            options = {self.delays: True} if delayed else {}
            loss = sum(model(torch.full((1, 4), float(size))) for model in self.models)
            with amp.scale_loss(loss, self.optimizers, **options) as scaled:
                scaled.backward()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def train(self, size):
        self.zero_grad()
        self.backward(size)
        for optimizer in self.optimizers:
            optimizer.step()

    def act(self):
        self.train(self.third)

    def weights(self):
        return [next(amp.master_params(optimizer)).detach().clone() for optimizer in self.optimizers]

    def plainly(self, *gradients):
        """Weights after steps of SGD from here, by its formula."""
        results = []
        for optimizer in self.optimizers:
            own = next(amp.master_params(optimizer))
            weight, momentum = own.detach().clone(), optimizer.state[own]["momentum_buffer"].clone()
            for gradient in gradients:
                momentum = momentum * MOMENTUM + gradient
                weight = weight - RATE * momentum
            results.append(weight)
        return results

    def left(self):
        """The gradients that may be there: those of the second step, none, those of the blocks that came so far."""
        third = [part * self.third for part in range(1, self.blocks + 1)] if math.isfinite(self.third) else []
        return [2.0 * self.blocks, *third]


def stands_at(weights, *choices):
    """Whether each optimizer's weights are one of those that could be, which the others' need not be."""
    return all(any(torch.equal(own, choice[place]) for choice in choices) for place, own in enumerate(weights))


SUBJECTS = {
    "O1, two blocks": {"blocks": 2},
    "O1, made true late": {"blocks": 2, "delays": "delay_unscale"},
    "O2, overflow": {"opt_level": "O2", "third": math.inf},
    "O2, checked in the step": {"opt_level": "O2", "blocks": 2, "delays": "delay_overflow_check"},
    "two optimizers": {"opt_level": "O2", "number": 2},
}
if THOROUGH:
    SUBJECTS |= {
        "O1": {},
        "O1, overflow": {"third": math.inf},
        "O2": {"opt_level": "O2"},
        "O2, two blocks": {"opt_level": "O2", "blocks": 2},
        "O2, checked in the step, overflow": {"opt_level": "O2", "delays": "delay_overflow_check", "third": math.inf},
        "two optimizers, overflow": {"number": 2, "opt_level": "O2", "third": math.inf},
    }


def interruptions(name, first):
    """What is left of each interrupted third step; its weights are those before or after it, and never others."""
    places = 0
    start, options = lambda: Subject(**SUBJECTS[name]), sampled(11, first)
    for subject, place in interrupted_everywhere(start, Subject.act, PACKAGES, **options):
        assert stands_at(subject.weights(), subject.before, subject.after), place
        places += 1
        yield subject, place
    assert places > 8


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_second_step_after_an_interruption_is_the_step_or_is_refused(name):
    for subject, place in interruptions(name, 1):
        choices = [subject.weights()]
        for optimizer, own, before in zip(subject.optimizers, subject.weights(), subject.before, strict=True):
            if torch.equal(own, before) or optimizer.ampx_member.stage == "idle":  # else it was applied, not closed
                choices += [subject.plainly(size) for size in subject.left()]
            try:
                optimizer.step()
            except ampx.AmpxError:
                continue
        assert stands_at(subject.weights(), *choices), place


@pytest.mark.parametrize("name", SUBJECTS)
def test_zero_grad_after_an_interruption_starts_over(name):
    for subject, place in interruptions(name, 2):
        subject.zero_grad()
        expected = subject.plainly(5.0 * subject.blocks, 7.0 * subject.blocks)
        for size in (5.0, 7.0):
            subject.train(size)
            assert all(optimizer.last_step.applied for optimizer in subject.optimizers), place
        assert stands_at(subject.weights(), expected), place
        assert amp._amp_state.loss_scalers[0].loss_scale() in (128.0, 64.0), place
        for optimizer, model in zip(subject.optimizers, subject.models, strict=True):
            own = next(amp.master_params(optimizer))
            assert torch.equal(model.layer.weight, own.to(model.layer.weight.dtype)), place


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_new_block_after_an_interruption_adds_up_or_is_refused(name):
    for subject, place in interruptions(name, 3):
        weights, new = subject.weights(), 5.0 * subject.blocks
        choices = [subject.plainly(new + size) for size in (0.0, *subject.left())]
        try:
            subject.backward(5.0)
            for optimizer in subject.optimizers:
                optimizer.step()
        except ampx.AmpxError:
            choices.append(weights)
        if not all(optimizer.last_step.applied for optimizer in subject.optimizers):
            choices.append(weights)
        assert stands_at(subject.weights(), *choices), place
