"""Native defect: fused SGD makes its momentum buffers uninitialised and keeps them so when the first step overflows."""

import math

import pytest
import torch
from torch import nn

import ampx

FACTORS = (math.inf, 1.0, 1.0, math.inf, 1.0)


@pytest.fixture
def memory_holds_nan():
    """Fill what torch leaves uninitialised with NaN, so that nothing depends on chance."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    ampx.shutdown()


def make(fused=True):
    parameter = nn.Parameter(torch.zeros(8))
    return parameter, torch.optim.SGD([parameter], lr=0.5, momentum=0.9, dampening=0.1, fused=fused)


def expected():
    """Plain SGD on the finite steps."""
    parameter, opt = make(fused=False)
    for factor in FACTORS:
        if math.isfinite(factor):
            parameter.grad = torch.full((8,), factor)
            opt.step()
    return parameter


def test_native_grad_scaler_trains_on_uninitialised_momentum(memory_holds_nan):
    parameter, opt = make()
    scaler = torch.amp.GradScaler("cpu")
    for factor in FACTORS:
        scaler.scale(parameter.sum() * factor).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    assert parameter.isnan().all()


@pytest.mark.parametrize("device_scale", [False, True], ids=["host", "device"])
def test_an_overflow_in_the_first_step_leaves_momentum_unmade(memory_holds_nan, device_scale):
    ampx.init("torch", dtype="float32", loss_scale="dynamic", nan_loss="skip")
    parameter, raw = make()
    opt = ampx.wrap_optimizer(raw, device_scale=device_scale)
    applied = []
    for factor in FACTORS:
        with ampx.scale_loss(parameter.sum() * factor, opt) as scaled:
            scaled.backward()
        opt.step()
        opt.zero_grad()
        applied.append(opt.last_step.applied)
    assert applied == [math.isfinite(factor) for factor in FACTORS]
    assert torch.equal(parameter, expected())
