"""Defects of torch's own mixed precision that ampx works around: each shown natively, then right through ampx.

Row 1 of the list, the weight cache of process-wide autocast, is shown in test_casting.py.
"""

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

import ampx


def lbfgs_problem():
    torch.manual_seed(7)
    model = nn.Linear(3, 1)
    return model, torch.randn(8, 3), torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=2)


def test_defect_2_a_scaler_updated_between_two_optimizers_unscales_the_second_wrongly(amp):
    def parameters_and_optimizers():
        pair = [nn.Parameter(torch.ones(1)) for _ in range(2)]
        return pair, [torch.optim.SGD([parameter], lr=1.0) for parameter in pair]

    pair, opts = parameters_and_optimizers()
    scaler = GradScaler("cpu", growth_interval=1)
    scaler.scale(pair[0].sum() + pair[1].sum()).backward()
    for opt in opts:
        scaler.step(opt)
        scaler.update()
    assert [parameter.item() for parameter in pair] == [0.0, 0.5]  # both gradients are 1

    pair, raws = parameters_and_optimizers()
    opts = [ampx.wrap_optimizer(raw, loss_scale=ampx.LossScale(growth_interval=1)) for raw in raws]
    with ampx.scale_loss(pair[0].sum() + pair[1].sum(), opts) as scaled:
        scaled.backward()
    for opt in opts:
        opt.step()
    assert [parameter.item() for parameter in pair] == [0.0, 0.0]
    assert [opt.loss_scale for opt in opts] == [2.0**17] * 2


def test_defect_3_step_with_closure_none_raises(amp, backward):
    parameter = nn.Parameter(torch.ones(1))
    raw = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(RuntimeError, match="Closure"):
        scaler.step(raw, closure=None)
    raw.zero_grad()

    opt = ampx.wrap_optimizer(raw)
    backward(parameter.sum(), opt)
    opt.step(closure=None)
    assert parameter.item() == 0.0


def test_defect_3_a_positional_closure_makes_lbfgs_run_on_scaled_gradients(amp, same):
    def plain():
        model, x, opt = lbfgs_problem()

        def closure():
            opt.zero_grad()
            loss = model(x).pow(2).mean() / 8
            loss.backward()
            return loss

        opt.step(closure)
        return model.state_dict()

    def native():
        model, x, opt = lbfgs_problem()
        scaler = GradScaler("cpu")

        def closure():
            opt.zero_grad()
            loss = model(x).pow(2).mean() / 8
            scaler.scale(loss).backward()
            return loss

        closure()
        scaler.step(opt, closure)
        scaler.update()
        return model.state_dict()

    def through_ampx():
        model, x, raw = lbfgs_problem()
        opt = ampx.wrap_optimizer(raw)

        def closure():
            opt.zero_grad()
            loss = model(x).pow(2).mean() / 8
            with ampx.scale_loss(loss, opt) as scaled:
                scaled.backward()
            return loss

        opt.step(closure)
        return model.state_dict()

    assert not torch.allclose(native()["weight"], plain()["weight"], rtol=0.01)
    assert same(through_ampx(), plain())


def test_defect_4_a_one_element_float16_loss_of_one_dimension_overflows_when_scaled(amp):
    parameter = nn.Parameter(torch.full((1,), 2.0))
    opt = ampx.wrap_optimizer(torch.optim.SGD([parameter], lr=1.0))
    loss = parameter.to(torch.float16)
    native = GradScaler("cpu").scale(loss)
    assert (native.dtype, native.item()) == (torch.float16, float("inf"))
    with ampx.scale_loss(loss, opt) as scaled:
        assert (scaled.dtype, scaled.item()) == (torch.float32, 2.0**17)
        assert scaled.shape == (1,)


def test_defect_a_scaler_step_without_gradients_raises(amp, backward):
    unused, used = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    raw = torch.optim.SGD([unused], lr=1.0)
    scaler = GradScaler("cpu")
    scaler.scale(used.sum()).backward()
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.step(raw)

    opt = ampx.wrap_optimizer(raw)
    backward(used.sum(), opt)
    opt.step()
    assert not opt.last_step.applied
    assert unused.item() == 1.0
    assert amp.state_dict()["groups"][0]["losses"][0]["growth_tracker"] == 0


def test_defect_unscaling_twice_raises(amp, backward):
    parameter = nn.Parameter(torch.ones(1))
    raw = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(raw)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(raw)
    raw.zero_grad()

    opt = ampx.wrap_optimizer(raw)
    backward(parameter.sum(), opt)
    ampx.unscale(opt)
    ampx.unscale(opt)
    opt.step()
    assert parameter.item() == 0.0


def test_defect_complex_gradients_cannot_be_unscaled(amp, backward):
    def make():
        parameter = nn.Parameter(torch.tensor([1.0 + 2.0j]))
        return parameter, torch.optim.SGD([parameter], lr=0.25)

    parameter, raw = make()
    scaler = GradScaler("cpu")
    scaler.scale(parameter.abs().pow(2).sum()).backward()
    with pytest.raises(NotImplementedError):
        scaler.step(raw)

    parameter, raw = make()
    opt = ampx.wrap_optimizer(raw)
    backward(parameter.abs().pow(2).sum(), opt)
    opt.step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([0.5 + 1.0j]))


def test_defect_the_scale_has_no_floor_and_reaches_zero(amp, backward):
    parameter = nn.Parameter(torch.ones(1))
    raw = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0**-148)
    for _ in range(3):
        scaler.scale(parameter.sum())
        parameter.grad = torch.full((1,), float("inf"))
        scaler.step(raw)
        scaler.update()
    assert scaler.get_scale() == 0.0
    raw.zero_grad()

    opt = ampx.wrap_optimizer(raw, loss_scale=ampx.LossScale(init_scale=2.0))
    for _ in range(3):
        backward(parameter.sum() * float("inf"), opt)
        opt.step()
        opt.zero_grad()
    assert opt.loss_scale == 1.0
