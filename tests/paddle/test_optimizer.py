"""A wrapped optimizer is a Paddle optimizer: everything but stepping and clearing is the raw one's."""

import math
import warnings

import numpy as np
import paddle
import pytest

import ampx

OPTIMIZERS = {
    "SGD": {},
    "Momentum": {},
    "Adam": {},
    "AdamW": {"weight_decay": 0.1},
    "Adamax": {},
    "Adagrad": {},
    "Adadelta": {},
    "RMSProp": {},
    "Lamb": {},
    "NAdam": {},
    "RAdam": {},
    "Rprop": {},
    "ASGD": {"batch_num": 2},
}


def make_net(seed=3):
    paddle.seed(seed)
    return paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.Tanh(), paddle.nn.Linear(8, 1))


def batches(count=3):
    rng = np.random.default_rng(0)
    return [paddle.to_tensor(rng.normal(size=(5, 4)).astype("float32")) for _ in range(count)]


def train(net, opt, backward=None, factors=(1.0, 1.0, 1.0)):
    for batch, factor in zip(batches(len(factors)), factors, strict=True):
        loss = net(batch).square().mean() * factor
        if backward is None:
            loss.backward()
        else:
            backward(loss, opt)
        opt.step()
        opt.clear_grad()


def values(net):
    return [parameter.numpy() for parameter in net.parameters()]


def same(left, right):
    return all((a == b).all() for a, b in zip(left, right, strict=True))


