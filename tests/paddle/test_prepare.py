"""Levels O2 and O3: what `prepare` makes of a model, and its checkpoints.

Eager Paddle has no products in low precision on a CPU, and no optimizer that updates masters: of bfloat16 its SGD takes
both and leaves the masters as they are. Its `decorate` does nothing there, and is told of a GPU. So the step is written
here, as Paddle's kernels for GPUs do it, on the masters that Paddle makes.
"""

import copy
import importlib

import numpy as np
import paddle
import pytest

import ampx
from ampx.backend import CastPlan
from ampx_paddle.casting import check_plan
from ampx_paddle.gradients import meter_samples
from ampx_paddle.prepare import prepare
from ampx_paddle.wrapping import make_wrapper

nn = paddle.nn
BATCH = {f"2.{name}" for name in ("weight", "bias", "_mean", "_variance")}
INSTANCE = {"3.scale", "3.bias"}
NORMS = BATCH | INSTANCE | {"1.weight", "1.bias", "4.weight", "4.bias"}


class Place:
    is_gpu_place = staticmethod(lambda: True)
    is_xpu_place = is_custom_place = staticmethod(lambda: False)


class Tracer:
    _expected_place = Place()


@pytest.fixture(autouse=True)
def _gpu(monkeypatch, request):
    if request.node.get_closest_marker("gpu"):  # there is one
        return
    module = importlib.import_module("paddle.amp.auto_cast")
    monkeypatch.setattr(module, "_dygraph_tracer", Tracer)
    for dtype in ("float16", "bfloat16"):
        monkeypatch.setattr(module, f"_is_gpu_{dtype}_supported", lambda: True)


def plan(level="O2", dtype="bfloat16", **lists):
    return CastPlan(paddle.device.get_device(), dtype, level, **lists)


def network():
    return nn.Sequential(
        nn.Linear(2, 2), nn.LayerNorm(2), nn.BatchNorm1D(2), nn.InstanceNorm1D(2), nn.GroupNorm(1, 2), nn.Linear(2, 2)
    )


RATE = 2.0**-10


def sgd(net):
    return paddle.optimizer.SGD(RATE, parameters=net.parameters())


def wide(net):
    return {name for name, value in net.state_dict(use_hook=False).items() if value.dtype == paddle.float32}


def update(raw, parameter, slopes, rate=RATE):
    """Subtract from the master, where there is one, and round it into the parameter."""
    low = raw._multi_precision and parameter.dtype != paddle.float32
    updated = raw._create_master_weight(parameter) if low else parameter
    with paddle.no_grad():
        updated.set_value(updated.astype("float32") - rate * paddle.to_tensor(slopes))
        parameter.set_value(updated.astype(parameter.dtype))


def step(raw, net, seed=0):
    generator = np.random.RandomState(seed)
    for parameter in net.parameters():
        update(raw, parameter, generator.randn(*parameter.shape).astype("float32"))


def values(net):
    return {name: value.numpy() for name, value in net.state_dict().items()}


def rounded(array):
    """Round to bfloat16 by NumPy: to nearest, ties to even."""
    bits = np.asarray(array, "float32").view("uint32")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view("float32")


def assert_same(state, other):
    assert state.keys() == other.keys()
    for name in state:
        assert state[name].dtype == other[name].dtype, name
        assert np.array_equal(state[name], other[name]), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_o2_lowers_everything_but_norms(dtype):
    """Paddle's own decorate leaves group normalization low, and in bfloat16 layer and instance normalization, too."""
    net = network()
    raw = sgd(net)
    prepare(net, raw, plan(dtype=dtype))
    assert wide(net) == NORMS
    assert raw._multi_precision


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_o3_lowers_everything_whose_kernels_take_it_and_keeps_no_masters(dtype):
    net = network()
    raw = sgd(net)
    prepare(net, raw, plan("O3", dtype))
    assert wide(net) == BATCH | INSTANCE
    assert not raw._multi_precision


