"""The meter: updates that round to nothing and gradients that flush, counted again by NumPy."""

import numpy as np
import paddle
import pytest
from metering import count

import ampx
from ampx.numerics.meter import Meter
from ampx.numerics.rounding import sample
from ampx.run import Run, RunSettings
from ampx_paddle.run import automate


@pytest.mark.parametrize("looks", [False, True])
def test_the_numbers_equal_a_count_in_numpy(backward, looks):
    amp = ampx.init("paddle", level="O0", loss_scale=1024.0)
    start = np.random.default_rng(0).normal(size=(3, 3000)).astype("float32")
    weight = paddle.create_parameter([3, 3000], "float32", default_initializer=paddle.nn.initializer.Assign(start))
    idle = paddle.create_parameter([2], "float32")
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(1e-7, parameters=[weight, idle]))
    heard = []
    amp.on_event(heard.append)
    inputs = paddle.to_tensor(np.random.default_rng(1).normal(size=(3, 3000)).astype("float32") ** 9)
    for step in range(1, 101):
        backward((weight * inputs).sum(), opt)
        if step == 100:
            gradient, before = weight.grad.numpy(), weight.numpy()
            if looks:
                amp.unscale(opt)
        assert opt.meter is None
        opt.step()
        opt.clear_grad()
    values = sample(before, 4096), sample(weight.numpy(), 4096), sample(gradient, 4096)
    rows = (
        count(weight.name, "float32", *values, "float32"),
        count(idle.name, "float32", idle.numpy(), idle.numpy(), None, "float32"),
    )
    assert opt.meter == Meter(100, "float32", 1024.0, rows)
    assert 0.1 < opt.meter.lost < 1
    assert [event.lost for event in heard if isinstance(event, ampx.PrecisionLost)] == (
        [opt.meter.lost] if opt.meter.lost >= 0.5 else []
    )


class Critic(paddle.nn.Sequential):
    pass


def of_a_block():
    return [paddle.nn.Sequential(paddle.nn.Sequential(paddle.nn.Linear(2, 2)), paddle.nn.Linear(2, 1))]


def of_two_classes():
    return [paddle.nn.Sequential(paddle.nn.Linear(2, 1)), Critic(paddle.nn.Linear(2, 1))]


def of_one_class():
    return [Critic(paddle.nn.Linear(2, 1)), Critic(paddle.nn.Linear(2, 1))]


NAMES = {
    of_a_block: ["0.0.weight", "0.0.bias", "1.weight", "1.bias"],
    of_two_classes: ["Sequential.0.weight", "Sequential.0.bias", "Critic.0.weight", "Critic.0.bias"],
    of_one_class: None,  # they cannot be told apart: their names are Paddle's
}


@pytest.mark.parametrize("make", NAMES)
def test_parameters_have_their_names_in_the_models(make):
    amp = ampx.init("paddle", level="O0", loss_scale=1024.0)
    amp.meter_every = 1
    models = make()
    parameters = [parameter for model in models for parameter in model.parameters()]
    expected = NAMES[make] or [parameter.name for parameter in parameters]
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(0.5, parameters=parameters))
    for slope in (1.0, float("inf")):
        loss = sum(model(paddle.ones([1, 2])).sum() for model in models) * slope
        with amp.scale_loss(loss, opt) as scaled:
            scaled.backward()
        opt.step()
        if slope == 1.0:
            opt.clear_grad()
    assert [entry.name for entry in opt.meter.parameters] == expected
    assert [entry.name for entry in ampx.debug.nonfinite_parameters(opt)] == expected


@pytest.mark.parametrize("make", NAMES)
def test_gradients_of_several_optimizers_in_a_run_have_their_names_in_the_models(make):
    run = Run("paddle", RunSettings("float32", device="cpu"))
    sampled = []
    run.recorder.takes_gradients = sampled.extend
    with automate(run):
        models = make()
        optimizers = [paddle.optimizer.SGD(0.5, parameters=model.parameters()) for model in models]
        sum(model(paddle.ones([1, 2])).sum() for model in models).backward()
        for optimizer in optimizers:
            optimizer.step()
    expected = NAMES[make] or [parameter.name for model in models for parameter in model.parameters()]
    assert [entry.name for entry in sampled] == expected


def test_a_skipped_step_is_not_metered(amp, weights, backward):
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(0.5, parameters=[weights(1.0)]))
    (weight,) = opt.optimizer._parameter_list
    for step in range(1, 101):
        backward((weight * (float("inf") if step == 100 else 1.0)).sum(), opt)
        opt.step()
        opt.clear_grad()
    assert not opt.last_step.applied
    assert opt.meter is None
