"""`wrap_optimizer(opt, fused="auto")` gives what the same optimizer made with fused=True gives."""

import copy

import pytest
import torch
from torch import nn

import ampx

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"foreach": True}),
    "adagrad": (torch.optim.Adagrad, {}),
}


def make(optimizer, **options):
    cls, own = OPTIMIZERS[optimizer]
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))]
    return parameters, cls([{"params": [parameter]} for parameter in parameters], lr=0.1, **{**own, **options})


def train(parameters, opt, steps, scale=ampx.scale_loss):
    for step in range(steps):
        opt.zero_grad()
        torch.manual_seed(step)
        with scale(sum((parameter * torch.randn_like(parameter)).sum() for parameter in parameters), opt) as scaled:
            scaled.backward()
        opt.step()


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_as_with_a_fused_optimizer_that_took_over_the_state(optimizer, before, amp, same):
    parameters, raw = make(optimizer)
    for step in range(before):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.5 + step)
        raw.step()
    others, fused = make(optimizer, fused=True, foreach=None)
    with torch.no_grad():
        torch._foreach_copy_(others, parameters)
    state = copy.deepcopy(raw.state_dict())
    for group in state["param_groups"]:
        group["fused"], group["foreach"] = True, None
    fused.load_state_dict(state)
    opt = ampx.wrap_optimizer(raw, fused="auto")
    train(parameters, opt, 3)
    train(others, ampx.wrap_optimizer(fused), 3)
    assert same([parameter.detach() for parameter in parameters], [parameter.detach() for parameter in others])
    assert same(raw.state_dict()["state"], fused.state_dict()["state"])
    assert raw._step_supports_amp_scaling
    # It works by hand too, and a group that joins later is fused as the others.
    raw.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert all(group["fused"] and not group["foreach"] for group in raw.param_groups)


def test_nothing_is_chosen_unless_asked(amp):
    _, raw = make("adam")
    ampx.wrap_optimizer(raw)
    assert raw.param_groups[0]["fused"] is None


def test_a_disabled_session_changes_nothing():
    ampx.init("torch", enabled=False)
    _, raw = make("adam")
    ampx.wrap_optimizer(raw, fused="auto")
    assert raw.param_groups[0]["fused"] is None


class Custom(torch.optim.SGD):
    """A subclass: it may look at gradients, or at one parameter after the other."""


@pytest.mark.parametrize(
    ("make_raw", "named"),
    [
        (lambda p: torch.optim.RMSprop([p]), "RMSprop"),
        (lambda p: Custom([p]), "Custom"),
        (lambda p: torch.optim.LBFGS([p]), "LBFGS"),
        (lambda p: torch.optim.SGD([p], differentiable=True), "differentiable"),
        (lambda p: torch.optim.Adam([nn.Parameter(torch.ones(2, dtype=torch.complex64))]), "complex64"),
        (lambda p: torch.optim.Adam([nn.Parameter(torch.ones(2, device="meta"))]), "meta"),
    ],
    ids=["RMSprop", "subclass", "LBFGS", "differentiable", "complex", "meta"],
)
def test_what_cannot_be_fused_is_refused_and_left_as_it_was(make_raw, named, amp):
    raw = make_raw(nn.Parameter(torch.ones(2)))
    before = copy.deepcopy(raw.defaults)
    with pytest.raises(ampx.InvalidOptionError, match=f"(?s){named}.*accepted: Adam.*Leave fused out"):
        ampx.wrap_optimizer(raw, fused="auto")
    assert raw.defaults == before
    ampx.wrap_optimizer(raw)


def test_another_value_is_refused(amp):
    with pytest.raises(ampx.InvalidOptionError, match="fused=True is not a choice"):
        ampx.wrap_optimizer(make("adam")[1], fused=True)


def test_a_list_is_fused_as_a_whole_or_not_at_all(amp):
    _, good = make("adam")
    for parameter in good.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    good.step()
    before = copy.deepcopy(good.state_dict())
    with pytest.raises(ampx.InvalidOptionError):
        ampx.wrap_optimizer([good, torch.optim.RMSprop([nn.Parameter(torch.ones(1))])], fused="auto")
    assert good.state_dict()["param_groups"] == before["param_groups"]
    assert not hasattr(good, "_step_supports_amp_scaling")
    assert len(ampx.wrap_optimizer([good, make("sgd")[1]], fused="auto")) == 2


def test_a_checkpoint_of_an_optimizer_that_was_not_fused_loads_and_stays_fused(amp, same):
    parameters, raw = make("adamw")
    opt = ampx.wrap_optimizer(raw, fused="auto", device_scale=True)
    train(parameters, opt, 2)
    saved = copy.deepcopy(opt.state_dict())
    for group in saved["param_groups"]:
        group["fused"], group["foreach"] = None, True
    opt.load_state_dict(saved)
    assert all(group["fused"] for group in raw.param_groups)
    assert opt.on_device
    train(parameters, opt, 1)
    assert opt.last_step.applied


def test_copies_stay_fused(amp):
    parameters, raw = make("adamw")
    copied_parameters, copied = copy.deepcopy((parameters, ampx.wrap_optimizer(raw, fused="auto")))
    train(copied_parameters, copied, 1)
    assert all(group["fused"] for group in copied.param_groups)


def fused_sgd_leaves_16_bits_alone():
    """Whether PyTorch has the defect."""
    parameter = nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.5, fused=True).step()
    return bool((parameter == 1.0).all())


def wrap_after_prepare(model, raw, **options):
    return ampx.wrap_optimizer(ampx.prepare(model, raw)[1], **options)


def prepare_after_wrap(model, raw, **options):
    return ampx.prepare(model, ampx.wrap_optimizer(raw, **options))[1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("start", [wrap_after_prepare, prepare_after_wrap])
@pytest.mark.parametrize("chosen", ["made so", "auto"])
def test_fused_sgd_trains_16_bits_on_a_cpu_or_is_refused(dtype, start, chosen):
    """Its kernel stores nothing of whole vectors: the loss stands still, and nobody says anything."""
    ampx.init("torch", dtype=dtype, level="O3", device="cpu")
    model = nn.Linear(16, 1, bias=False)
    raw = torch.optim.SGD(model.parameters(), lr=0.5, fused=True if chosen == "made so" else None)
    options = {} if chosen == "made so" else {"fused": "auto"}
    if fused_sgd_leaves_16_bits_alone():
        with pytest.raises(ampx.UnsupportedByBackendError, match="fused=False"):
            start(model, raw, **options)
        raw = torch.optim.SGD(model.parameters(), lr=0.5)
        options = {}
    opt = start(model, raw, **options)
    before = model.weight.detach().clone()
    with ampx.scale_loss(model(torch.ones(1, 16)).sum(), opt) as scaled:
        scaled.backward()
    opt.step()
    assert bool((model.weight != before).all())


def test_fused_sgd_of_master_weights_is_float32_s(amp):
    ampx.init("torch", dtype="bfloat16", level="O2", device="cpu")
    model = nn.Linear(16, 1, bias=False)
    opt = wrap_after_prepare(model, torch.optim.SGD(model.parameters(), lr=0.5, fused=True))
    before = model.weight.detach().clone()
    with ampx.scale_loss(model(torch.ones(1, 16)).sum(), opt) as scaled:
        scaled.backward()
    opt.step()
    assert bool((model.weight != before).all())
