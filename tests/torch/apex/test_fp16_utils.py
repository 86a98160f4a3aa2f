"""The tools from before apex.amp: what they compute, against float32 and float64 references."""

import copy
import importlib
import math
import pickle

import pytest
import torch
from torch import nn

from ampx.errors import InvalidOptionError, InvalidStateError, ProtocolError, UnsupportedDtypeError
from ampx_torch.apex import fp16_utils
from ampx_torch.apex.fp16_utils import DynamicLossScaler, FP16_Optimizer, LossScaler
from ampx_torch.apex.parallel import LARC


def network():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def dtypes(module):
    return {name: parameter.dtype for name, parameter in module.named_parameters()}


def test_a_star_import_gives_the_names_that_scripts_use():
    space = {}
    exec("from ampx_torch.apex.fp16_utils import *", space)
    names = "BN_convert_float network_to_half prep_param_lists model_grads_to_master_grads tofp16 to_python_float"
    more = "master_params_to_model_params clip_grad_norm convert_module convert_network FP16Model FP16_Optimizer"
    assert {*names.split(), *more.split(), "LossScaler", "DynamicLossScaler"} <= space.keys()


def test_names_are_found_in_their_old_modules():
    for module, name in [("fp16util", "network_to_half"), ("loss_scaler", "DynamicLossScaler")]:
        result = getattr(importlib.import_module(f"ampx_torch.apex.fp16_utils.{module}"), name)
        assert result is getattr(fp16_utils, name)


@pytest.mark.parametrize("convert", [fp16_utils.network_to_half, fp16_utils.FP16Model])
def test_a_network_in_half_keeps_its_batch_norms(convert):
    plain = network()
    x = torch.randn(8, 4)
    expected = copy.deepcopy(plain)(x)
    half = convert(plain)
    for name, dtype in dtypes(plain).items():
        assert dtype == (torch.float32 if name.startswith("1.") else torch.float16), name
    assert plain[1].running_mean.dtype == torch.float32
    y = half(x)
    assert y.dtype == torch.float16
    # Sums of at most 6 products of values rounded to 2**-11, through two layers, in magnitudes below 4.
    torch.testing.assert_close(y.float(), expected, atol=2 * 7 * 4 * 2.0**-11, rtol=0)


def test_a_batch_norm_without_parameters_is_converted_too():
    norm = nn.BatchNorm1d(6, affine=False)
    fp16_utils.convert_network(norm, torch.float16)
    assert norm.running_mean.dtype == torch.float16
    assert fp16_utils.BN_convert_float(norm).running_mean.dtype == torch.float16


def test_converting_keeps_gradients_integers_and_children():
    outer = nn.Sequential(nn.Linear(2, 2))
    outer.register_buffer("count", torch.tensor(3))
    outer[0].weight.grad = torch.ones(2, 2)
    fp16_utils.convert_module(outer, torch.float16)
    assert outer[0].weight.dtype == torch.float32
    fp16_utils.convert_network(outer, torch.float16)
    assert outer[0].weight.dtype == outer[0].weight.grad.dtype == torch.float16
    assert outer.count.dtype == torch.int64
    rnn = fp16_utils.convert_network(nn.LSTM(2, 3), torch.float16)
    assert set(dtypes(rnn).values()) == {torch.float16}


@pytest.mark.parametrize("flat", [False, True])
def test_masters_by_hand_train_like_float32(flat):
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    model.weight.data, model.bias.data = model.weight.data.half().float(), model.bias.data.half().float()
    reference = copy.deepcopy(model)
    half = model.half()
    parameters, masters = fp16_utils.prep_param_lists(half, flat_master=flat)
    assert len(masters) == (1 if flat else 2)
    assert all(master.dtype == torch.float32 and master.is_leaf for master in masters)
    opt, plain = torch.optim.SGD(masters, lr=0.1), torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(5):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        half.zero_grad()
        half(x.half()).float().square().mean().backward()
        fp16_utils.model_grads_to_master_grads(parameters, masters, flat_master=flat)
        opt.step()
        fp16_utils.master_params_to_model_params(parameters, masters, flat_master=flat)
        plain.zero_grad()
        reference(x).square().mean().backward()
        plain.step()
    values = torch.cat([master.detach().reshape(-1) for master in masters])
    expected = torch.cat([parameter.detach().reshape(-1) for parameter in reference.parameters()])
    # 5 steps of 0.1 times a gradient of magnitude below 4, whose factors are rounded to 2**-11 a few times.
    torch.testing.assert_close(values, expected, atol=5 * 0.1 * 4 * 8 * 2.0**-11, rtol=0)
    rounded = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    assert torch.equal(rounded, values.half())


