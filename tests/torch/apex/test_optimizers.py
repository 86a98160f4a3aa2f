"""The fused optimizers against their published formulas, written in NumPy in float64."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch

from ampx.errors import AmpxWarning, InvalidOptionError, UnsupportedByBackendError, UnsupportedDtypeError
from ampx_torch.apex import amp_c
from ampx_torch.apex.multi_tensor_apply import multi_tensor_applier
from ampx_torch.apex.optimizers import (
    FP16_Optimizer,
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)

SHAPES = [(3, 4), (5,), (2, 2, 3)]
STEPS = 6
RATE = 0.05


def values(seed):
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(shape) for shape in SHAPES]


def adam(p, g, state, step, *, shared, b1=0.9, b2=0.999, eps=1e-8, wd=0.0, decoupled=True, corrected=True,
         bound=math.inf):  # fmt: skip
    if bound < math.inf:
        g = g * min(bound / (math.sqrt(sum(float((gradient * gradient).sum()) for gradient in shared)) + 1e-6), 1.0)
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
    norm = math.sqrt(sum(float((gradient * gradient).sum()) for gradient in shared))
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
    (FusedAdam, {"max_grad_norm": 0.5, "weight_decay": 0.1}, adam, {"bound": 0.5, "wd": 0.1}),
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
    (FusedMixedPrecisionLamb, {}, lamb, {}),
    (FusedMixedPrecisionLamb, {"reduced_precision_dtype": torch.float16}, lamb, {}),
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
    parameters = [torch.nn.Parameter(torch.tensor(value, dtype=dtype)) for value in values(0)]
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
        assert all(value.dtype == torch.float32 for value in state.values())


@pytest.mark.parametrize(("make", "options", "formula", "settings"), CASES, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_resumed_training_is_the_uninterrupted_one(make, options, formula, settings, dtype):
    whole, _ = train(make, options, dtype)
    resumed, _ = train(make, options, dtype, resume_at=4)
    for own, other in zip(whole, resumed, strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize(("make", "options", "formula", "settings"), CASES, ids=NAMES)
def test_a_copy_steps_as_the_optimizer_does(make, options, formula, settings):
    parameters, opt = train(make, options)
    for copied in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        twins = copied.param_groups[0]["params"]
        for own, twin in zip(parameters, twins, strict=True):
            twin.grad = own.grad.clone()
        copied.step()
        assert not any(torch.equal(own, twin) for own, twin in zip(parameters, twins, strict=True))
    opt.step()
    assert all(torch.equal(own, twin) for own, twin in zip(parameters, twins, strict=True))


def test_masters_keep_updates_that_low_precision_would_lose():
    """The gradient is the same in every step, so that each moves the weights by the rate times their norm."""
    own = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    opt = FusedMixedPrecisionLamb([own], lr=2.0**-12, weight_decay=0.0, reduced_precision_dtype=torch.bfloat16)
    for _ in range(64):
        own.grad = torch.ones(4, dtype=torch.bfloat16)
        opt.step()
    assert own.tolist() == pytest.approx([1 - 2.0**-6] * 4, abs=2.0**-9)


# -- scripts with optimizers of their own that call the kernels --------------------------------------


def own_kernel(kernel):
    """Call a kernel as a copy of apex's optimizer does, with the settings of the formula."""
    decay, buffer = 0.1, torch.zeros(1, dtype=torch.int)

    def call(step, g, p, states):
        m, v = [state["m"] for state in states], [state["v"] for state in states]
        norm = multi_tensor_applier(amp_c.multi_tensor_l2norm, buffer, [g], False)[0]
        unit, count, rate = torch.ones(1), torch.tensor([step], dtype=torch.int), torch.tensor(RATE)
        if kernel == "adam":
            numbers = (RATE, 0.9, 0.999, 1e-8, step, 1, 1, decay)
            multi_tensor_applier(amp_c.multi_tensor_adam, buffer, [g, p, m, v], *numbers)
        elif kernel == "adam_capturable":
            scaled, numbers = [grad * 4 for grad in g], (rate, 0.9, 0.999, 1e-8, count, 1, 1, decay, unit / 4)
            multi_tensor_applier(amp_c.multi_tensor_adam_capturable, buffer, [scaled, p, m, v], *numbers)
            assert all(torch.equal(grad, true) for grad, true in zip(scaled, g, strict=True))
        elif kernel == "adam_capturable_master":
            low, numbers = [own.half() for own in p], (rate, 0.9, 0.999, 1e-8, count, 1, 1, decay, unit)
            multi_tensor_applier(amp_c.multi_tensor_adam_capturable_master, buffer, [g, low, m, v, p], *numbers)
            assert all(torch.equal(own, master.half()) for own, master in zip(low, p, strict=True))
        elif kernel == "adagrad":
            multi_tensor_applier(amp_c.multi_tensor_adagrad, buffer, [g, p, v], RATE, 1e-10, 0, decay)
        elif kernel == "sgd":
            low, numbers = [own.half() for own in p], (decay, 0.9, 0.0, RATE, False, step == 1, False, 0.25)
            multi_tensor_applier(amp_c.multi_tensor_sgd, buffer, [[grad * 4 for grad in g], p, m, low], *numbers)
            assert all(torch.equal(own, master.half()) for own, master in zip(low, p, strict=True))
        elif kernel == "novograd":
            norms = torch.stack([state["n"] for state in states]) if step > 1 else torch.stack([x.norm() for x in g])
            numbers = (RATE, 0.9, 0.999, 1e-8, step, 1, decay, 1, 1, 2)
            multi_tensor_applier(amp_c.multi_tensor_novograd, buffer, [g, p, m], norms, *numbers)
            for state, value in zip(states, norms, strict=True):
                state["n"] = value
        elif kernel == "lamb":
            numbers = (RATE, 0.9, 0.999, 1e-6, step, 1, decay, 1, 1, norm, 1.0, False)
            multi_tensor_applier(amp_c.multi_tensor_lamb, buffer, [g, p, m, v], *numbers)
        elif kernel == "lamb_mp":
            low, scaled = [own.half() for own in p], [grad * 4 for grad in g]
            numbers = (rate, 0.9, 0.999, 1e-6, count, 1, decay, 1, 1, norm * 4, unit * 4, False, unit * 0, unit / 4)
            multi_tensor_applier(amp_c.multi_tensor_lamb_mp, buffer, [scaled, p, m, v, low], *numbers)
            assert all(torch.equal(own, master.half()) for own, master in zip(low, p, strict=True))
        else:
            updates, decays = [torch.empty_like(own) for own in p], torch.full((len(p),), decay)
            lists, numbers = [g, p, m, v, updates], (decays, step - 1, 0.9, 0.999, 1e-6, norm, 1.0)
            multi_tensor_applier(amp_c.multi_tensor_lamb_stage1_cuda, buffer, lists, *numbers)
            own = multi_tensor_applier(amp_c.multi_tensor_l2norm, buffer, [p], True)[1]
            new = multi_tensor_applier(amp_c.multi_tensor_l2norm, buffer, [updates], True)[1]
            multi_tensor_applier(amp_c.multi_tensor_lamb_stage2_cuda, buffer, [p, updates], own, new, RATE, decay)

    return call