def steps_on_a_copy(net, opt, backward):
    """Train a network whose optimizer is another's; return the warnings that say so."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(net, opt, backward, factors=(1.0,) * 5)
    return [warning for warning in caught if warning.category is ampx.NoGradientsWarning]


def test_an_optimizer_made_from_a_copy_of_the_network_warns(amp, backward):
    net = make_net()
    opt = ampx.wrap_optimizer(paddle.optimizer.SGD(0.1, parameters=net.parameters()))
    assert len(steps_on_a_copy(make_net(), opt, backward)) == 1
    assert same(values(net), values(make_net()))
    assert not steps_on_a_copy(net, opt, backward)


def test_an_optimizer_of_a_frozen_network_does_not_warn(amp, backward):
    net = make_net()
    opt = ampx.wrap_optimizer(paddle.optimizer.SGD(0.1, parameters=net.parameters()))
    for parameter in net.parameters():
        parameter.stop_gradient = True
    assert not steps_on_a_copy(make_net(), opt, backward)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_as_in_float32_and_skips(amp, backward, name):
    """Exactly, because the scale is a power of two; skipped steps leave no trace in state or parameters."""
    nets = make_net(), make_net()
    raw, plain = (
        getattr(paddle.optimizer, name)(learning_rate=0.05, parameters=net.parameters(), **OPTIMIZERS[name])
        for net in nets
    )
    opt = amp.wrap_optimizer(raw)
    train(nets[0], opt, backward)
    train(nets[1], plain)
    assert same(values(nets[0]), values(nets[1]))
    before = [value.numpy().copy() for value in opt.state_dict().values()]
    train(nets[0], opt, backward, factors=(math.inf,))
    assert not opt.last_step.applied
    assert same(values(nets[0]), values(nets[1]))
    assert same(before, [value.numpy() for value in opt.state_dict().values()])


def test_paddle_takes_it_for_an_optimizer(amp):
    raw = paddle.optimizer.Adam(0.1, parameters=make_net().parameters())
    opt = amp.wrap_optimizer(raw)
    assert isinstance(opt, paddle.optimizer.Optimizer)
    assert opt.get_lr() == 0.1
    opt.set_lr(0.25)
    assert raw.get_lr() == 0.25
    assert opt._parameter_list is raw._parameter_list
    opt._parameter_list = raw._parameter_list[:1]
    assert len(raw._parameter_list) == 1
    assert opt._beta1 == raw._beta1
    opt._beta1 = 0.5
    assert raw._beta1 == 0.5
    assert "SGD" not in repr(opt)
    assert "Adam" in repr(opt)
    with pytest.raises(AttributeError, match="no_such_name"):
        opt.no_such_name  # noqa: B018


def test_schedulers_belong_to_the_raw_optimizer(amp, backward):
    scheduler = paddle.optimizer.lr.StepDecay(0.5, step_size=1, gamma=0.5)
    net = make_net()
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(scheduler, parameters=net.parameters()))
    gated = amp.gate(scheduler, opt)
    rates = []
    for factor in (1.0, math.inf, 1.0):
        train(net, opt, backward, factors=(factor,))
        gated.step()
        rates.append(opt.get_lr())
    assert rates == [0.25, 0.25, 0.125]
    other = paddle.optimizer.lr.StepDecay(1.0, step_size=1)
    opt.set_lr_scheduler(other)
    assert opt.get_lr() == 1.0


def test_state_dict_is_the_raw_optimizers_and_loads_into_plain_paddle(amp, backward, tmp_path):
    path = str(tmp_path / "opt.pdopt")
    with paddle.utils.unique_name.guard():  # Paddle's state goes by names, which it counts
        net = make_net()
        opt = amp.wrap_optimizer(paddle.optimizer.Adam(0.1, parameters=net.parameters()))
        train(net, opt, backward)
    paddle.save(opt.state_dict(), path)
    with paddle.utils.unique_name.guard():
        twin = make_net()
        twin.set_state_dict(net.state_dict())
        plain = paddle.optimizer.Adam(0.1, parameters=twin.parameters())
        plain.set_state_dict(paddle.load(path))
        train(twin, plain)
    train(net, opt, backward)
    assert same(values(net), values(twin))
    opt.set_state_dict(paddle.load(path))
    moment = next(key for key in opt.state_dict() if "moment1" in key)
    assert (opt.state_dict()[moment].numpy() == paddle.load(path)[moment].numpy()).all()


@pytest.mark.parametrize("verb", ["set_state_dict", "load_state_dict"])
def test_a_state_loads_where_it_belongs_only(amp, backward, verb):
    """Natively an optimizer that has not stepped takes any dict, and loads nothing of it."""
    net = make_net()
    opt = amp.wrap_optimizer(paddle.optimizer.Adam(0.1, parameters=net.parameters()))
    with pytest.raises(ampx.InvalidStateError, match=r"amp\.load_state_dict"):
        getattr(opt, verb)(amp.state_dict())
    train(net, opt, backward)
    saved = {name: value.numpy() for name, value in opt.state_dict().items() if "moment1" in name}
    with pytest.raises(ampx.InvalidStateError, match=r"amp\.load_state_dict"):
        getattr(opt, verb)(amp.state_dict())
    with pytest.raises(ampx.UnknownSchemaError, match="the state of an optimizer or a model to its own"):
        amp.load_state_dict(opt.state_dict())
    state = {name: value * 2 if name in saved else value for name, value in opt.state_dict().items()}
    getattr(opt, verb)(state)
    assert saved
    for name, value in saved.items():
        assert (opt.state_dict()[name].numpy() == 2 * value).all()


@pytest.mark.parametrize("clear", ["clear_grad", "clear_gradients", "zero_grad"])
@pytest.mark.parametrize("to_zero", [False, True])
def test_clearing_drops_what_is_pending(amp, backward, clear, to_zero):
    """Whether Paddle leaves zeros or nothing: an overflow that was thrown away is neither skipped nor counted."""
    net = make_net()
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(0.1, parameters=net.parameters()))
    backward(net(batches(1)[0]).sum() * math.inf, opt)
    getattr(opt, clear)(to_zero if clear != "zero_grad" else not to_zero)
    assert (net[0].weight.grad is not None) is to_zero
    before = values(net)
    opt.step()
    assert not opt.last_step.applied
    assert same(values(net), before)
    train(net, opt, backward, factors=(1.0,))
    assert opt.last_step == ampx.StepResult(True, True, 2.0**16, 2.0**16, 0)


def test_minimize_steps_as_in_eager_paddle(amp):
    nets = make_net(), make_net()
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(0.1, parameters=nets[0].parameters()))
    plain = paddle.optimizer.SGD(0.1, parameters=nets[1].parameters())
    batch = batches(1)[0]
    with ampx.scale_loss(nets[0](batch).mean(), opt) as scaled:
        scaled.backward()
    operations, pairs = opt.minimize(scaled)
    loss = nets[1](batch).mean()
    loss.backward()
    plain.minimize(loss)
    assert same(values(nets[0]), values(nets[1]))
    assert operations is None
    assert [parameter for parameter, _ in pairs] == nets[0].parameters()
    opt.clear_grad()
    with pytest.raises(ampx.UnsupportedByBackendError, match="minimize"):
        opt.minimize(scaled, parameters=nets[0].parameters()[:1])
    nets[0](batch).mean().backward()
    with pytest.raises(ampx.NotScaledError):
        opt.minimize(scaled)


def test_grad_clip_of_the_raw_optimizer_sees_true_gradients(amp, backward):
    nets = make_net(), make_net()
    opt, plain = (
        paddle.optimizer.SGD(0.1, parameters=net.parameters(), grad_clip=paddle.nn.ClipGradByGlobalNorm(0.01))
        for net in nets
    )
    opt = amp.wrap_optimizer(opt)
    train(nets[0], opt, backward)
    train(nets[1], plain)
    assert same(values(nets[0]), values(nets[1]))


def test_parameter_groups(amp, backward):
    nets = make_net(), make_net()
    raw, plain = (
        paddle.optimizer.AdamW(
            0.1,
            parameters=[
                {"params": net[0].parameters()},
                {"params": net[2].parameters(), "learning_rate": 0.1, "weight_decay": 0.5},
            ],
        )
        for net in nets
    )
    opt = amp.wrap_optimizer(raw, max_grad_norm=1e6)
    train(nets[0], opt, backward)
    train(nets[1], plain)
    assert same(values(nets[0]), values(nets[1]))
    train(nets[0], opt, backward, factors=(math.inf,))
    assert same(values(nets[0]), values(nets[1]))


@pytest.mark.filterwarnings("ignore:Op `increment` is executed through:DeprecationWarning")
def test_lookahead_takes_its_slow_steps_with_applied_steps_only(amp, backward):
    from paddle.incubate.optimizer import LookAhead

    nets = make_net(), make_net()
    raw, plain = (LookAhead(paddle.optimizer.Adam(0.1, parameters=net.parameters()), k=2) for net in nets)
    opt = amp.wrap_optimizer(raw)
    for factor in (1.0, math.inf, 2.0, math.inf, 3.0):
        train(nets[0], opt, backward, factors=(factor,))
        if math.isfinite(factor):
            train(nets[1], plain, factors=(factor,))
    assert same(values(nets[0]), values(nets[1]))


def test_float64_parameters_are_divided_in_float64(amp):
    parameter = paddle.create_parameter([1], "float64", default_initializer=paddle.nn.initializer.Constant(1.0))
    other = paddle.create_parameter([1], "float32", default_initializer=paddle.nn.initializer.Constant(1.0))
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(1.0, parameters=[parameter, other]))
    slope = 1.0 + 2.0**-40
    with ampx.scale_loss((parameter * slope).sum() + other.sum().astype("float64"), opt) as scaled:
        scaled.backward()
    ampx.unscale(opt)
    assert parameter.grad.item() == slope
    assert other.grad.item() == 1.0


def test_frozen_parameters_are_left_alone(amp, backward):
    net = make_net()
    net[0].weight.stop_gradient = True
    before = net[0].weight.numpy()
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(0.1, parameters=net.parameters()))
    train(net, opt, backward)
    assert opt.last_step.applied
    assert (net[0].weight.numpy() == before).all()


def test_low_precision_parameters_are_refused(amp):
    net = make_net()
    net.to(dtype="bfloat16")
    with pytest.raises(ampx.LowPrecisionParametersError, match="4 low-precision parameters"):
        amp.wrap_optimizer(paddle.optimizer.SGD(0.1, parameters=net.parameters()))


def test_parameters_that_become_low_precision_after_wrapping_are_refused_before_anything_changes(amp, backward):
    net = make_net()
    opt = amp.wrap_optimizer(paddle.optimizer.AdamW(0.1, parameters=net.parameters()))
    train(net, opt, backward, factors=(1.0,))
    net.to(dtype="bfloat16")
    before, loss = (values(net), amp.state_dict()), net.parameters()[0].astype("float32").sum()
    with pytest.raises(ampx.LowPrecisionParametersError, match="4 low-precision"), ampx.scale_loss(loss, opt):
        pytest.fail("the block was entered")
    assert same(before[0], values(net))
    assert before[1] == amp.state_dict()
    net.to(dtype="float32")
    train(net, opt, backward, factors=(1.0,))
    assert opt.last_step.applied


def test_casting_of_trees():
    backend = ampx.init("paddle", level="O0").backend
    whole = paddle.to_tensor([1, 2])
    tree = {"a": (paddle.to_tensor([1 / 3]), whole), "b": [None, "text", 2.5]}
    low = backend.cast(tree, "bfloat16")
    assert low["a"][0].dtype == paddle.bfloat16
    assert low["a"][0].astype("float32").item() == 0.333984375
    assert low["a"][1] is whole
    assert low["b"] == [None, "text", 2.5]
    assert backend.widest(low, "bfloat16") == "bfloat16"
    assert backend.widest([low, tree], "bfloat16") == "float32"


def test_nonfinite_parameters_have_the_models_names(amp, backward):
    net = make_net()
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(0.1, parameters=net.parameters()))
    backward(net(batches(1)[0]).sum() + (net[2].bias * math.inf).sum(), opt)
    opt.step()
    assert [entry.name for entry in ampx.debug.nonfinite_parameters(opt, net)] == ["2.bias"]
    assert [entry.name for entry in ampx.debug.nonfinite_parameters(opt)] == ["2.bias"]  # of the model that lives


def test_a_parameter_of_no_model_has_paddles_own_name(amp, backward):
    alone = paddle.create_parameter([1], "float32")
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(0.1, parameters=[alone]))
    backward((alone * math.inf).sum(), opt)
    opt.step()
    assert [entry.name for entry in ampx.debug.nonfinite_parameters(opt)] == [alone.name]


@pytest.mark.parametrize("dtypes", [["float32"], ["float32", "float64"]])
@pytest.mark.parametrize("verb", ["step", "unscale"])
def test_a_step_after_a_kernel_had_failed_divides_once_or_is_refused(amp, backward, monkeypatch, dtypes, verb):
    """With two dtypes a first call has divided before the other fails."""
    ones = paddle.nn.initializer.Constant(1.0)
    pair = [paddle.create_parameter([1], dtype, default_initializer=ones) for dtype in dtypes]
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(0.5, parameters=pair), loss_scale=1024.0)
    native, left = paddle._C_ops.check_finite_and_unscale_, list(dtypes)

    def fail(*args):
        result = native(*args)
        left.pop()
        if not left:
            raise RuntimeError("the device is gone")
        return result

    def train():
        backward(sum(parameter.astype("float32").sum() for parameter in pair), opt)
        if verb == "unscale":
            ampx.unscale(opt)
        opt.step()

    with monkeypatch.context() as patch:
        patch.setattr(paddle._C_ops, "check_finite_and_unscale_", fail)
        with pytest.raises(RuntimeError, match="the device is gone"):
            train()
    with pytest.raises(ampx.ProtocolError, match=r"interrupted .*Call opt\.zero_grad"):
        opt.step()
    assert [parameter.item() for parameter in pair] == [1.0] * len(pair)
    opt.zero_grad()
    train()
    assert [parameter.item() for parameter in pair] == [0.5] * len(pair)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}, {"max_grad_value": 1.0}])
@pytest.mark.parametrize("numbers", [1, 100_000])
def test_scales_below_one_that_overflow_on_dividing_are_skipped(amp, backward, options, numbers):
    """The scaled gradient is finite, the true one is beyond float32."""
    zero = paddle.nn.initializer.Constant(0.0)
    parameter = paddle.create_parameter([numbers], "float32", default_initializer=zero)
    scale = ampx.LossScale(init_scale=2.0**-14, min_scale=2.0**-20)
    opt = amp.wrap_optimizer(paddle.optimizer.SGD(0.5, parameters=[parameter]), loss_scale=scale, **options)
    with ampx.scale_loss(parameter.sum(), opt) as scaled:
        scaled.backward()
        parameter.grad = paddle.full([numbers], 1e38)
    opt.step()
    assert (opt.last_step.applied, opt.last_step.finite, opt.loss_scale) == (False, False, 2.0**-15)
    assert not parameter.any().item()
