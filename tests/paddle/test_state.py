"""A state that the PyTorch backend saved goes on in Paddle."""

import json
import math

import paddle

import ampx

# What PyTorch saves after 0, 0, 1, 0 (1 is an overflow) with growth_interval=3, written out by hand.
FROM_TORCH = """{"schema": "ampx.loss_scale/1", "framework": "torch", "groups": [{"config": {"init_scale": 65536.0,
"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "hysteresis": 1, "min_scale": 1.0,
"max_scale": 16777216.0, "dynamic": true, "max_consecutive_skips": 50}, "losses": [{"loss_id": 0, "scale": 32768.0,
"growth_tracker": 1, "hysteresis_tracker": 1, "consecutive_skips": 0}]}]}"""


def test_a_state_from_torch_goes_on_where_it_was(amp, backward):
    weight = paddle.create_parameter([1], "float32")
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(0.0, parameters=[weight]))
    amp.load_state_dict(json.loads(FROM_TORCH))
    trace = []
    for overflow in (0, 0, 1, 0, 0, 0):
        backward(weight.sum() * (math.inf if overflow else 1.0), opt)
        opt.step()
        opt.clear_grad()
        trace.append(opt.last_step.next_scale)
    # Two finite steps complete the three, the overflow halves, and three more finite steps double again.
    assert trace == [32768.0, 65536.0, 32768.0, 32768.0, 32768.0, 65536.0]
    saved = json.loads(json.dumps(amp.state_dict()))
    assert saved["groups"][0]["config"] == json.loads(FROM_TORCH)["groups"][0]["config"]
    assert saved["framework"] == "paddle"


def test_the_state_of_paddles_own_scaler_is_imported():
    amp = ampx.init("paddle", level="O0", loss_scale="dynamic")
    weight = paddle.create_parameter([1], "float32")
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(0.0, parameters=[weight]))
    native = {
        "scale": paddle.to_tensor([1024.0]).numpy(),
        "incr_ratio": 2.0,
        "decr_ratio": 0.5,
        "incr_every_n_steps": 5,
        "decr_every_n_nan_or_inf": 2,
        "incr_count": 4,
        "decr_count": 0,
        "use_dynamic_loss_scaling": True,
    }
    amp.load_state_dict(ampx.import_state(native))
    with ampx.scale_loss(weight.sum(), opt) as scaled:
        scaled.backward()
    opt.step()
    assert (opt.last_step.scale, opt.last_step.next_scale) == (1024.0, 2048.0)
