"""Watching layers, computing them in a dtype of their own, and computing a batch again."""

import contextlib
import math
import random

import numpy as np
import paddle
import pytest
from paddle import nn

import ampx
from ampx.backend import CastPlan, offer
from ampx.errors import UnsupportedByBackendError, UnsupportedOpError
from ampx.numerics.probe import Probe, Watching
from ampx.numerics.rounding import describe
from ampx_paddle import casting
from ampx_paddle.backend import PaddleBackend

pytestmark = [
    pytest.mark.filterwarnings("ignore:When training, we now always track"),
    pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface:UserWarning"),
]

VALUES = [2.0, -0.5, 1e-9, 7e4, 0.0, math.inf, math.nan, -3e-8, 65519.0, 65520.0, 1e-40]


class Net(nn.Layer):
    """Two linear layers, a norm with running statistics and a dropout between them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.between = nn.Sequential(nn.BatchNorm1D(4), nn.Dropout(0.5))
        self.last = nn.Linear(4, 1)

    def forward(self, inputs):
        return self.last(self.between(self.first(inputs)))


class Square(paddle.autograd.PyLayer):
    """A custom function."""

    @staticmethod
    def forward(ctx, inputs):
        ctx.save_for_backward(inputs)
        return inputs * inputs

    @staticmethod
    def backward(ctx, slope):
        (inputs,) = ctx.saved_tensor()
        return slope * inputs * 2


@pytest.fixture
def backend():
    return PaddleBackend()


@pytest.fixture
def net():
    return Net()


@pytest.fixture
def batch():
    return paddle.to_tensor(np.random.default_rng(0).normal(size=(6, 3)).astype("float32"))


def trained(net):
    return [parameter for parameter in net.parameters() if not parameter.stop_gradient]


def by_place(readings):
    return {(reading.module, reading.operation, reading.direction, reading.call): reading for reading in readings}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3", "float8_e5m2"])
def test_a_value_is_counted_as_numpy_counts_it(backend, dtype):
    layer = nn.Identity()
    with offer(backend, Probe).watch(layer, Watching(dtype=dtype)) as watch:
        layer(paddle.to_tensor(VALUES))
    (reading,) = watch.readings()
    assert reading.value == reading.inputs == describe(VALUES, dtype)
    assert (reading.module, reading.kind, reading.dtype, reading.call) == ("", "Identity", "float32", 0)


def test_samples_keep_what_is_written_over_later(backend):
    """Paddle computes gradients in the memory of those that came before; a rounded one belongs to nobody else."""
    numbers, slope = np.array([0.5, 2.0], "float32"), np.float32(1.5)
    net = paddle.nn.Sequential(paddle.nn.ReLU(), paddle.nn.Sigmoid())
    inputs = paddle.to_tensor(numbers, stop_gradient=False)
    with (
        offer(backend, Probe).force(net, {"1": "float16"}),
        offer(backend, Probe).watch(net, Watching(samples=9)) as watch,
    ):
        output = net(inputs)
        (output * float(slope)).sum().backward()
        net[0](inputs.detach()).zero_()
    readings = by_place(watch.readings())
    assert np.array_equal(readings["1", "", "backward", 0].sample, [slope, slope])
    assert np.array_equal(readings["0", "", "forward", 1].sample, numbers)


def test_without_a_model_names_begin_at_the_layer_that_is_called(backend, net, batch):
    with offer(backend, Probe).watch(None, Watching()) as watch:
        nn.MSELoss()(net(batch), paddle.zeros([6, 1]))
    assert [reading.module for reading in watch.readings()] == [
        *("first", "between.0", "between.1", "between", "last", "", "MSELoss:")
    ]
    assert paddle.nn.Layer.__call__.__module__.startswith("paddle")


def test_operations_are_read_with_their_inputs_their_part_of_the_backward_and_their_line(backend):
    class Custom(nn.Layer):
        def forward(self, inputs):
            return Square.apply(paddle.exp(inputs) + 1.0).sum()

    before = paddle._C_ops.exp
    layer, values = Custom(), np.array([0.5, -1.0], "float32")
    inputs = paddle.to_tensor(values, stop_gradient=False)
    with offer(backend, Probe).watch(layer, Watching(operations=True)) as watch:
        layer(inputs).backward()
    readings = by_place(reading for reading in watch.readings() if reading.operation)
    assert readings["", "exp", "forward", 0].value == describe(paddle.exp(inputs).numpy())
    assert readings["", "add", "forward", 0].inputs == describe(paddle.exp(inputs).numpy())
    assert readings["", "Square", "forward", 0].value.largest == pytest.approx((math.exp(0.5) + 1) ** 2)
    # d/dx (e^x + 1)^2 = 2 (e^x + 1) e^x
    assert readings["", "exp_grad", "backward", 0].value.largest == pytest.approx(
        2 * (math.exp(0.5) + 1) * math.exp(0.5)
    )
    assert readings["", "multiply", "backward", 0].inputs.elements == 4  # inside of the custom function's backward
    assert "test_numerics.py:" in readings["", "exp", "forward", 0].place
    assert paddle._C_ops.exp is before


def test_a_step_of_an_optimizer_among_operations_is_taken_and_not_read(backend, net, batch):
    opt = paddle.optimizer.Adam(0.1, parameters=net.parameters())
    before = net.last.weight.numpy()
    with offer(backend, Probe).watch(None, Watching(operations=True)) as watch:
        net(batch).mean().backward()
        opt.step()
    assert not np.array_equal(net.last.weight.numpy(), before)
    assert not [reading for reading in watch.readings() if reading.operation.startswith("adam")]


def test_compiled_layers_are_seen_and_stay_compiled(backend, batch):
    net = paddle.jit.to_static(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), full_graph=True)
    expected = net(batch).numpy()
    with offer(backend, Probe).watch(net, Watching()) as watch:
        net(batch)
    assert [reading.module for reading in watch.readings()] == ["0", "1", ""]
    assert np.allclose(net(batch).numpy(), expected)
    assert paddle.jit.dy2static.program_translator.ProgramTranslator.get_instance().enable_to_static


def test_a_layer_forced_into_float32_computes_without_casting(backend, net, batch, monkeypatch):
    """On the CPU auto_cast is never on, so this looks at who switches it off."""
    running, during = [], []

    @contextlib.contextmanager
    def off():
        running.append(True)
        yield
        running.pop()

    monkeypatch.setattr(casting, "off", off)
    for name in ("first", "last"):
        getattr(net, name).register_forward_post_hook(lambda *_: during.append(bool(running)))
    with offer(backend, Probe).force(net, {"last": "float32"}):
        net(batch)
    assert during == [False, True]


@pytest.mark.parametrize("plan", [None, CastPlan("cpu", "float16")])
def test_a_replay_draws_the_same_masks_and_leaves_everything_as_it_was(backend, net, batch, plan):
    def step(model):
        return (model(batch * random.random() + paddle.to_tensor(np.random.rand(3).astype("float32"))) ** 2).mean()

    step(net).backward()  # gradients that wait
    state = {name: value.numpy() for name, value in net.state_dict().items()}
    waiting = [parameter.grad.numpy() for parameter in trained(net)]
    first, second = (offer(backend, Probe).replay(net, step, plan, scale) for scale in (1.0, 1024.0))
    assert offer(backend, Probe).clock(net, step, plan)() > 0
    assert first.loss == second.loss
    assert all(np.array_equal(first.gradients[name], second.gradients[name]) for name in first.gradients)
    assert list(first.parameters) == list(first.gradients)
    assert len(first.parameters) == len(trained(net))
    assert first.parameters["last.weight"] == describe(net.last.weight.numpy())
    assert all(np.array_equal(net.state_dict()[name].numpy(), value) for name, value in state.items())
    assert all(np.array_equal(a.grad.numpy(), b) for a, b in zip(trained(net), waiting, strict=True))
    # The batch itself, computed by Paddle alone from the same random numbers, is the oracle.
    net.clear_gradients()
    loss = step(net)
    loss.backward()
    assert first.loss == float(loss)
    assert np.array_equal(first.gradients["last.weight"], net.last.weight.grad.numpy())


def test_a_parameter_that_the_loss_does_not_reach_has_no_gradient(backend, net, batch):
    replayed = offer(backend, Probe).replay(net, lambda model: model.first(batch).sum(), None)
    assert list(replayed.gradients) == ["first.weight", "first.bias"]


def test_static_graphs_are_refused(backend, net):
    paddle.enable_static()
    with pytest.raises(UnsupportedByBackendError, match="static graph"), offer(backend, Probe).watch(net, Watching()):
        pass


# -- rules about modules -------------------------------------------------------------------------------------------


def test_modules_are_denied_and_allowed_by_name_where_casting_is_on(backend, net, batch, monkeypatch):
    """On the CPU auto_cast is never on, so this says that it is, and looks at who switches it off and on again."""
    plan = backend.check_plan(CastPlan("cpu", "float16", allow=("module:last", "matmul"), deny=("module:*t",)))
    regions, during = [], {}
    monkeypatch.setattr(paddle.amp, "is_autocast_enabled", lambda: True)
    monkeypatch.setattr(casting, "off", lambda: _noting(regions, "off"))
    for name in ("first", "last"):
        getattr(net, name).register_forward_post_hook(lambda *_, name=name: during.update({name: list(regions)}))
    with pytest.warns(UserWarning, match="makes no effect"), backend.autocast(plan, True):
        net(batch)
    assert during == {"first": ["off"], "last": ["off"]}  # deny outdoes allow
    during.clear()
    with pytest.warns(UserWarning, match="makes no effect"), backend.autocast(plan, True):
        net.first(batch)  # a part by itself
    assert during == {"first": ["off"]}
    assert paddle.nn.Layer.__call__.__module__.startswith("paddle")


@contextlib.contextmanager
def _noting(regions, name):
    regions.append(name)
    yield
    regions.pop()


def test_prepare_refuses_a_pattern_that_matches_no_layer(backend, net):
    plan = backend.check_plan(CastPlan("cpu", "float16", deny=("module:middle",)))
    with pytest.raises(UnsupportedOpError, match="'middle'"):
        backend.prepare(net, None, plan)


def test_a_backward_after_a_replay_is_not_taken_for_that_of_its_scaled_loss(backend, net, batch, amp):
    """It runs outside of any body, so that its gradients are unscaled, and the next body brings them to its scale."""
    opt = ampx.wrap_optimizer(paddle.optimizer.SGD(0.1, parameters=net.parameters()))
    offer(backend, Probe).replay(net, lambda model: model(batch).mean(), None, 4.0)
    net(batch).mean().backward()
    with ampx.scale_loss(net(batch).mean(), opt) as scaled:
        scaled.backward()
    opt.step()
    assert opt.last_step.applied