def test_denied_layers_stay_in_float32_and_allowed_norms_do_not():
    net = network()
    prepare(net, None, plan(deny=("module:5",), allow=("module:1",)))
    assert wide(net) == NORMS - {"1.weight", "1.bias"} | {"5.weight", "5.bias"}


def test_what_is_saved_are_the_masters_that_small_updates_add_up_in():
    net = nn.Linear(1, 1, bias_attr=False, weight_attr=nn.initializer.Constant(1.0))
    raw = paddle.optimizer.SGD(2.0**-14, parameters=net.parameters())
    prepare(net, raw, plan())
    for _ in range(63):
        update(raw, net.weight, np.ones([1, 1], "float32"), 2.0**-14)
    # 63 steps of 2**-14: the sum is no bfloat16.
    assert values(net)["weight"].item() == 1 - 63 * 2.0**-14
    assert net.weight.astype("float32").item() == rounded([1 - 63 * 2.0**-14]).item()


def test_what_was_written_by_hand_is_saved():
    net = nn.Linear(2, 1, bias_attr=False)
    raw = sgd(net)
    prepare(net, raw, plan())
    step(raw, net)
    exact = values(net)["weight"]
    written = net.weight.astype("float32").numpy()
    written[0] = 0.5
    net.weight.set_value(paddle.to_tensor(written).astype("bfloat16"))
    assert values(net)["weight"].tolist() == [[0.5], exact[1].tolist()]


def test_the_meter_samples_masters_at_o2():
    net = network()
    raw = sgd(net)
    prepare(net, raw, plan())
    step(raw, net)
    assert {sampled.dtype for sampled in meter_samples(raw, gradients=True)} == {"float32"}


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_checkpoint_loads_in_a_plain_float32_model(level):
    net = network()
    raw = sgd(net)
    prepare(net, raw, plan(level))
    if level == "O2":
        step(raw, net)
    state = net.state_dict()
    assert {value.dtype for value in state.values()} == {paddle.float32}
    plain = network()
    plain.set_state_dict(state)
    assert_same(values(plain), values(net))
    own = net[0].weight.astype("float32").numpy()
    assert np.array_equal(rounded(state["0.weight"].numpy()), own)
    assert np.array_equal(state["0.weight"].numpy(), own) is (level == "O3")


def test_a_part_of_a_model_saves_exactly_too():
    net = network()
    raw = sgd(net)
    prepare(net, raw, plan())
    step(raw, net)
    assert np.array_equal(net[0].state_dict()["weight"].numpy(), net.state_dict()["0.weight"].numpy())


@pytest.mark.parametrize("verb", ["set_state_dict", "set_dict", "load_dict"])
@pytest.mark.parametrize("steps", [0, 2])
def test_loading_float32_reaches_the_masters_exactly(steps, verb):
    net = network()
    raw = sgd(net)
    prepare(net, raw, plan())
    for seed in range(steps):
        step(raw, net, seed)
    wanted = {name: value.clone() for name, value in network().state_dict().items()}
    getattr(net, verb)(wanted)
    assert_same(values(net), {name: value.numpy() for name, value in wanted.items()})
    before = wanted["0.weight"].numpy()
    update(raw, net[0].weight, np.ones([2, 2], "float32"))
    assert np.array_equal(values(net)["0.weight"], before - np.float32(RATE))


def prepared(start):
    """Make the same model and optimizer anew, as a second process would: Paddle's states go by names."""
    with paddle.utils.unique_name.guard():
        net = network()
        net.set_state_dict(start)
        raw = sgd(net)
        prepare(net, raw, plan())
    return net, raw


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_resuming_continues_bit_identically(order):
    start = network().state_dict()
    net, raw = prepared(start)
    for seed in range(2):
        step(raw, net, seed)
    model, optimizer = values(net), copy.deepcopy(raw.state_dict())
    other, other_raw = prepared(start)
    loads = [lambda: other.set_state_dict(model), lambda: other_raw.set_state_dict(optimizer)]
    for load in loads if order == "model first" else reversed(loads):
        load()
    for seed in range(2, 5):
        step(raw, net, seed)
        step(other_raw, other, seed)
    assert_same(values(other), values(net))
    assert not np.array_equal(values(net)["0.weight"], model["0.weight"])