def test_a_missing_gradient_is_missing_in_the_master():
    model = nn.Linear(2, 2).half()
    parameters, masters = fp16_utils.prep_param_lists(model)
    masters[0].grad = torch.ones(2, 2)
    fp16_utils.model_grads_to_master_grads(parameters, masters)
    assert masters[0].grad is None
    parameters, masters = fp16_utils.prep_param_lists(model, flat_master=True)
    with pytest.raises(ProtocolError, match="2 parameters without a gradient"):
        fp16_utils.model_grads_to_master_grads(parameters, masters, flat_master=True)


def test_one_flat_master_needs_one_dtype():
    with pytest.raises(InvalidOptionError, match=r"float16.*float32.*flat_master=False"):
        fp16_utils.prep_param_lists(fp16_utils.network_to_half(network()), flat_master=True)


def test_numbers_come_out_of_tensors():
    assert fp16_utils.to_python_float(torch.tensor(2.5)) == 2.5
    assert fp16_utils.to_python_float([2.5]) == 2.5


def trace(scaler, overflows):
    result = []
    for overflow in overflows:
        scaler.update_scale(overflow)
        result.append(scaler.loss_scale)
    return result


def apex_trace(scale, factor, window, overflows):
    """The rule as apex states it: count iterations since the last overflow."""
    result, last = [], -1
    for index, overflow in enumerate(overflows):
        if overflow:
            scale, last = max(scale / factor, 1.0), index
        elif (index - last) % window == 0:
            scale *= factor
        result.append(scale)
    return result


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_the_dynamic_scale_moves_by_the_rule_of_apex(window, factor):
    generator = torch.Generator().manual_seed(window)
    overflows = (torch.rand(60, generator=generator) < 0.4).tolist()
    assert trace(DynamicLossScaler(2.0**6, factor, window), overflows) == apex_trace(2.0**6, factor, window, overflows)


def test_the_dynamic_scale_starts_high_and_stays_a_number():
    assert DynamicLossScaler().loss_scale == 2.0**32
    assert trace(DynamicLossScaler(2.0**126, 2.0, 1), [False] * 3) == [2.0**127] * 3


def test_a_static_scale_stays():
    assert trace(LossScaler(128.0), [True, False]) == [128.0, 128.0]
    with pytest.raises(InvalidOptionError):
        LossScaler(0)


@pytest.mark.parametrize("make", [LossScaler, DynamicLossScaler])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_overflow_is_seen(make, bad):
    good, empty = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    good.grad = torch.tensor([3e38, 3e38])  # finite, though its sum is not
    assert not make().has_overflow([good, empty])
    assert not make().has_overflow([empty])
    good.grad[1] = bad
    assert make().has_overflow(iter([empty, good]))


def test_a_scaler_scales_losses_and_gradients():
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    LossScaler(8.0).backward(parameter.square().sum())
    assert parameter.grad.tolist() == [16.0, 32.0]
    assert LossScaler(8.0).scale_gradient(None, (None, torch.tensor(2.0)), ())[1].item() == 16.0


def test_a_scaler_pickled_by_apex_is_read():
    scaler = DynamicLossScaler.__new__(DynamicLossScaler)
    scaler.__setstate__(
        {"cur_scale": 64.0, "cur_iter": 10, "last_overflow_iter": 7, "scale_factor": 2.0, "scale_window": 4}
    )
    # Iterations 8 and 9 were finite; 10 and 11 complete the four.
    assert trace(scaler, [False, False, False]) == [64.0, 128.0, 128.0]
    again = pickle.loads(pickle.dumps(scaler))
    assert (again.cur_scale, again.cur_iter, again.last_overflow_iter) == (128.0, 13, 7)
    assert trace(again, [False] * 3) == [128.0, 128.0, 256.0]


