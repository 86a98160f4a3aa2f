"""Gradients near the ends of float32: quotients and norms that overflow though what they are made of does not."""

import math

import pytest
import torch
from torch import nn

import ampx
from ampx_torch import step

LARGE = 2**16  # elements from which on a gradient is read before the kernel divides it
PATHS = {
    "plain": {},
    "fused": {"fused": "auto"},
    "on the device": {"fused": "auto", "device_scale": True},
    "hooks on the device": {"fused": "auto", "device_scale": True, "hook": True},
}


def wrapped(size, hook=False, lr=1.0, **options):
    weights = [nn.Parameter(torch.zeros(size)), nn.Parameter(torch.zeros(2))]
    raw = torch.optim.SGD(weights, lr=lr)
    opt = ampx.wrap_optimizer(raw, **options)
    if hook:
        raw.register_step_pre_hook(lambda *_: None)
    return weights, opt


@pytest.mark.parametrize("clips", [{}, {"max_grad_norm": 1.0}, {"max_grad_value": 1.0}], ids=str)
@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.parametrize("path", PATHS)
def test_with_a_scale_below_1_the_quotient_counts(path, size, clips, amp, backward):
    scale = ampx.LossScale(init_scale=2.0**-14, min_scale=2.0**-20)
    weights, opt = wrapped(size, loss_scale=scale, **PATHS[path], **clips)
    # Each gradient is the sum of ten: finite while it is scaled, 3e39 when it is true.
    backward((weights[1].expand(10, 2) * 3e38).sum() + weights[0].sum(), opt)
    opt.step()
    assert (opt.last_step.applied, opt.last_step.finite, opt.loss_scale) == (False, False, 2.0**-15)
    assert all(torch.equal(weight, torch.zeros_like(weight)) for weight in weights)
    opt.zero_grad()
    backward(weights[1].sum() + weights[0].sum(), opt)
    opt.step()
    assert opt.last_step.applied
    assert all(torch.isfinite(weight).all() and weight.any() for weight in weights)


def test_a_static_scale_below_1_and_unscale_see_the_quotient(amp, backward):
    weights, opt = wrapped(3, loss_scale=2.0**-10)
    backward((weights[1].expand(10, 2) * 3e38).sum(), opt)
    ampx.unscale(opt)
    opt.step()
    assert (opt.last_step.applied, weights[1].tolist()) == (False, [0.0, 0.0])


@pytest.mark.parametrize("value", [1e25, 1e36])
@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.parametrize("path", PATHS)
def test_gradients_whose_norm_overflows_are_clipped_to_the_bound(path, size, value, amp, backward):
    weights, opt = wrapped(size, loss_scale=1.0, max_grad_norm=2.0, **PATHS[path])
    backward(sum((weight * value).sum() for weight in weights), opt)
    opt.step()
    elements = size + 2
    assert opt.last_step.applied
    assert opt.last_step.grad_norm == pytest.approx(value * math.sqrt(elements), rel=1e-6)
    for weight in weights:
        torch.testing.assert_close(weight, torch.full_like(weight, -2.0 / math.sqrt(elements)), rtol=1e-5, atol=0.0)


def test_gradients_that_no_float32_divisor_can_clip_are_not_applied_as_zeros(amp, backward):
    weights, opt = wrapped(LARGE, loss_scale=1.0, max_grad_norm=2.0, **PATHS["on the device"])
    backward(sum((weight * 3e38).sum() for weight in weights), opt)  # the kernel had to divide by 4e40
    opt.step()
    assert (opt.last_step.applied, opt.last_step.finite) == (False, False)
    assert all(torch.equal(weight, torch.zeros_like(weight)) for weight in weights)


def test_clip_grad_norm_bounds_gradients_whose_norm_overflows(amp, backward):
    weights, opt = wrapped(3, loss_scale=4.0)
    backward(sum((weight * 1e25).sum() for weight in weights), opt)
    norm = ampx.clip_grad_norm(opt, 1.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(1e25 * math.sqrt(5), rel=1e-6)
    opt.step()
    torch.testing.assert_close(weights[0], torch.full((3,), -1 / math.sqrt(5)))


def test_a_norm_beyond_float32_is_told_and_an_overflow_is_still_one(amp, backward):
    weights, opt = wrapped(3, loss_scale=1.0, max_grad_norm=1.0)
    backward((weights[0] * 3e38).sum(), opt)
    opt.step()
    assert opt.last_step.grad_norm == pytest.approx(3e38 * math.sqrt(3), rel=1e-6)
    opt.zero_grad()
    before = weights[0].detach().clone()
    backward((weights[0] * torch.inf).sum(), opt)
    opt.step()
    assert not opt.last_step.applied
    assert torch.equal(weights[0], before)


# -- written after unscale -----------------------------------------------------------------------------


@pytest.mark.parametrize("elsewhere", [False, True], ids=["", "as on an accelerator"])
@pytest.mark.parametrize("call", [ampx.unscale, lambda opt: ampx.clip_grad_norm(opt, 1.0)], ids=["unscale", "clip"])
@pytest.mark.parametrize("path", PATHS)
def test_what_becomes_infinite_after_unscale_is_not_applied(path, call, elsewhere, amp, backward, monkeypatch):
    if elsewhere:
        monkeypatch.setattr(step, "all_on_cpu", lambda tensors: False)
    weights, opt = wrapped(3, **PATHS[path])
    for late in (torch.inf, 1.0, torch.nan, 2.0):  # from another process's sum, say
        opt.zero_grad()
        before = weights[0].detach().clone()
        backward(sum(weight.sum() for weight in weights), opt)
        call(opt)
        weights[0].grad.data *= late
        opt.step()
        assert opt.last_step.applied == opt.last_step.finite == math.isfinite(late)
        assert torch.equal(weights[0], before) != math.isfinite(late)
    assert opt.loss_scale == 2.0**14


@pytest.mark.parametrize("path", PATHS)
def test_after_unscale_an_overflow_of_one_loss_still_counts_for_that_one_only(path, amp, backward):
    weights, opt = wrapped(3, **PATHS[path])
    for loss_id, value in enumerate((1.0, torch.inf)):
        backward((weights[0] * value).sum() + weights[1].sum(), opt, loss_id=loss_id)
    ampx.unscale(opt)
    opt.step()
    losses = amp.state_dict(opt)["groups"][0]["losses"]
    assert {loss["loss_id"]: loss["scale"] for loss in losses} == {0: 2.0**16, 1: 2.0**15}
    assert not opt.last_step.applied
