"""Bad input beyond the kit's: weights, optimizer state, gradients and scale stay as they were."""

import copy

import pytest
import torch
from torch import nn

import ampx

INF = float("inf")


@pytest.fixture
def session():
    return ampx.init("torch", dtype="bfloat16", loss_scale="dynamic", process_wide=False)


@pytest.fixture
def model():
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


@pytest.fixture
def opt(session, model, backward):
    """An Adam with one step behind it, so that it has state to lose."""
    opt = ampx.wrap_optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    backward(model(torch.ones(1, 2)).sum(), opt)
    opt.step()
    opt.zero_grad()
    return opt


@pytest.fixture
def untouched(session, model, opt, same):
    """After the test everything is as it was, and training goes on."""

    def look():
        return copy.deepcopy((model.state_dict(), opt.state_dict(), session.state_dict()))

    before = look()
    yield
    assert same(look(), before)
    opt.zero_grad()
    with ampx.scale_loss(model(torch.ones(1, 2)).sum(), opt) as scaled:
        scaled.backward()
    opt.step()
    assert opt.last_step.applied


def scalar(model):
    return model(torch.ones(1, 2)).sum()


LOSSES = {
    "empty": (lambda model: model(torch.ones(0, 2)), ampx.LossShapeError, "0 elements"),
    "complex": (lambda model: scalar(model).to(torch.complex64), ampx.LossDtypeError, "complex64"),
    "python number": (lambda model: scalar(model).item(), ampx.LossDtypeError, "float"),
    "detached in a dict": (
        lambda model: {"a": scalar(model), "b": scalar(model).detach()},
        ampx.DetachedLossError,
        "detached",
    ),
}


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.usefixtures("untouched")
def test_a_loss_that_cannot_be_scaled_is_refused(kind, model, opt):
    make, error, words = LOSSES[kind]
    with pytest.raises(error, match=words), ampx.scale_loss(make(model), opt):
        pytest.fail("the body ran")


@pytest.mark.usefixtures("untouched")
def test_a_loss_without_gradients_is_refused(model, opt):
    with torch.no_grad():
        loss = scalar(model)
    with pytest.raises(ampx.DetachedLossError), ampx.scale_loss(loss, opt):
        pytest.fail("the body ran")


@pytest.mark.usefixtures("untouched")
def test_an_infinite_loss_is_an_overflow_not_an_error(session, model, backward):
    other = ampx.wrap_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))
    parameter = other.param_groups[0]["params"][0]
    backward(parameter.sum() * INF, other)
    other.step()
    assert not other.last_step.finite
    del other


@pytest.mark.parametrize("option", [{"process_grop": None}, {"device_scale": "yes"}, {"max_grad_norm": -1.0}], ids=str)
@pytest.mark.usefixtures("untouched")
def test_an_option_that_is_not_accepted_is_refused_and_the_optimizer_can_be_wrapped_after(option, session):
    raw = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(ampx.InvalidOptionError):
        session.wrap_optimizer(raw, **option)
    with pytest.raises(ampx.InvalidOptionError, match="fused"):
        session.wrap_optimizer(raw, device_scale=True)
    assert session.wrap_optimizer(raw).optimizer is raw


@pytest.mark.parametrize("named", [False, True], ids=["living module", "names"])
@pytest.mark.usefixtures("untouched")
def test_float16_parameters_are_refused_with_names_and_remedy(named, session):
    half = nn.Linear(2, 1).half()
    parameters = half.named_parameters() if named else half.parameters()
    with pytest.raises(ampx.LowPrecisionParametersError) as caught:
        session.wrap_optimizer(torch.optim.SGD(parameters, lr=1.0))
    assert "weight, bias" in str(caught.value)
    assert "prepare" in str(caught.value)


def test_a_list_with_float16_parameters_leaves_no_hook_on_the_others(session):
    good, half = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, dtype=torch.float16))
    raw = [torch.optim.SGD([parameter], lr=1.0) for parameter in (good, half)]
    with pytest.raises(ampx.LowPrecisionParametersError):
        session.wrap_optimizer(raw)
    assert not raw[0]._optimizer_step_pre_hooks
    assert session.wrap_optimizer(raw[0])


def test_float16_parameters_added_later_are_refused_and_taken_back(session, opt, model, backward, same):
    half = nn.Parameter(torch.ones(1, dtype=torch.float16))
    with pytest.raises(ampx.LowPrecisionParametersError):
        opt.add_param_group({"params": [half]})
    assert len(opt.param_groups) == 1
    opt.optimizer.add_param_group({"params": [half]})  # behind the wrapper's back
    before = copy.deepcopy((model.state_dict(), opt.state_dict()))
    backward(scalar(model) + half.float().sum(), opt)
    with pytest.raises(ampx.LowPrecisionParametersError):
        opt.step()
    assert same((model.state_dict(), opt.state_dict()), before)
    assert half.tolist() == [1.0]


def test_frozen_float16_parameters_and_bfloat16_ones_are_accepted(session):
    frozen = nn.Parameter(torch.ones(1, dtype=torch.float16), requires_grad=False)
    session.wrap_optimizer(torch.optim.SGD([frozen, nn.Parameter(torch.ones(1))], lr=1.0))
    with pytest.warns(ampx.PrecisionWarning, match="level='O2'"):
        session.wrap_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1, dtype=torch.bfloat16))], lr=1.0))


def test_float16_parameters_are_accepted_at_o3(backward):
    ampx.init("torch", dtype="float16", level="O3", process_wide=False)
    parameter = nn.Parameter(torch.ones(2, dtype=torch.float16))
    opt = ampx.wrap_optimizer(torch.optim.SGD([parameter], lr=0.5))
    late = nn.Parameter(torch.ones(1, dtype=torch.float16))
    opt.add_param_group({"params": [late]})
    backward(parameter.sum() + late.sum(), opt)
    opt.step()
    assert parameter.tolist() == [0.5, 0.5]
    assert late.tolist() == [0.5]
