"""Schedulers made before or after wrapping work, also when the first step is skipped. Warnings are errors."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

import ampx

INF = float("inf")

MAKERS = {
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 1, gamma=0.5),
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda epoch: 1 / (1 + epoch)),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=0.5, total_steps=10),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.ConstantLR(opt, 0.5, 2), lr_scheduler.ExponentialLR(opt, 0.9)], milestones=[2]
    ),
    "SWALR": lambda opt: swa_utils.SWALR(opt, swa_lr=0.05, anneal_epochs=3),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 3),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0),
}


def advance(scheduler):
    scheduler.step(1.0) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()


def make():
    parameter = nn.Parameter(torch.ones(1))
    return parameter, torch.optim.SGD([parameter], lr=0.1, momentum=0.9)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("name", MAKERS)
def test_learning_rates_are_plain_torchs_and_nobody_warns_when_the_first_step_is_skipped(name, moment, amp, backward):
    plain_parameter, plain = make()
    plain_scheduler = MAKERS[name](plain)
    parameter, raw = make()
    early = MAKERS[name](raw) if moment == "before" else None
    opt = ampx.wrap_optimizer(raw)
    scheduler = early or MAKERS[name](opt)
    for step in range(4):
        plain_parameter.grad = torch.ones(1)
        plain.step()
        advance(plain_scheduler)
        opt.zero_grad()
        backward(parameter.sum() * (INF if step == 0 else 1.0), opt)
        opt.step()
        advance(scheduler)
        assert raw.param_groups[0]["lr"] == opt.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    # The scheduler's patch of `step` neither bypasses the check nor loses it.
    assert (opt.last_step.applied, opt.loss_scale) == (True, 2.0**15)
    assert torch.isfinite(parameter).all()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_gated_scheduler_steps_only_when_the_optimizer_did(moment, amp, backward):
    parameter, raw = make()
    early = MAKERS["StepLR"](raw) if moment == "before" else None
    opt = ampx.wrap_optimizer(raw)
    scheduler = ampx.gate(early or MAKERS["StepLR"](opt), opt)
    rates = []
    for factor in (INF, 1.0, INF, 1.0):
        opt.zero_grad()
        backward(parameter.sum() * factor, opt)
        opt.step()
        scheduler.step()
        rates.append(opt.param_groups[0]["lr"])
    assert rates == [0.1, 0.05, 0.05, 0.025]


def test_the_scale_is_moved_once_a_step_through_a_schedulers_patch(amp, backward):
    parameter, raw = make()
    MAKERS["StepLR"](raw)
    opt = ampx.wrap_optimizer(raw)
    MAKERS["StepLR"](opt)
    backward(parameter.sum(), opt)
    opt.step()
    assert amp.state_dict()["groups"][0]["losses"][0]["growth_tracker"] == 1


def test_a_gated_average_of_weights_is_that_of_a_run_without_the_skipped_step(amp, backward):
    average_of = swa_utils.get_ema_multi_avg_fn(0.75)
    plain_parameter, plain = make()
    plain_average = swa_utils.AveragedModel(nn.ParameterList([plain_parameter]), multi_avg_fn=average_of)
    parameter, raw = make()
    model = nn.ParameterList([parameter])
    average = swa_utils.AveragedModel(model, multi_avg_fn=average_of)
    opt = ampx.wrap_optimizer(raw)
    gate = ampx.gate(average, opt)
    for factor in (1.0, INF, 3.0, 2.0):
        opt.zero_grad()
        backward(parameter.sum() * factor, opt)
        opt.step()
        gate.update_parameters(model)
        if factor != INF:
            plain_parameter.grad = torch.full((1,), factor)
            plain.step()
            plain_average.update_parameters(nn.ParameterList([plain_parameter]))
    assert average.n_averaged == plain_average.n_averaged == 3
    assert torch.equal(average.module[0], plain_average.module[0])


def test_a_gated_target_network_follows_applied_steps_only(amp, backward):
    """A class of the user's with `update`, as reinforcement learning has it."""

    class Target:
        value, updates = 0.0, 0

        def update(self):
            self.value, self.updates = 0.5 * self.value + 0.5 * parameter.item(), self.updates + 1

    parameter, raw = make()
    opt, target = ampx.wrap_optimizer(raw), Target()
    gated = ampx.gate(target, opt)
    expected = 0.0
    for factor in (1.0, INF, 1.0):
        opt.zero_grad()
        backward(parameter.sum() * factor, opt)
        opt.step()
        assert gated.update() == (factor != INF)
        expected = expected if factor == INF else 0.5 * expected + 0.5 * parameter.item()
    assert (target.value, target.updates) == (expected, 2)
