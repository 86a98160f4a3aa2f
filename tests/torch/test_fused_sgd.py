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


# -- a first gradient that comes later than others -----------------------------------------------------


def late(opt, weights, steps=4):
    for step in range(steps):
        opt.zero_grad()
        loss = weights[0].square().sum() + weights[0].sum()
        if step >= 2:
            loss = loss + (weights[1] * (step + 1.0)).sum()
        with ampx.scale_loss(loss, opt) as scaled:
            scaled.backward()
        opt.step()
        assert opt.last_step.applied


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("device_scale", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"weight_decay": 0.1}, {"maximize": True}], ids=str)
def test_a_parameter_may_get_its_first_gradient_later(options, device_scale, level):
    amp = ampx.init("torch", dtype="bfloat16", device="cpu", level=level, process_wide=False)

    def train(**how):
        torch.manual_seed(0)
        model = nn.ParameterList([torch.randn(5), torch.randn(3)])
        raw = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)
        if level == "O2":
            amp.prepare(model, raw)
        late(amp.wrap_optimizer(raw, loss_scale=64.0, **how), list(model))
        return [parameter for group in raw.param_groups for parameter in group["params"]]

    for fused, plain in zip(train(fused="auto", device_scale=device_scale), train(), strict=True):
        torch.testing.assert_close(fused, plain)


def test_a_late_first_gradient_that_overflows_leaves_the_state_as_it_was():
    ampx.init("torch", dtype="bfloat16", device="cpu", process_wide=False)
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    raw = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    opt = ampx.wrap_optimizer(raw, loss_scale=64.0, fused="auto")
    late(opt, weights, steps=2)
    opt.zero_grad()
    with ampx.scale_loss((weights[0] + weights[1] * torch.inf).sum(), opt) as scaled:
        scaled.backward()
    opt.step()
    assert not opt.last_step.applied
    assert weights[1] not in raw.state
    late(opt, weights, steps=3)
    assert torch.equal(raw.state[weights[1]]["momentum_buffer"], torch.full((2,), 3.0))


def test_with_dampening_a_late_first_gradient_is_refused_before_anything_changes():
    ampx.init("torch", dtype="bfloat16", device="cpu", process_wide=False)
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    raw = torch.optim.SGD(weights, lr=0.1, momentum=0.9, dampening=0.5)
    opt = ampx.wrap_optimizer(raw, loss_scale=64.0, fused="auto")
    late(opt, weights, steps=2)
    before = [weight.detach().clone() for weight in weights]
    with pytest.raises(ampx.UnsupportedByBackendError, match="dampening"):
        late(opt, weights, steps=3)
    opt.zero_grad()
    late(opt, weights[:1] * 2, steps=1)
    assert not torch.equal(weights[0], before[0])
    assert torch.equal(weights[1], before[1])