KERNELS = {
    "adam": (adam, {"wd": 0.1}),
    "adam_capturable": (adam, {"wd": 0.1}),
    "adam_capturable_master": (adam, {"wd": 0.1}),
    "adagrad": (adagrad, {"wd": 0.1}),
    "sgd": (sgd, {"wd": 0.1, "momentum": 0.9}),
    "novograd": (novograd, {"wd": 0.1}),
    "lamb": (lamb, {"wd": 0.1}),
    "lamb_mp": (lamb, {"wd": 0.1}),
    "lamb_stages": (lamb, {"wd": 0.1}),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_that_a_script_calls_computes_the_published_formula(kernel):
    parameters = [torch.tensor(own, dtype=torch.float32) for own in values(0)]
    states = [{"m": torch.zeros_like(own), "v": torch.zeros_like(own)} for own in parameters]
    call = own_kernel(kernel)
    for step in range(1, STEPS + 1):
        call(step, [torch.tensor(grad, dtype=torch.float32) for grad in values(step)], parameters, states)
    formula, settings = KERNELS[kernel]
    for own, expected in zip(parameters, expect(formula, settings), strict=True):
        np.testing.assert_allclose(own.numpy(), expected, rtol=1e-5, atol=1e-5)  # float32 over 6 steps


def test_kernels_write_low_precision_tensors_and_compute_in_float32():
    own, average, square = (torch.full((2,), value).half() for value in (1.0, 0.0, 0.0))
    lists = [[torch.full((2,), 2.0**-14).half()], [own], [average], [square]]
    amp_c.multi_tensor_adam(0, None, lists, 0.5, 0.5, 0.5, 0.0, 1, 1, 1, 0.0)
    # the square of the gradient, 2**-28, is 0 in float16; the quotient is 1 in float32
    assert (own.tolist(), average.tolist(), square.tolist()) == ([0.5] * 2, [2.0**-15] * 2, [0.0] * 2)


@pytest.mark.parametrize("kernel", ["sgd", "adam_capturable", "lamb_mp"])
def test_kernels_that_look_at_an_overflow_do_nothing_after_one(kernel):
    own, buffer, unit = torch.ones(2), torch.ones(1, dtype=torch.int), torch.ones(1)
    lists = [[torch.full((2,), math.inf)], [own], [torch.zeros(2)], [torch.zeros(2)]]
    if kernel == "sgd":
        amp_c.multi_tensor_sgd(0, buffer, lists[:3], 0.0, 0.0, 0.0, 0.1, False, True, False, 1.0)
    elif kernel == "adam_capturable":
        amp_c.multi_tensor_adam_capturable(0, buffer, lists, unit, 0.9, 0.999, 1e-8, unit, 1, 1, 0.0, unit)
    else:
        numbers = (unit, 0.9, 0.999, 1e-8, unit, 1, 0.0, 1, 1, unit, unit, False, unit, unit)
        amp_c.multi_tensor_lamb_mp(0, buffer, lists, *numbers)
    assert own.tolist() == [1.0, 1.0]


class OwnStep(FusedAdam):
    """As toolkits for sequence models derive theirs: the step computes on float32 copies and calls the kernel."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if not hasattr(self, "multi_tensor_adam"):
            raise RuntimeError("outdated")

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            parameters = group["params"]
            for own in parameters:
                if not self.state[own]:
                    self.state[own]["exp_avg"] = torch.zeros_like(own, dtype=torch.float)
                    self.state[own]["exp_avg_sq"] = torch.zeros_like(own, dtype=torch.float)
            copies = [own.data.float() for own in parameters]
            lists = [
                [own.grad.float() for own in parameters],
                copies,
                [self.state[own]["exp_avg"] for own in parameters],
                [self.state[own]["exp_avg_sq"] for own in parameters],
            ]
            numbers = (group["lr"], *group["betas"], group["eps"], group["step"])
            rest = (self.adam_w_mode, 1 if group["bias_correction"] else 0, group["weight_decay"])
            multi_tensor_applier(self.multi_tensor_adam, self._dummy_overflow_buf, lists, *numbers, *rest)
            for own, copied in zip(parameters, copies, strict=True):
                own.data.copy_(copied)


def test_an_optimizer_that_is_derived_from_ours_finds_its_kernel_and_its_buffer():
    parameters, opt = train(OwnStep, {"weight_decay": 0.1}, torch.float32)
    assert multi_tensor_applier.available
    for own, expected in zip(parameters, expect(adam, {"wd": 0.1}), strict=True):
        np.testing.assert_allclose(own.detach().numpy(), expected, rtol=1e-5, atol=1e-5)
    assert opt._dummy_overflow_buf.item() == 0


def test_the_recipe_of_the_first_bert_scripts_trains_as_the_formula():
    """Half parameters, clipping inside Adam, and the optimizer that early versions had in `apex.optimizers`."""
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.constant_(model.weight, 0.5)
    model.half()
    groups = [{"params": list(model.parameters()), "weight_decay": 0.125}]
    inner = FusedAdam(groups, lr=RATE, bias_correction=False, max_grad_norm=1.0)
    opt = FP16_Optimizer(inner, dynamic_loss_scale=True, verbose=False)
    assert opt.cur_scale == 2.0**16
    exact, state, step = np.full((1, 4), 0.5), {}, 0
    for value in (1.0, math.inf, -2.0, 0.125):
        opt.zero_grad()
        assert model.weight.grad is None
        opt.backward(model(torch.full((1, 4), value, dtype=torch.float16)).float().sum() / 2**4)
        opt.step()
        if value != math.inf:
            gradient, step = np.full((1, 4), value / 2**4), step + 1
            settings = {"wd": 0.125, "corrected": False, "bound": 1.0}
            exact = adam(exact, gradient, state, step, shared=[gradient], **settings)
    (master,) = opt.param_groups[0]["params"]
    np.testing.assert_allclose(master.detach().numpy(), exact, rtol=1e-5)
    assert torch.equal(model.weight, master.half())
    assert opt.cur_scale == 2.0**15


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