def half_of(value):
    return nn.Parameter(torch.tensor(value, dtype=torch.float16))


def make(**options):
    low, full = half_of([1.0, 2.0]), nn.Parameter(torch.tensor([3.0]))
    opt = FP16_Optimizer(torch.optim.SGD([low, full], lr=0.5, momentum=0.5), verbose=False, **options)
    return low, full, opt


def loss_of(low, full, factor=1.0):
    return (low.float().square().sum() + full.square().sum()) * factor


@pytest.mark.parametrize("options", [{"static_loss_scale": 128.0}, {"dynamic_loss_scale": True}, {}])
def test_steps_are_those_of_float32(options):
    options.setdefault("dynamic_loss_args", {"init_scale": 2.0**8} if "dynamic_loss_scale" in options else None)
    low, full, opt = make(**options)
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    plain = torch.optim.SGD([values], lr=0.5, momentum=0.5)
    for _ in range(4):
        opt.zero_grad()
        opt.backward(loss_of(low, full))
        opt.step()
        plain.zero_grad()
        values.square().sum().backward()
        plain.step()
    # Small integers over powers of two: exact in float16 and float32.
    assert [*low.tolist(), *full.tolist()] == values.tolist()


def test_several_backwards_add_up_for_every_parameter():
    for update in (True, False):
        low, full, opt = make(static_loss_scale=128.0)
        opt.backward(loss_of(low, full), update_master_grads=update)
        opt.backward(loss_of(low, full), update_master_grads=update)
        if not update:
            opt.update_master_grads()
        assert [item.tolist() for item in opt.inspect_master_grad_data()[0]] == [[4.0, 8.0], [12.0]]


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_overflow_skips_the_step(dynamic, capsys):
    low, full, opt = make(dynamic_loss_scale=dynamic, dynamic_loss_args={"init_scale": 4.0}, static_loss_scale=4.0)
    opt.verbose = True
    opt.backward(loss_of(low, full, math.inf))
    assert opt.overflow
    assert opt.clip_master_grads(1.0) == -1
    capsys.readouterr()
    assert opt.inspect_master_grad_data() is None
    assert "overflowed" in capsys.readouterr().out
    opt.step()
    assert (low.tolist(), full.tolist()) == ([1.0, 2.0], [3.0])
    assert not opt.state
    assert opt.loss_scale == (2.0 if dynamic else 4.0)
    assert "OVERFLOW" in capsys.readouterr().out
    opt.zero_grad()
    opt.backward(loss_of(low, full))
    opt.step()
    assert (low.tolist(), full.tolist()) == ([0.0, 0.0], [0.0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_with_a_scale_below_1_the_true_gradient_counts(dtype):
    weight = nn.Parameter(torch.zeros(2, dtype=dtype))
    optimizer = FP16_Optimizer(torch.optim.SGD([weight], lr=2.0**-110), static_loss_scale=2.0**-120, verbose=False)
    for size, overflow in ((2.0**10, True), (2.0**-10, False)):  # 2**130 is beyond float32
        optimizer.zero_grad()
        optimizer.backward((weight.float() * size * 2.0**120).sum())
        assert optimizer.overflow == overflow
        optimizer.step()
        assert weight.isfinite().all()


def test_clipping_is_that_of_the_true_gradients():
    low, full, opt = make(static_loss_scale=128.0)
    opt.backward(loss_of(low, full))
    assert opt.clip_master_grads(1.0).item() == pytest.approx(math.sqrt(4 + 16 + 36), rel=1e-6)  # float32
    clipped = torch.cat([parameter.grad for group in opt.param_groups for parameter in group["params"]])
    assert clipped.norm().item() == pytest.approx(1.0, abs=1e-5)  # torch divides by the norm + 1e-6


def test_zero_grad_zeroes_or_drops():
    low, full, opt = make()
    opt.backward(loss_of(low, full))
    opt.zero_grad()
    assert low.grad.tolist() == [0.0, 0.0]
    opt.zero_grad(set_grads_to_None=True)
    assert low.grad is full.grad is opt.param_groups[0]["params"][0].grad is None
    with pytest.raises(InvalidOptionError, match="set_to_none"):
        opt.zero_grad(set_to_none=True)


def test_the_loss_scale_can_be_set():
    low, full, opt = make()
    opt.loss_scale = 16.0
    opt.backward(loss_of(low, full))
    assert low.grad.tolist() == [32.0, 64.0]
    assert opt.param_groups[0]["params"][0].grad.tolist() == [2.0, 4.0]


def test_a_closure_is_repeated_at_lower_scales():
    low, full, opt = make(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**16})
    calls = []

    def closure():
        calls.append(opt.loss_scale)
        opt.zero_grad()
        loss = loss_of(low, full, 0.5)
        opt.backward(loss)  # float16 holds at most 65504: the gradient 2 fits at 2**14
        return loss

    opt.step(closure)
    assert calls == [2.0**16, 2.0**15, 2.0**14]
    assert (low.tolist(), full.tolist()) == ([0.5, 1.0], [1.5])


def test_a_closure_that_always_overflows_ends_with_an_error():
    low, full, opt = make(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 4.0})

    def closure():
        loss = loss_of(low, full, math.inf)
        opt.backward(loss)
        return loss

    with pytest.raises(ProtocolError, match="loss scale of 1 that cannot fall"):
        opt.step(closure)
    assert low.tolist() == [1.0, 2.0]


