"""The meter: updates that round to nothing and gradients that flush, counted again by NumPy."""

import numpy as np
import paddle
import pytest
from metering import count

import ampx
from ampx.numerics.meter import Meter
from ampx.numerics.rounding import sample


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


def test_a_skipped_step_is_not_metered(amp, weights, backward):
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(0.5, parameters=[weights(1.0)]))
    (weight,) = opt.optimizer._parameter_list
    for step in range(1, 101):
        backward((weight * (float("inf") if step == 100 else 1.0)).sum(), opt)
        opt.step()
        opt.clear_grad()
    assert not opt.last_step.applied
    assert opt.meter is None
