"""Training patterns: accumulation, several optimizers, groups, clipping, frozen and missing gradients."""

import copy
import warnings
import weakref

import pytest
import torch
from torch import nn

import ampx

INF = float("inf")


def parameter_and_optimizer(cls=torch.optim.SGD, **options):
    parameter = nn.Parameter(torch.ones(2))
    return parameter, cls([parameter], lr=1.0, **options)


def growth_tracker(amp, opt):
    return amp.state_dict(opt)["groups"][0]["losses"][0]["growth_tracker"]


# -- no gradients ----------------------------------------------------------------------------------


def test_a_step_without_gradients_is_not_counted_and_does_not_raise(amp, backward):
    parameter, raw = parameter_and_optimizer()
    opt = ampx.wrap_optimizer(raw)
    other = nn.Parameter(torch.ones(1))
    opt.step()
    assert (opt.last_step.applied, opt.last_step.finite) == (False, True)
    backward(other.sum(), opt)  # the loss does not use the parameter
    opt.step()
    assert not opt.last_step.applied
    assert growth_tracker(amp, opt) == 0
    assert parameter.tolist() == [1.0, 1.0]


def steps_on_a_copy(model, opt, backward, steps=4):
    """Train a model whose optimizer is another's; return the warnings that say so."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            backward(model(torch.ones(1, 2)).sum(), opt)
            opt.step()
            opt.zero_grad()
    return [str(warning.message) for warning in caught if warning.category is ampx.NoGradientsWarning]


@pytest.mark.parametrize("trained", [0, 2])
def test_an_optimizer_made_from_a_copy_of_the_model_warns(trained, amp, backward):
    model = nn.Linear(2, 1)
    opt = ampx.wrap_optimizer(torch.optim.Adam(model.parameters()))
    assert not steps_on_a_copy(model, opt, backward, trained)
    before = [parameter.clone() for parameter in model.parameters()]
    (message,) = steps_on_a_copy(copy.deepcopy(model), opt, backward)
    assert "another model" in message
    assert all(map(torch.equal, before, model.parameters()))


def test_steps_without_a_loss_that_was_scaled_do_not_warn(amp, backward):
    opt = ampx.wrap_optimizer(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):
            opt.step()
        for _ in range(10):
            opt.step()
            opt.zero_grad()


def test_an_optimizer_of_a_frozen_model_does_not_warn(amp, backward):
    model, head = nn.Linear(2, 2), nn.Linear(2, 1)
    opt = ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    model.requires_grad_(False)
    assert not steps_on_a_copy(nn.Sequential(model, head), opt, backward)
    model.requires_grad_(True)
    assert not steps_on_a_copy(nn.Sequential(model, head), opt, backward)
    assert len(steps_on_a_copy(head, opt, backward)) == 1


def test_frozen_and_unused_parameters_stay_and_the_others_step(amp, backward):
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    opt = ampx.wrap_optimizer(torch.optim.SGD([unused, frozen, used], lr=1.0, weight_decay=0.5))
    backward((used * frozen).sum(), opt)
    opt.step()
    assert [parameter.tolist() for parameter in (used, unused, frozen)] == [[-0.5, -0.5], [1.0, 1.0], [1.0, 1.0]]
    frozen.requires_grad_(True)
    opt.zero_grad()
    backward((used * 0 + frozen).sum(), opt)
    opt.step()
    assert frozen.tolist() == [-0.5, -0.5]


# -- accumulation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_the_scale_is_frozen_within_a_window_even_when_a_state_is_loaded(on_device, amp, backward):
    parameter, raw = parameter_and_optimizer(fused=True)
    opt = ampx.wrap_optimizer(raw, device_scale=on_device)
    backward(parameter.sum(), opt)
    state = amp.state_dict()
    state["groups"][0]["losses"][0]["scale"] = 4.0
    amp.load_state_dict(state)
    backward(parameter.sum(), opt)
    opt.step()
    assert parameter.tolist() == [-1.0, -1.0]
    opt.zero_grad()
    with ampx.scale_loss(parameter.sum(), opt) as scaled:
        assert scaled.item() == -2 * 4.0


# -- several optimizers ----------------------------------------------------------------------------


def test_a_group_of_which_some_cannot_keep_the_scale_on_the_device_keeps_it_on_the_host(amp):
    (_, fused), (_, plain) = parameter_and_optimizer(fused=True), parameter_and_optimizer()
    with pytest.raises(ampx.InvalidOptionError):
        ampx.wrap_optimizer([fused, plain], device_scale=True)
    assert len(ampx.wrap_optimizer([fused, plain])) == 2


# -- clipping --------------------------------------------------------------------------------------


def train_clipped(how, max_norm, max_value, backward, on_device=False, fused=True):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    opt = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    x = torch.randn(5, 3) * 3
    if how == "wrapped":
        opt = ampx.wrap_optimizer(opt, max_grad_norm=max_norm, max_grad_value=max_value, device_scale=on_device)
    elif how != "plain":
        opt = ampx.wrap_optimizer(opt)
    norms = []
    for _ in range(3):
        opt.zero_grad()
        loss = (model(x) ** 2).mean()
        if how == "plain":
            loss.backward()
        else:
            backward(loss, opt)
        if how == "ampx":
            norms.append(ampx.clip_grad_norm(opt, max_norm).item())
        if how in ("plain", "by hand"):
            if how == "by hand":
                ampx.unscale(opt)
                ampx.unscale(opt)  # once is enough, twice is no harm
            if max_value is not None:
                nn.utils.clip_grad_value_(model.parameters(), max_value)
            if max_norm is not None:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        opt.step()
        if how == "wrapped" and max_norm is not None:
            norms.append(opt.last_step.grad_norm)
    return norms, model.state_dict(), opt.state_dict()["state"]


@pytest.mark.parametrize(("max_norm", "max_value"), [(0.5, None), (None, 0.1), (0.5, 0.2), (1e6, None)])
def test_clipping_by_the_wrapper_is_plain_torchs_bit_for_bit(max_norm, max_value, amp, backward, same):
    # Fused kernels that unscale and clip by themselves round otherwise: test_folding.py.
    plain = train_clipped("plain", max_norm, max_value, backward, fused=False)
    assert same(train_clipped("wrapped", max_norm, max_value, backward, fused=False), plain)


@pytest.mark.parametrize("options", [{}, {"fused": "auto"}, {"fused": "auto", "device_scale": True}], ids=str)
def test_a_step_that_is_tried_again_because_a_hook_raised_clips_once(options, amp, backward):
    weight, plain = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    raw = torch.optim.SGD([weight], lr=1.0)
    opt = ampx.wrap_optimizer(raw, max_grad_norm=1e-3, **options)
    handle = raw.register_step_pre_hook(lambda *_: 1 / 0)
    backward(weight.sum(), opt)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            opt.step()
    handle.remove()
    opt.step()
    plain.grad = torch.ones(3)
    nn.utils.clip_grad_norm_([plain], 1e-3)  # each time would take off a thousandth
    torch.optim.SGD([plain], lr=1.0).step()
    torch.testing.assert_close(weight, plain, rtol=1e-6, atol=0.0)
    assert opt.last_step.grad_norm == pytest.approx(3**0.5)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize(("max_norm", "max_value"), [(0.5, None), (None, 0.1), (0.5, 0.2), (1e6, None)])
def test_clipping_in_the_kernel_is_plain_torchs_up_to_rounding(max_norm, max_value, on_device, amp, backward):
    norms, weights, _ = train_clipped("wrapped", max_norm, max_value, backward, on_device)
    plain_norms, plain_weights, _ = train_clipped("plain", max_norm, max_value, backward)
    # Ten roundings a step, each at most doubled by the next step's gradients.
    assert norms == pytest.approx(plain_norms, rel=80 * 2.0**-24)
    for name, weight in weights.items():
        assert torch.allclose(weight, plain_weights[name], rtol=80 * 2.0**-24, atol=80 * 2.0**-24)


@pytest.mark.parametrize("how", ["ampx", "by hand"])
def test_clipping_by_the_user_after_unscale_is_plain_torchs_bit_for_bit(how, amp, backward, same):
    assert same(train_clipped(how, 0.5, None, backward), train_clipped("plain", 0.5, None, backward))


@pytest.mark.parametrize("call", ["clip", "unscale"])
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_overflow_found_before_the_step_skips_it_and_blames_nobody_else(call, on_device, amp, backward):
    good, bad = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    opt = ampx.wrap_optimizer(torch.optim.SGD([good, bad], lr=1.0, fused=True), device_scale=on_device)
    backward(good.sum() + (bad * INF).sum(), opt)
    if call == "clip":
        assert ampx.clip_grad_norm(opt, 1.0).item() == INF
    else:
        ampx.unscale(opt)
        bad.grad.zero_()  # hiding it does not help: it was noted
    opt.step()
    assert (opt.last_step.applied, opt.loss_scale) == (False, 2.0**15)
    assert good.tolist() == bad.tolist() == [1.0, 1.0]
    assert good.grad.tolist() == [1.0, 1.0]


def test_clip_grad_norm_twice_clips_to_the_smaller_and_reports_the_true_norm(amp, backward):
    parameter, raw = parameter_and_optimizer()
    opt = ampx.wrap_optimizer(raw)
    backward((parameter * torch.tensor([3.0, 4.0])).sum(), opt)
    assert ampx.clip_grad_norm(opt, 1.0).item() == 5.0
    ampx.clip_grad_norm(opt, 10.0)
    opt.step()
    assert opt.last_step.grad_norm == 5.0
    torch.testing.assert_close(parameter.detach(), torch.tensor([0.4, 0.2]), rtol=1e-5, atol=1e-5)


# -- the loss --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_one_element_loss_of_any_dtype_and_shape_is_scaled_without_overflow(dtype, shape, amp):
    parameter, raw = parameter_and_optimizer()
    # The gradient of a float16 loss is the scale in float16: the largest power of two it can hold.
    opt = ampx.wrap_optimizer(raw, loss_scale=2.0**15)
    loss = parameter.sum().to(dtype).reshape(shape)
    with ampx.scale_loss(loss, opt) as scaled:
        assert scaled.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
        assert scaled.shape == shape
        assert scaled.item() == 2.0**16  # infinite in float16
        scaled.backward()
    opt.step()
    assert parameter.tolist() == [0.0, 0.0]


def test_a_failed_update_can_be_repeated_and_is_not_unscaled_twice(amp, backward):
    parameter, raw = parameter_and_optimizer()
    opt = ampx.wrap_optimizer(raw)
    fails = raw.register_step_pre_hook(lambda *_: 1 / 0)
    backward(parameter.sum(), opt)
    with pytest.raises(ZeroDivisionError):
        opt.step()
    fails.remove()
    opt.step()
    assert parameter.tolist() == [0.0, 0.0]


def test_after_a_failed_reduction_nothing_is_divided_again(amp, backward, monkeypatch):
    parameter, raw = parameter_and_optimizer()
    opt = ampx.wrap_optimizer(raw, process_group=object())

    def fail(*args, **kwargs):
        raise TimeoutError("a peer died")

    monkeypatch.setattr(torch.distributed, "all_reduce", fail)
    backward(parameter.sum() * torch.inf, opt)
    with pytest.raises(TimeoutError, match="a peer died"):
        opt.step()
    for call in (opt.step, lambda: ampx.unscale(opt), lambda: backward(parameter.sum(), opt)):
        with pytest.raises(ampx.ProtocolError, match="interrupted"):
            call()
    assert parameter.tolist() == [1.0, 1.0]
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **kwargs: None)
    opt.zero_grad()
    backward(parameter.sum(), opt)
    opt.step()
    assert opt.last_step == ampx.StepResult(True, True, 65536.0, 65536.0, 0)  # nobody kept the overflow's flag
    assert parameter.tolist() == [0.0, 0.0]


def test_an_update_beyond_the_weights_dtype_is_plain_torchs(backward):
    """What no loss scale cures is not skipped: weights are not looked at (`docs/explanation/step-results.md`)."""
    ampx.init("torch", dtype="bfloat16", device="cpu", loss_scale="dynamic", process_wide=False)
    weight, plain = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    opt = ampx.wrap_optimizer(torch.optim.SGD([weight], lr=1e10))
    backward((weight * 1e30).sum(), opt)
    opt.step()
    plain.grad = torch.full((2,), 1e30)
    torch.optim.SGD([plain], lr=1e10).step()
    assert torch.equal(weight, plain)
    assert weight.isinf().all()
    assert (opt.last_step.applied, opt.loss_scale) == (True, 2.0**16)


def test_while_gradients_of_the_first_step_accumulate_one_graph_is_kept_alive(amp):
    parameter = nn.Parameter(torch.ones(2))
    opt = amp.wrap_optimizer(torch.optim.SGD([parameter], lr=1.0))

    def accumulate():
        with amp.scale_loss(parameter.sum(), opt) as scaled:
            scaled.backward()
        return weakref.ref(scaled)

    losses = [accumulate() for _ in range(3)]
    assert [loss() is None for loss in losses[:-1]] == [True, True]


KINDS = {
    "host": ({}, {}),
    "clipped": ({}, {"max_grad_norm": 1e9}),
    "device": ({"fused": True}, {"device_scale": True}),
    "device, as specified": ({"fused": True}, {"device_scale": True, "loss_scale": ampx.LossScale(hysteresis=2)}),
}


@pytest.mark.parametrize("call", ["unscale", "step"])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_in_inference_mode_leave_nothing_that_a_later_step_cannot_use(kind, call, amp, backward):
    raw, wrapped = KINDS[kind]
    parameter = nn.Parameter(torch.ones(2))
    opt = ampx.wrap_optimizer(torch.optim.SGD([parameter], lr=0.25, **raw), **wrapped)
    backward(parameter.sum(), opt)
    with torch.inference_mode():
        ampx.unscale(opt)
        if call == "step":
            opt.step()
    if call == "unscale":
        opt.step()
    for factor, value in ((INF, 0.75), (1.0, 0.5), (INF, 0.5)):
        opt.zero_grad()
        backward(parameter.sum() * factor, opt)
        opt.step()
        assert opt.last_step.applied == (factor == 1.0)
        assert parameter.tolist() == [value, value]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_loss_that_is_scaled_with_gradients_off_is_refused_and_training_goes_on(mode, amp, backward):
    parameter = nn.Parameter(torch.ones(1))
    opt = ampx.wrap_optimizer(torch.optim.SGD([parameter], lr=1.0), loss_scale=1234.0)  # a scale that is not cached
    loss = parameter.sum()
    with mode(), pytest.raises(ampx.DetachedLossError, match="no_grad"), ampx.scale_loss(loss, opt):
        pass
    with mode():
        amp.backend.scale(loss, 1234.0)
    backward(parameter.sum(), opt)
    opt.step()
    assert parameter.item() == 0.0
