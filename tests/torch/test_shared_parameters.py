"""Parameters that several wrapped optimizers hold: every step sees the gradients that it sees in plain PyTorch."""

import copy
import itertools

import pytest
import torch
from shared_parameters import CLIPS, REFUSED, SCRIPTS, a_loss_each, both_at_once
from torch import nn

import ampx

SCALE = 2.0**10


class Trainees:
    """Two optimizers over `shared` and a parameter of their own each; `amp` is None for plain float32."""

    def __init__(self, amp, make, scales=(SCALE, SCALE), together=False):
        torch.manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(3)) for _ in range(3)]
        first, second, shared = self.parameters
        raws = [make([first, shared]), make([shared, second])]
        self.amp = amp
        if amp is None:
            self.opts = raws
        elif together:
            self.opts = ampx.wrap_optimizer(raws, loss_scale=scales[0])
        else:
            self.opts = [ampx.wrap_optimizer(raw, loss_scale=scale) for raw, scale in zip(raws, scales, strict=True)]

    def loss(self, number=1.0):
        first, second, shared = self.parameters
        return (number * shared * first).sum() + (shared * second).pow(2).sum()

    def own(self, index):
        """Return a loss of what only one of them holds."""
        return self.parameters[index].sum()

    def backward(self, loss, *which):
        if self.amp is None:
            loss.backward()
            return
        opts = [self.opts[index] for index in which]
        with ampx.scale_loss(loss, opts[0] if len(opts) == 1 else opts) as scaled:
            scaled.backward()

    def unscale(self, index):
        if self.amp is not None:
            ampx.unscale(self.opts[index])

    def clip(self, index, norm):
        opt = self.opts[index]
        if self.amp is not None:
            ampx.clip_grad_norm(opt, norm)
        else:
            nn.utils.clip_grad_norm_([own for group in opt.param_groups for own in group["params"]], norm)

    def step(self, index):
        self.opts[index].step()

    def zero_grad(self, *which):
        for index in which or range(2):
            self.opts[index].zero_grad()


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.25, momentum=0.5),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "fused adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scales", ["alike", "unlike", "one for both"])
def test_every_step_sees_the_gradients_of_plain_float32(scales, optimizer, script, amp):
    if scales == "unlike" and script is a_loss_each:
        pytest.skip("gradients of two scales add up, which is refused: tested below")
    plain = Trainees(None, OPTIMIZERS[optimizer])
    pair = (SCALE, 4.0 if scales == "unlike" else SCALE)
    scaled = Trainees(amp, OPTIMIZERS[optimizer], pair, together=scales == "one for both")
    for _ in range(4):
        script(plain)
        script(scaled)
    # Powers of two scale exactly. The norm that clips is a sum in another order than plain torch's, of six squares: it
    # and the quotient round, four times over.
    tolerance = 4 * 8 * torch.finfo(torch.float32).eps if script in CLIPS else 0.0
    for own, others in zip(scaled.parameters, plain.parameters, strict=True):
        torch.testing.assert_close(own, others, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("which", [0, 1])
def test_an_overflow_of_ones_own_parameter_skips_its_step_and_the_other_steps(which, optimizer, amp):
    plain, scaled = Trainees(None, OPTIMIZERS[optimizer]), Trainees(amp, OPTIMIZERS[optimizer])
    for trainees in (plain, scaled):
        trainees.backward(trainees.loss(), 0, 1)
        trainees.parameters[which].grad.fill_(float("inf"))
    before = copy.deepcopy(scaled.parameters[which])
    for index in range(2):
        scaled.step(index)
        assert scaled.opts[index].last_step.applied == (index != which)
    plain.step(1 - which)
    assert torch.equal(scaled.parameters[which], before)
    for own, others in zip(scaled.parameters, plain.parameters, strict=True):
        assert torch.equal(own, others)


def test_an_overflow_of_the_shared_parameter_skips_both(amp):
    trainees = Trainees(amp, OPTIMIZERS["sgd"])
    before = copy.deepcopy(trainees.parameters)
    trainees.backward(trainees.loss(float("inf")), 0, 1)
    for index in range(2):
        trainees.step(index)
        assert not trainees.opts[index].last_step.applied
    assert all(itertools.starmap(torch.equal, zip(trainees.parameters, before, strict=True)))


def test_a_parameter_that_is_shared_since_add_param_group(amp):
    def train(trainees):
        first, second, _ = trainees.parameters
        both_at_once(trainees)
        trainees.opts[0].add_param_group({"params": [second]})
        both_at_once(trainees)
        return [first, second]

    plain = train(Trainees(None, OPTIMIZERS["sgd"]))
    assert all(itertools.starmap(torch.equal, zip(train(Trainees(amp, OPTIMIZERS["sgd"])), plain, strict=True)))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.25)


@pytest.mark.parametrize("script", [a_loss_each, *REFUSED], ids=lambda script: script.__name__)
def test_what_is_refused_changes_nothing_and_a_cleared_start_trains(script, amp):
    plain = Trainees(None, sgd)
    scaled = Trainees(amp, sgd, (SCALE, 4.0) if script is a_loss_each else (SCALE, SCALE))
    with pytest.raises(ampx.ProtocolError, match="scale_loss with all the optimizers whose gradients"):
        script(scaled)
    stopped_at = copy.deepcopy(scaled.parameters)
    scaled.zero_grad()
    assert all(itertools.starmap(torch.equal, zip(scaled.parameters, stopped_at, strict=True)))
    for own, value in zip(plain.parameters, stopped_at, strict=True):
        own.data.copy_(value.data)
    for trainees in (plain, scaled):
        both_at_once(trainees)
    assert all(itertools.starmap(torch.equal, zip(scaled.parameters, plain.parameters, strict=True)))


def test_scales_by_loss_id_are_refused_where_another_optimizer_waits_for_the_gradients(amp, backward):
    trainees = Trainees(amp, OPTIMIZERS["sgd"])
    trainees.backward(trainees.loss(), 0, 1)
    before = [own.grad.clone() for own in trainees.parameters]
    with pytest.raises(ampx.ProtocolError, match=r"shares parameters with another.*Leave loss_id out"):
        backward(trainees.loss(), trainees.opts, loss_id=1)
    assert all(itertools.starmap(torch.equal, zip([own.grad for own in trainees.parameters], before, strict=True)))
    trainees.step(1)
    backward(trainees.loss(), trainees.opts[0], loss_id=1)
    trainees.step(0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "script", [each for each in SCRIPTS if each is not a_loss_each], ids=lambda script: script.__name__
)
def test_a_scale_on_the_device_is_taken_out_once(script):
    with ampx.init("torch", dtype="float16", device="cuda") as amp:
        results = []
        for session in (None, amp):
            trainees = Trainees(session, OPTIMIZERS["sgd"])
            trainees.parameters = [nn.Parameter(own.detach().to("cuda")) for own in trainees.parameters]
            first, second, shared = trainees.parameters
            raws = [torch.optim.Adam(own, lr=0.01, fused=True) for own in ([first, shared], [shared, second])]
            trainees.opts = raws if session is None else [ampx.wrap_optimizer(raw, loss_scale=SCALE) for raw in raws]
            with ampx.autocast(enabled=False):
                script(trainees)
            results.append([own.detach().cpu() for own in trainees.parameters])
    for own, others in zip(*results, strict=True):
        torch.testing.assert_close(own, others, rtol=1e-6, atol=1e-6)
