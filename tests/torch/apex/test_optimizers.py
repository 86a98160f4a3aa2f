"""The fused optimizers against their published formulas, written in NumPy in float64."""

import math

import numpy as np
import pytest
import torch

from ampx.errors import AmpxWarning, InvalidOptionError, UnsupportedByBackendError, UnsupportedDtypeError
from ampx_torch.apex.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

SHAPES = [(3, 4), (5,), (2, 2, 3)]
STEPS = 6
RATE = 0.05


def values(seed):
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(shape) for shape in SHAPES]


def adam(p, g, state, step, *, shared, b1=0.9, b2=0.999, eps=1e-8, wd=0.0, decoupled=True, corrected=True):
    g = g + (0 if decoupled else wd) * p
    state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * g
    state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * g * g
    m, v = state["m"], state["v"]
    if corrected:
        m, v = m / (1 - b1**step), v / (1 - b2**step)
    return p - RATE * (m / (np.sqrt(v) + eps) + (wd * p if decoupled else 0))


def sgd(p, g, state, step, *, shared, momentum=0.0, damp=0.0, wd=0.0, nesterov=False, after=False):
    g = g if after else g + wd * p
    if momentum:
        state["b"] = momentum * state["b"] + (1 - damp) * g if "b" in state else g
        g = g + momentum * state["b"] if nesterov else state["b"]
    return p - RATE * (g + wd * p if after else g)


def adagrad(p, g, state, step, *, shared, eps=1e-10, wd=0.0, decoupled=False):
    g = g if decoupled else g + wd * p
    state["h"] = state.get("h", 0.0) + g * g
    return p - RATE * (g / (np.sqrt(state["h"]) + eps) + (wd * p if decoupled else 0))


def lamb(p, g, state, step, *, shared, b1=0.9, b2=0.999, eps=1e-6, wd=0.01, decoupled=True, corrected=True,
         averaging=True, bound=1.0, always=False):  # fmt: skip
    norm = math.sqrt(sum(float((one * one).sum()) for one in shared))
    g = g / max(norm / bound, 1.0)
    g = g + (0 if decoupled else wd) * p
    state["m"] = b1 * state.get("m", 0.0) + (1 - b1 if averaging else 1) * g
    state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * g * g
    m, v = state["m"], state["v"]
    if corrected:
        m, v = m / (1 - b1**step), v / (1 - b2**step)
    update = m / (np.sqrt(v) + eps) + (wd * p if decoupled else 0)
    ratio = 1.0
    if wd or always:
        own, new = np.linalg.norm(p), np.linalg.norm(update)
        ratio = own / new if own and new else 1.0
    return p - RATE * ratio * update


def novograd(p, g, state, step, *, shared, b1=0.9, b2=0.999, eps=1e-8, wd=0.0, inside=False, averaging=True, norm=2,
             zero=False, corrected=True):  # fmt: skip
    size = np.linalg.norm(g) if norm == 2 else np.abs(g).max()
    before = state.get("n", 0.0 if zero else size)
    state["n"] = math.sqrt(b2 * before**2 + (1 - b2) * size**2) if norm == 2 else b2 * before + (1 - b2) * size
    c1, c2 = (1 - b1**step, math.sqrt(1 - b2**step)) if corrected else (1, 1)
    denominator = state["n"] / c2 + eps
    entering = 1 - b1 if averaging else 1
    if inside:
        state["m"] = b1 * state.get("m", 0.0) + entering * (g / denominator + wd * p)
        return p - RATE * state["m"] / c1
    state["m"] = b1 * state.get("m", 0.0) + entering * g
    return p - RATE * (state["m"] / c1 / denominator + wd * p)


