"""The raw optimizer must not be stepped on gradients that carry the loss scale."""

import math

import paddle
import pytest

import ampx

PLAIN = ("SGD", "Momentum", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "RMSProp", "Lamb", "NAdam", "RAdam")
OPTIMIZERS = {**{name: {} for name in (*PLAIN, "Rprop")}, "ASGD": {"batch_num": 2}}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stepping_the_raw_optimizer_on_pending_gradients_is_refused(name, grouped, amp, weights, backward):
    parameter = weights(1.0, 2.0)
    parameters = [{"params": [parameter]}] if grouped else [parameter]
    raw = getattr(paddle.optimizer, name)(learning_rate=0.1, parameters=parameters, **OPTIMIZERS[name])
    opt = amp.wrap_optimizer(raw)
    for unscaled in (False, True):
        backward(parameter.sum(), opt)
        if unscaled:
            ampx.unscale(opt)
        with pytest.raises(ampx.RawStepError, match="Call step"):
            raw.step()
        if not grouped:  # Paddle's eager minimize takes no parameter groups
            with pytest.raises(ampx.RawStepError):
                raw.minimize(parameter.sum())
        assert parameter.tolist() == [1.0, 2.0]
        opt.clear_grad()
    backward(parameter.sum(), opt)
    opt.step()
    assert opt.last_step.applied
    assert parameter.tolist() != [1.0, 2.0]


@pytest.mark.parametrize("left_by", ["a skipped step", "a scaled loss of another"])
def test_stepping_the_raw_optimizer_on_what_others_left_is_refused(left_by, amp, weights, backward):
    parameter, other = weights(1.0), weights(1.0)
    raw = paddle.optimizer.SGD(1.0, parameters=[parameter])
    opt = amp.wrap_optimizer(raw)
    if left_by == "a skipped step":
        backward(parameter.sum() * math.inf, opt)
        opt.step()
    else:
        generator = amp.wrap_optimizer(paddle.optimizer.SGD(1.0, parameters=[other]), loss_scale=4.0)
        backward(parameter.sum() + other.sum(), generator)
    with pytest.raises(ampx.RawStepError, match="Call clear_grad"):
        raw.step()
    assert parameter.item() == 1.0
    opt.clear_grad()
    parameter.sum().backward()
    raw.step()
    assert parameter.item() == 0.0


def test_a_disabled_session_leaves_the_raw_optimizer_as_it_is(weights):
    amp = ampx.init("paddle", enabled=False)
    raw = paddle.optimizer.SGD(1.0, parameters=[weights(1.0)])
    amp.wrap_optimizer(raw)
    assert raw._auxiliary_vars == {}


def test_a_list_that_is_refused_leaves_no_guard_on_the_others(amp, weights):
    raw = paddle.optimizer.SGD(1.0, parameters=[weights(1.0)])
    low = paddle.create_parameter([1], "float32").astype("bfloat16")
    low.stop_gradient = False
    other = paddle.optimizer.SGD(1.0, parameters=[low])
    with pytest.raises(ampx.LowPrecisionParametersError):
        amp.wrap_optimizer([raw, other])
    assert raw._get_auxiliary_var("found_inf") is None
