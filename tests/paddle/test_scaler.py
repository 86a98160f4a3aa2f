"""Paddle's own loops, which call a GradScaler: `Model.fit`, `Model.train_batch`, scripts."""

import copy
import math
import pickle
import warnings

import numpy as np
import paddle
import pytest

import ampx
from ampx_paddle.scaler import GradScaler

NATIVE_WARNING = "ignore:amp_guard can only be enabled:UserWarning"  # Paddle's auto_cast on the CPU
SCALE = ampx.LossScale(init_scale=16.0, growth_interval=2)


class Points(paddle.io.Dataset):
    def __init__(self, overflow_at=None):
        self.overflow_at = overflow_at

    def __len__(self):
        return 8

    def __getitem__(self, index):
        value = math.inf if index == self.overflow_at else 0.25 * (index + 1)
        return np.full([3], value, "float32"), np.array([1.0], "float32")


def make_model():
    paddle.seed(5)
    return paddle.Model(paddle.nn.Linear(3, 1))


def fit(model, data, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Paddle's own: auto_cast on the CPU, and what its loop deprecates
        model.fit(data, batch_size=2, shuffle=False, verbose=0, **options)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_model_fit_trains_as_without_ampx(amp, accumulate):
    """Bit for bit, schedule and accumulation included."""
    scaled, plain = make_model(), make_model()
    opt = amp.wrap_optimizer(paddle.optimizer.Adam(0.1, parameters=scaled.parameters()), loss_scale=SCALE)
    scaled.prepare(opt, paddle.nn.MSELoss(), amp_configs="O1")
    GradScaler(opt).attach(scaled)
    plain.prepare(paddle.optimizer.Adam(0.1, parameters=plain.parameters()), paddle.nn.MSELoss())
    for model in (scaled, plain):
        fit(model, Points(), epochs=2, accumulate_grad_batches=accumulate)
    for left, right in zip(scaled.parameters(), plain.parameters(), strict=True):
        assert (left.numpy() == right.numpy()).all()
    assert opt.loss_scale == 16.0 * 2.0 ** (8 // accumulate // 2)


def test_model_fit_skips_an_overflow(amp):
    model = make_model()
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(0.1, parameters=model.parameters()), loss_scale=SCALE)
    events = []
    amp.on_event(events.append)
    model.prepare(opt, paddle.nn.MSELoss(), amp_configs="O1")
    GradScaler(opt).attach(model)
    fit(model, Points(overflow_at=4))
    assert [event.step for event in events if isinstance(event, ampx.StepSkipped)] == [3]
    assert all(np.isfinite(parameter.numpy()).all() for parameter in model.parameters())


def test_model_without_the_scaler_is_refused_not_trained_wrongly(amp):
    model = make_model()
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(0.1, parameters=model.parameters()))
    model.prepare(opt, paddle.nn.MSELoss())
    before = model.parameters()[0].numpy()
    with pytest.raises(ampx.NotScaledError):
        model.train_batch([np.ones([1, 3], "float32")], [np.ones([1, 1], "float32")])
    assert (model.parameters()[0].numpy() == before).all()
    with pytest.raises(ampx.InvalidOptionError, match="amp_configs='O1'"):
        GradScaler(opt).attach(model)


@pytest.mark.filterwarnings(NATIVE_WARNING)
def test_model_saves_and_loads_scale_and_state(amp, tmp_path):
    def build(seed_scale):
        model = make_model()
        opt = amp.wrap_optimizer(paddle.optimizer.Adam(0.1, parameters=model.parameters()), loss_scale=seed_scale)
        model.prepare(opt, paddle.nn.MSELoss(), amp_configs="O1")
        GradScaler(opt).attach(model)
        return model, opt

    with paddle.utils.unique_name.guard():  # Paddle's state goes by names, which it counts
        first, opt = build(SCALE)
        fit(first, Points(), epochs=1)
    first.save(str(tmp_path / "model"))
    fit(first, Points(), epochs=1)
    assert opt.loss_scale == 256.0
    with paddle.utils.unique_name.guard():
        second, other = build(ampx.LossScale())
        second.load(str(tmp_path / "model"))
        assert other.loss_scale == 64.0
        fit(second, Points(), epochs=1)
    for left, right in zip(first.parameters(), second.parameters(), strict=True):
        assert (left.numpy() == right.numpy()).all()
    assert other.loss_scale == 256.0


def test_state_has_paddles_form_and_loads_again(amp):
    weight = paddle.create_parameter([1], "float32")
    config = ampx.LossScale(init_scale=64.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=7, hysteresis=3)
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(0.1, parameters=[weight]), loss_scale=config)
    scaler = GradScaler(opt)
    for factor in (1.0, 1.0, math.inf):
        scaler.scale(weight.sum() * factor).backward()
        scaler.step(opt)
        opt.clear_grad()
    state = scaler.state_dict()
    expected = {
        "scale": [64.0],
        "incr_ratio": 4.0,
        "decr_ratio": 0.25,
        "incr_every_n_steps": 7,
        "decr_every_n_nan_or_inf": 3,
        "incr_count": 0,
        "decr_count": 1,
        "use_dynamic_loss_scaling": True,
    }
    assert {**state, "scale": state["scale"].tolist()} == expected
    other = amp.wrap_optimizer(paddle.optimizer.SGD(0.1, parameters=[paddle.create_parameter([1], "float32")]))
    GradScaler(other).load_state_dict(state)
    back = GradScaler(other).state_dict()
    assert {**back, "scale": back["scale"].tolist()} == expected