def test_preparing_the_same_again_changes_nothing():
    net = network()
    raw = sgd(net)
    prepare(net, raw, plan())
    step(raw, net)
    before, kind = values(net), type(net)
    assert prepare(net, raw, plan()) == (net, raw)
    assert type(net) is kind
    assert_same(values(net), before)


def test_a_list_of_models_and_optimizers_is_prepared_together():
    nets = [nn.Linear(1, 1), nn.Linear(1, 1)]
    raws = [sgd(net) for net in nets]
    assert prepare(nets, raws, plan()) == (nets, raws)
    assert [net.weight.dtype for net in nets] == [paddle.bfloat16] * 2
    assert all(raw._multi_precision for raw in raws)


def test_an_optimizer_of_low_precision_parameters_is_wrapped_at_o3_only():
    net = nn.Linear(1, 1)
    raw = sgd(net)
    prepare(net, raw, plan("O3"))
    amp = ampx.init("paddle", level="O0", loss_scale="dynamic")
    with pytest.raises(ampx.LowPrecisionParametersError):
        amp.wrap_optimizer(raw)
    member = amp.wrap_optimizer(sgd(nn.Linear(1, 1))).ampx_member
    assert make_wrapper(amp.backend, raw, member, {"plan": plan("O3")}).optimizer is raw


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_level_that_needs_prepare_does_not_train_in_float32_without_it(level):
    net = nn.Linear(1, 1)
    amp = ampx.init("paddle", level="O0", loss_scale="dynamic")
    opt = amp.wrap_optimizer(sgd(net))
    opt._plan = plan(level)  # no CPU has one
    with pytest.raises(ampx.ProtocolError, match="prepare"), amp.scale_loss(net(paddle.ones([1, 1])).sum(), opt):
        pass
    prepare(net, opt, plan(level))
    with amp.scale_loss(paddle.ones([1]).sum() * net.bias.astype("float32").sum(), opt):
        pass


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_the_cpu_refuses_low_precision(level):
    """For its kernels of products, sums, updates and checks of gradients are missing in both dtypes."""
    for dtype in ("float16", "bfloat16"):
        with pytest.raises(ampx.UnsupportedDtypeError, match="cpu"):
            ampx.init("paddle", dtype=dtype, level=level, device="cpu")
        low = paddle.ones([2, 2], dtype)
        with pytest.raises(RuntimeError, match="kernel"):
            paddle.matmul(low, low)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_everything_denied_is_refused(level):
    with pytest.raises(ampx.UnsupportedOpError, match=level):
        check_plan(plan(level, deny=("*",)))


@pytest.mark.gpu
@pytest.mark.skipif(not paddle.is_compiled_with_cuda(), reason="this build of paddle has no CUDA")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.filterwarnings("ignore:When training, we now always track:UserWarning")
@pytest.mark.filterwarnings("ignore:Accumulating with FP16 or BF16 in optimizer:UserWarning")
def test_training_on_a_gpu(level, dtype):
    paddle.set_device("gpu")
    amp = ampx.init("paddle", dtype=dtype, level=level)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.BatchNorm1D(8), nn.Linear(8, 4))
    net, raw = amp.prepare(net, paddle.optimizer.AdamW(0.05, parameters=net.parameters()))
    opt = amp.wrap_optimizer(raw)
    x, losses = paddle.randn([32, 4]), []
    for _ in range(30):
        with amp.autocast():
            output = net(x)
        loss = (output.astype("float32") - x).square().mean()
        losses.append(float(loss))
        with amp.scale_loss(loss, opt) as scaled:
            scaled.backward()
        opt.step()
        opt.clear_grad()
    assert losses[-1] < losses[0] / 2