def test_a_state_survives_a_file_that_holds_nothing_but_tensors_and_numbers(tmp_path):
    low, full, opt = make(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 8.0, "scale_window": 3})
    for factor in (0.3, math.inf, 0.3):
        opt.zero_grad()
        opt.backward(loss_of(low, full, factor))
        opt.step()
    torch.save(opt.state_dict(), tmp_path / "state.pth")
    other_low, other_full, other = make()
    other_low.data, other_full.data = low.data.clone(), full.data.clone()
    other.load_state_dict(torch.load(tmp_path / "state.pth", weights_only=True))
    for _ in range(4):
        for optimizer, parts in ((opt, (low, full)), (other, (other_low, other_full))):
            optimizer.zero_grad()
            optimizer.backward(loss_of(*parts, 0.3))
            optimizer.step()
        assert torch.equal(low, other_low)
        assert torch.equal(full, other_full)
        assert torch.equal(opt.param_groups[0]["params"][0], other.param_groups[0]["params"][0])
        assert opt.loss_scale == other.loss_scale


def test_a_state_of_apex_holds_the_scaler_itself():
    _, _, opt = make(dynamic_loss_scale=True)
    state = {**opt.state_dict(), "loss_scaler": DynamicLossScaler(64.0)}
    opt.load_state_dict(state)
    assert opt.loss_scale == 64.0


def test_a_state_of_another_model_is_refused():
    _, _, opt = make()
    other = FP16_Optimizer(torch.optim.SGD([half_of([1.0])], lr=0.1))
    with pytest.raises(InvalidStateError, match=r"\[\(1,\)\].*accepted: \[\(2,\)\]"):
        opt.load_state_dict(other.state_dict())


def test_pickling_points_to_state_dict():
    with pytest.raises(ProtocolError, match="state_dict"):
        pickle.dumps(make()[2])


def test_other_dtypes_are_refused_before_anything_changes():
    low, double = half_of([1.0]), nn.Parameter(torch.ones(1, dtype=torch.float64))
    plain = torch.optim.SGD([low, double], lr=0.1)
    with pytest.raises(UnsupportedDtypeError, match="float64"):
        FP16_Optimizer(plain)
    assert plain.param_groups[0]["params"] == [low, double]


def test_it_wraps_larc():
    low = half_of([3.0, 4.0])
    opt = FP16_Optimizer(LARC(torch.optim.SGD([low], lr=1.0), trust_coefficient=0.5, clip=False), static_loss_scale=8.0)
    opt.backward(low.float().sum())
    opt.step()
    # Weight norm 5, gradient norm sqrt(2): the rate is 0.5 * 5 / sqrt(2), and both gradients are 1.
    expected = torch.tensor([3.0, 4.0]) - 2.5 / math.sqrt(2)
    torch.testing.assert_close(low.float(), expected, atol=2.0**-9, rtol=0)  # rounded to float16 below 4