def test_setters_and_getters_are_the_loss_scales(amp):
    weight = paddle.create_parameter([1], "float32")
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(0.1, parameters=[weight]))
    scaler = GradScaler(opt)
    assert scaler.is_enable()
    assert scaler.is_use_dynamic_loss_scaling()
    for name, value in (
        ("init_loss_scaling", 32.0),
        ("incr_ratio", 4.0),
        ("decr_ratio", 0.25),
        ("incr_every_n_steps", 5),
        ("decr_every_n_nan_or_inf", 2),
    ):
        getattr(scaler, f"set_{name}")(value)
        assert getattr(scaler, f"get_{name}")() == value
    assert opt.loss_scale == 32.0
    config = opt.ampx_member.group.config
    assert (config.growth_factor, config.backoff_factor) == (4.0, 0.25)
    assert (config.growth_interval, config.hysteresis) == (5, 2)


def test_strangers_are_refused(amp):
    weight = paddle.create_parameter([1], "float32")
    raw = paddle.optimizer.SGD(0.1, parameters=[weight])
    with pytest.raises(ampx.NotWrappedError, match="did not return"):
        GradScaler(raw)
    with pytest.raises(ampx.InvalidOptionError, match="no optimizer"):
        GradScaler()
    opt = amp.wrap_optimizer(raw)
    scaler = GradScaler(opt)
    with pytest.raises(ampx.NotWrappedError, match="not made for"):
        scaler.step(paddle.optimizer.SGD(0.1, parameters=[paddle.create_parameter([1], "float32")]))
    scaler.scale(weight.sum()).backward()
    scaler.step(raw)  # the raw optimizer means its wrapper
    assert opt.last_step.applied


def test_what_a_script_computes_with_scaled_losses_and_the_scale_is_true(amp, weights):
    """A gradient penalty, as scripts write it: the gradients of the scaled loss, divided by hand."""
    parameter = weights(3.0, 4.0)
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(0.5, parameters=[parameter]), loss_scale=SCALE)
    scaler = GradScaler(opt)
    x = paddle.ones([2])
    x.stop_gradient = False
    (scaled,) = paddle.grad(scaler.scale((x * parameter).sum()), [x], create_graph=True)
    penalty = (scaled / scaler._scale).square().sum()
    assert penalty.item() == 25.0
    scaler.scale(penalty).backward()
    scaler.step(opt)
    scaler.update()
    assert parameter.tolist() == [0.0, 0.0]  # 0.5 times the gradient 2 w
    scaler._scale = paddle.to_tensor([4.0])
    assert (opt.loss_scale, scaler._scale.tolist()) == (4.0, [4.0])


def test_copies_of_a_scaler_go_their_own_way_and_pickles_name_what_to_save(amp, weights):
    parameter = weights(1.0)
    scaler = GradScaler(amp.wrap_optimizer(paddle.optimizer.SGD(0.5, parameters=[parameter]), loss_scale=SCALE))
    twin = copy.deepcopy(scaler)
    twin.set_init_loss_scaling(4.0)
    assert (twin._scale.item(), scaler._scale.item()) == (4.0, 16.0)
    with pytest.raises(ampx.UnsupportedByBackendError, match=r"cannot be pickled, .*Save opt\.state_dict"):
        pickle.dumps(scaler)
    state = pickle.loads(pickle.dumps(twin.state_dict()))
    scaler.load_state_dict(state)
    assert scaler._scale.item() == 4.0


def test_the_first_scale_is_the_loaded_one_as_paddle_tells_it(amp, weights, native):
    state = {"scale": np.array([14.0], np.float32), "incr_ratio": 2.0, "decr_ratio": 0.5, "incr_every_n_steps": 5}
    state |= {"decr_every_n_nan_or_inf": 1, "incr_count": 0, "decr_count": 0, "use_dynamic_loss_scaling": True}
    load = f"""
from numpy import array, float32
from unittest import mock
with mock.patch("paddle.amp.grad_scaler.AmpScaler.__init__", lambda self, *args, **kwargs: None):
    scaler = paddle.amp.GradScaler()
scaler._enable = True
scaler.load_state_dict({state!r})
print(float(scaler.get_init_loss_scaling()))
"""
    code, printed, errors = native(load)
    assert code == 0, errors
    scaler = GradScaler(ampx.wrap_optimizer(paddle.optimizer.SGD(0.1, parameters=[weights(1.0)])))
    scaler.load_state_dict(state)
    assert scaler.get_init_loss_scaling() == float(printed.splitlines()[-1]) == 14.0
