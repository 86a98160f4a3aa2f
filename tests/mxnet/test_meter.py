"""The meter: updates that round to nothing and gradients that flush, counted again by NumPy."""

import numpy as np
import pytest
from metering import count

import ampx
from ampx.numerics.meter import Meter
from ampx.numerics.rounding import sample
from ampx_mxnet.compat import mx


@pytest.mark.parametrize("looks", [False, True])
def test_the_numbers_equal_a_count_in_numpy(looks):
    amp = ampx.init("mxnet", level="O0", loss_scale=1024.0)
    weight = mx.gluon.Parameter("weight", shape=(3, 3000))
    weight.initialize(mx.init.Normal(1.0))
    opt = amp.wrap_optimizer(mx.gluon.Trainer([weight], "sgd", {"learning_rate": 1e-7}))
    heard = []
    amp.on_event(heard.append)
    inputs = mx.nd.array(np.random.default_rng(1).normal(size=(3, 3000)) ** 9)
    for step in range(1, 101):
        with mx.autograd.record():
            loss = (weight.data() * inputs).sum()
            with ampx.scale_loss(loss, opt) as scaled:
                scaled.backward()
        if step == 100:
            gradient, before = weight.grad().asnumpy(), weight.data().asnumpy()
            if looks:
                amp.unscale(opt)
        assert opt.meter is None
        opt.step(1)
    values = sample(before, 4096), sample(weight.data().asnumpy(), 4096), sample(gradient, 4096)
    assert opt.meter == Meter(100, "float32", 1024.0, (count("weight", "float32", *values, "float32"),))
    assert 0.1 < opt.meter.lost < 1
    assert [event.lost for event in heard if isinstance(event, ampx.PrecisionLost)] == (
        [opt.meter.lost] if opt.meter.lost >= 0.5 else []
    )