CASES = [
    (FusedAdam, {}, adam, {}),
    (FusedAdam, {"weight_decay": 0.1}, adam, {"wd": 0.1}),
    (FusedAdam, {"weight_decay": 0.1, "adam_w_mode": False}, adam, {"wd": 0.1, "decoupled": False}),
    (FusedAdam, {"weight_decay": 0.1, "bias_correction": False}, adam, {"wd": 0.1, "corrected": False}),
    (
        FusedAdam,
        {"weight_decay": 0.1, "bias_correction": False, "adam_w_mode": False, "betas": (0.8, 0.9), "eps": 1e-3},
        adam,
        {"wd": 0.1, "corrected": False, "decoupled": False, "b1": 0.8, "b2": 0.9, "eps": 1e-3},
    ),
    (FusedSGD, {}, sgd, {}),
    (FusedSGD, {"momentum": 0.9, "weight_decay": 0.1}, sgd, {"momentum": 0.9, "wd": 0.1}),
    (
        FusedSGD,
        {"momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": True},
        sgd,
        {"momentum": 0.9, "wd": 0.1, "after": True},
    ),
    (FusedSGD, {"momentum": 0.9, "nesterov": True}, sgd, {"momentum": 0.9, "nesterov": True}),
    (FusedSGD, {"momentum": 0.9, "dampening": 0.5}, sgd, {"momentum": 0.9, "damp": 0.5}),
    (FusedAdagrad, {"weight_decay": 0.1}, adagrad, {"wd": 0.1}),
    (FusedAdagrad, {"weight_decay": 0.1, "adagrad_w_mode": True}, adagrad, {"wd": 0.1, "decoupled": True}),
    (FusedLAMB, {}, lamb, {}),
    (FusedLAMB, {"weight_decay": 0.0}, lamb, {"wd": 0.0}),
    (FusedLAMB, {"weight_decay": 0.0, "use_nvlamb": True}, lamb, {"wd": 0.0, "always": True}),
    (
        FusedLAMB,
        {"adam_w_mode": False, "grad_averaging": False, "max_grad_norm": 100.0, "bias_correction": False},
        lamb,
        {"decoupled": False, "averaging": False, "bound": 100.0, "corrected": False},
    ),
    # Without decay no ratio divides a constant factor of the update out.
    (FusedLAMB, {"weight_decay": 0.0, "grad_averaging": False}, lamb, {"wd": 0.0, "averaging": False}),
    (FusedNovoGrad, {"weight_decay": 0.1}, novograd, {"wd": 0.1}),
    (
        FusedNovoGrad,
        {"weight_decay": 0.1, "reg_inside_moment": True, "init_zero": True, "grad_averaging": False},
        novograd,
        {"wd": 0.1, "inside": True, "zero": True, "averaging": False},
    ),
    (FusedNovoGrad, {"norm_type": 0, "bias_correction": False}, novograd, {"norm": 0, "corrected": False}),
]
NAMES = [f"{case[0].__name__}-{'-'.join(case[1]) or 'defaults'}" for case in CASES]


def train(make, options, dtype=torch.float64, steps=STEPS, resume_at=None):
    parameters = [torch.nn.Parameter(torch.tensor(one, dtype=dtype)) for one in values(0)]
    opt = make(parameters, lr=RATE, **options)
    for step in range(1, steps + 1):
        for own, grad in zip(parameters, values(step), strict=True):
            own.grad = torch.tensor(grad, dtype=dtype)
        if step == resume_at:
            fresh = make(parameters, lr=RATE, **options)
            fresh.load_state_dict(opt.state_dict())
            opt = fresh
        opt.step()
    return parameters, opt


def expect(formula, options, steps=STEPS):
    parameters, states = values(0), [{} for _ in SHAPES]
    for step in range(1, steps + 1):
        gradients = values(step)
        parameters = [
            formula(p, g, state, step, shared=gradients, **options)
            for p, g, state in zip(parameters, gradients, states, strict=True)
        ]
    return parameters


@pytest.mark.parametrize(("make", "options", "formula", "settings"), CASES, ids=NAMES)
def test_computes_the_published_formula(make, options, formula, settings):
    parameters, _ = train(make, options)
    for own, expected in zip(parameters, expect(formula, settings), strict=True):
        # Both compute in float64; their sums differ in order, and 6 steps of values near 1 lose a few last bits.
        np.testing.assert_allclose(own.detach().numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("make", "options", "formula", "settings"), CASES, ids=NAMES)
def test_float16_parameters_lose_one_rounding_a_step(make, options, formula, settings):
    parameters, opt = train(make, options, torch.float16)
    for own, expected in zip(parameters, expect(formula, settings), strict=True):
        assert own.dtype == torch.float16
        # Values below 4 are off by at most 2**-10 after a rounding; so is each gradient. A step adds such an error,
        # changed by at most a factor of two through the momentum (0.9 over 6 steps reaches 1 / (1 - 0.9) only later).
        np.testing.assert_allclose(own.detach().float().numpy(), expected, atol=2 * STEPS * 2.0**-10)
    for state in opt.state.values():
        assert all(one.dtype == torch.float32 for one in state.values())


@pytest.mark.parametrize(("make", "options", "formula", "settings"), CASES, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_resumed_training_is_the_uninterrupted_one(make, options, formula, settings, dtype):
    whole, _ = train(make, options, dtype)
    resumed, _ = train(make, options, dtype, resume_at=4)
    for one, other in zip(whole, resumed, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("make", [FusedAdam, FusedSGD, FusedAdagrad, FusedLAMB, FusedNovoGrad])
def test_parameters_without_a_gradient_stay(make):
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    opt = make([used, unused], lr=RATE)
    used.grad = torch.ones(2)
    opt.step()
    assert torch.equal(unused, torch.ones(2))
    assert not torch.equal(used, torch.ones(2))
    assert isinstance(opt, torch.optim.Optimizer)


def test_a_parameter_that_comes_later_starts_its_momentum_then():
    early, late = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    opt = FusedSGD([early, late], lr=0.5, momentum=0.5)
    early.grad = torch.ones(2)
    opt.step()
    late.grad = torch.ones(2)
    opt.step()
    assert early.tolist() == [1 - 0.5 - 0.5 * 1.5] * 2
    assert late.tolist() == [0.5] * 2


def test_a_checkpoint_of_apex_loads():
    parameter = torch.nn.Parameter(torch.ones(2))
    opt = FusedAdam([parameter], lr=RATE)
    group = {"lr": RATE, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "step": 7}
    average, square = torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.4])
    saved = {"exp_avg": average.clone(), "exp_avg_sq": square.clone()}  # torch loads tensors without a copy
    opt.load_state_dict({"state": {0: saved}, "param_groups": [{**group, "params": [0]}]})
    parameter.grad = torch.full((2,), 0.5)
    opt.step()
    for index in range(2):
        state = {"m": average[index].item(), "v": square[index].item()}
        expected = adam(1.0, 0.5, state, 8, shared=None)
        assert parameter[index].item() == pytest.approx(expected, rel=1e-6)  # float32: a few of 2**-24


def test_a_novograd_checkpoint_of_apex_loads():
    parameter = torch.nn.Parameter(torch.ones(2))
    opt = FusedNovoGrad([parameter], lr=RATE)
    group = {**opt.param_groups[0], "step": 3, "exp_avg_sq": [torch.empty(0), torch.tensor([2.0])], "params": [0]}
    opt.load_state_dict({"state": {0: {"exp_avg": torch.full((2,), 0.1)}}, "param_groups": [group]})
    parameter.grad = torch.tensor([0.3, 0.4])
    opt.step()
    for index, grad in enumerate((0.3, 0.4)):
        norm = math.sqrt(0.999 * 4 + 0.001 * 0.25) / math.sqrt(1 - 0.999**4)
        expected = 1 - RATE * (0.09 + 0.1 * grad) / (1 - 0.9**4) / norm
        assert parameter[index].item() == pytest.approx(expected, rel=1e-6)  # float32: a few of 2**-24
    assert "exp_avg_sq" not in opt.param_groups[0]


def test_zero_grad_does_what_set_grad_none_says():
    parameter = torch.nn.Parameter(torch.ones(2))
    for set_grad_none in (True, False):
        opt = FusedAdam([parameter], set_grad_none=set_grad_none)
        parameter.grad = torch.ones(2)
        opt.zero_grad()
        assert (parameter.grad is None) == set_grad_none


def test_a_closure_is_run_with_gradients():
    parameter = torch.nn.Parameter(torch.tensor([3.0]))
    opt = FusedSGD([parameter], lr=0.5)

    def closure():
        opt.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert opt.step(closure).item() == 9.0
    assert parameter.item() == 3.0 - 0.5 * 6.0


@pytest.mark.parametrize("make", [FusedAdam, FusedLAMB, FusedNovoGrad])
def test_amsgrad_is_refused(make):
    with pytest.raises(UnsupportedByBackendError, match=r"amsgrad=True.*accepted: False"):
        make([torch.nn.Parameter(torch.ones(2))], amsgrad=True)


@pytest.mark.parametrize("option", ["capturable", "master_weights"])
def test_what_cannot_be_honoured_is_refused(option):
    with pytest.raises(UnsupportedByBackendError, match=option):
        FusedAdam([torch.nn.Parameter(torch.ones(2))], **{option: True})


def test_arguments_of_early_steps_are_refused():
    opt = FusedAdam([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(RuntimeError, match=r"FusedAdam.step\(\)"):  # the type that apex raised
        opt.step(grads=[torch.ones(2)])


def test_master_gradients_are_made_in_any_case():
    with pytest.warns(AmpxWarning, match="materialize_master_grads"):
        FusedSGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, materialize_master_grads=False)


def test_sgd_takes_the_learning_rates_of_its_groups():
    own, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    opt = FusedSGD([{"params": [own], "lr": 0.5}, {"params": [other], "lr": 0.25}], momentum=0.9)
    own.grad = other.grad = torch.ones(2)
    opt.step()
    assert (own.tolist(), other.tolist()) == ([0.5, 0.5], [0.75, 0.75])
    with pytest.raises(ValueError, match="lr"):
        FusedSGD([{"params": [own], "lr": 0.5}, {"params": [other]}])


@pytest.mark.parametrize(
    "options",
    [{"lr": -1.0}, {"lr": 0.1, "momentum": -1}, {"lr": 0.1, "weight_decay": -1}, {"lr": 0.1, "nesterov": True}],
)
def test_values_out_of_range_are_refused(options):
    with pytest.raises(InvalidOptionError, match="accepted"):
        FusedSGD([torch.nn.Parameter(torch.ones(2))], **options)


def test_an_unknown_norm_is_refused():
    with pytest.raises(InvalidOptionError, match="norm_type=1"):
        FusedNovoGrad([torch.nn.Parameter(torch.ones(2))], norm_type=1)


def test_a_refused_gradient_leaves_everything():
    dense, sparse = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    opt = FusedAdam([dense, sparse])
    dense.grad, sparse.grad = torch.ones(2), torch.ones(2).to_sparse()
    with pytest.raises(UnsupportedByBackendError, match="sparse"):
        opt.step()
    complex_one = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    opt.add_param_group({"params": [complex_one]})
    sparse.grad, complex_one.grad = None, torch.ones(2, dtype=torch.complex64)
    with pytest.raises(UnsupportedDtypeError, match="complex64"):
        opt.step()
    assert torch.equal(dense, torch.ones(2))
    assert not opt.state
    assert "step" not in opt.param_groups[0]
