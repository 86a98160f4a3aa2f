"""Watching blocks, computing them in a dtype of their own, and computing a batch again."""

import math
import random

import numpy as np
import pytest

import ampx
from ampx.backend import CastPlan, offer
from ampx.numerics.probe import Probe, Watching
from ampx.numerics.rounding import describe, round_to, sample
from ampx_mxnet import dtypes, numerics
from ampx_mxnet.backend import MXNetBackend
from ampx_mxnet.compat import amp, mx
from ampx_mxnet.numerics import rounded

nn = mx.gluon.nn
VALUES = [2.0, -0.5, 1e-9, 7e4, 0.0, math.inf, math.nan, -3e-8, 65519.0, 65520.0, 1e-40]
DTYPES = ["float16", "bfloat16", "float8_e4m3", "float8_e5m2"]


class Same(mx.gluon.HybridBlock):
    """Does nothing."""

    def hybrid_forward(self, space, inputs):
        return space.identity(inputs)


class Square(mx.autograd.Function):
    """A custom function."""

    def forward(self, inputs):
        self.save_for_backward(inputs)
        return inputs * inputs

    def backward(self, slope):
        (inputs,) = self.saved_tensors
        return slope * inputs * 2


class Custom(mx.gluon.Block):
    """A block that is written in operations."""

    def forward(self, inputs):
        return Square()(mx.nd.exp(inputs) + 1.0).sum()


@pytest.fixture
def backend():
    return MXNetBackend()


@pytest.fixture
def net():
    """Two dense layers, a norm with running statistics and a dropout between them."""
    net = nn.HybridSequential()
    between = nn.HybridSequential()
    between.add(nn.BatchNorm(in_channels=4), nn.Dropout(0.5))
    net.add(nn.Dense(4, in_units=3), between, nn.Dense(1, in_units=4))
    net.initialize(mx.init.Xavier())
    return net


@pytest.fixture
def batch():
    return mx.nd.array(np.random.default_rng(0).normal(size=(6, 3)).astype("float32"))


def named(net):
    return net._collect_params_with_prefix()


def trained(net):
    return [parameter for parameter in named(net).values() if parameter.grad_req != "null"]


def values(net):
    return {name: parameter.data().asnumpy() for name, parameter in named(net).items()}


def by_place(readings):
    return {(reading.module, reading.operation, reading.direction, reading.call): reading for reading in readings}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_is_counted_as_numpy_counts_it(backend, dtype):
    with offer(backend, Probe).watch(None, Watching(dtype=dtype)) as watch:
        Same()(mx.nd.array(VALUES))
    (reading,) = watch.readings()
    assert reading.value == reading.inputs == describe(VALUES, dtype)
    assert (reading.module, reading.kind, reading.dtype, reading.call) == ("", "Same", "float32", 0)


def test_outputs_and_their_gradients_are_read_and_nothing_is_changed(backend, batch):
    net = nn.HybridSequential()
    net.add(nn.Dense(4, in_units=3), nn.Dense(1, in_units=4))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    with mx.autograd.record():
        loss = (net(batch) ** 2).sum()
    loss.backward()
    wanted = [parameter.grad().asnumpy() for parameter in trained(net)]
    hidden, output = net[0](batch).asnumpy(), net(batch).asnumpy()
    expected = {"forward": hidden, "backward": 2 * output @ net[1].weight.data().asnumpy()}
    with offer(backend, Probe).watch(net, Watching(samples=5)) as watch:
        with mx.autograd.record():
            loss = (net(batch) ** 2).sum()
        loss.backward()
    assert all(np.array_equal(a.grad().asnumpy(), b) for a, b in zip(trained(net), wanted, strict=True))
    readings = by_place(watch.readings())
    for direction, numbers in expected.items():
        reading = readings["0", "", direction, 0]
        assert reading.value == describe(numbers)
        assert np.array_equal(reading.sample, sample(numbers, 5))
    order = [(reading.module, reading.direction) for reading in watch.readings()]
    assert order[:3] == [("0", "forward"), ("1", "forward"), ("", "forward")]
    assert [name for name, direction in order if direction == "backward"] == ["", "1", "0"]
    assert net._active
    assert net._cached_graph


def test_gradients_of_branches_that_run_side_by_side_are_read_in_the_same_order_every_time(backend, batch):
    net = nn.Dense(4, in_units=3)
    net.initialize(mx.init.Xavier())
    for _ in range(30):
        with offer(backend, Probe).watch(net, Watching(samples=1)) as watch:
            with mx.autograd.record():
                loss = (net(batch) + 2 * net(batch) + 3 * net(batch)).sum()
            loss.backward()
        gradients = [(entry.call, entry.sample[0]) for entry in watch.readings() if entry.direction == "backward"]
        assert gradients == [(0, 3.0), (1, 2.0), (2, 1.0)]


def convolutions():
    """Layers whose values oneDNN holds in layouts of its own, and a batch for them."""
    mx.random.seed(0)
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 3, padding=1), nn.BatchNorm(), nn.Conv2D(16, 3, padding=1), nn.GlobalAvgPool2D(), nn.Dense(2))
    net.initialize(mx.init.Xavier())
    batch = mx.nd.array(np.random.default_rng(0).normal(size=(8, 3, 16, 16)))
    net(batch)  # gluon infers shapes
    return net, batch


@pytest.mark.parametrize("operations", [False, True])
def test_watched_convolutions_have_the_gradients_that_they_have_unwatched_to_the_bit(backend, operations):
    net, batch = convolutions()

    def gradients():
        with mx.autograd.record():
            loss = (net(batch) ** 2).mean()
        loss.backward()
        return [parameter.grad().asnumpy() for parameter in trained(net)]

    expected = gradients()
    for _ in range(3):  # what was wrong came and went
        with offer(backend, Probe).watch(net, Watching(operations=operations)) as watch:
            assert all(np.array_equal(a, b) for a, b in zip(gradients(), expected, strict=True))
        assert all(reading.value.largest < 10 for reading in watch.readings() if reading.direction == "backward")


@pytest.mark.bfloat16
def test_convolutions_in_bfloat16_are_watched_and_denied_whatever_their_layout(backend):
    net, batch = convolutions()
    low = dtypes.cast(batch, "bfloat16"), *(dtypes.cast(p.data(), "bfloat16") for p in trained(net[0]))
    expected = mx.nd.Convolution(*low, num_filter=16, kernel=(3, 3), pad=(1, 1))
    expected = mx.nd.amp_cast(expected, dtype=np.float32).asnumpy()
    forced = {"*": "bfloat16", "1": "float32"}
    with (
        offer(backend, Probe).watch(net, Watching(samples=99, operations=True)) as watch,
        offer(backend, Probe).force(net, forced),
    ):
        net(batch)
    readings = by_place(watch.readings())
    assert np.array_equal(readings["0", "", "forward", 0].sample, sample(expected, 99))
    assert (readings["0", "", "forward", 0].dtype, readings["1", "", "forward", 0].dtype) == ("bfloat16", "float32")


def test_a_loss_that_is_scaled_is_watched(backend, amp, net, batch):
    opt = amp.wrap_optimizer(mx.gluon.Trainer(net.collect_params(), "sgd"))
    with offer(backend, Probe).watch(None, Watching(operations=True)) as watch, mx.autograd.record():
        loss = net(batch).mean()
        with ampx.scale_loss(loss, opt) as scaled:
            scaled.backward()
    assert by_place(watch.readings())["", "_mul_scalar", "forward", 0].value.largest == abs(scaled.asscalar())


def test_without_a_model_names_begin_at_the_block_that_is_called(backend, net, batch):
    native = mx.gluon.Block.__call__
    with offer(backend, Probe).watch(None, Watching()) as watch:
        mx.gluon.loss.L2Loss()(net(batch), mx.nd.zeros((6, 1)))
    assert [reading.module for reading in watch.readings()] == ["0", "1.0", "1.1", "1", "2", "", "L2Loss:"]
    assert mx.gluon.Block.__call__ is native


def test_operations_are_read_with_their_inputs_their_part_of_the_backward_and_their_line(backend):
    before, layer, numbers = mx.nd.exp, Custom(), np.array([0.5, -1.0], "float32")
    inputs = mx.nd.array(numbers)
    inputs.attach_grad()
    with offer(backend, Probe).watch(layer, Watching(operations=True)) as watch:
        with mx.autograd.record():
            loss = layer(inputs)
        loss.backward()
    readings = by_place(reading for reading in watch.readings() if reading.operation)
    assert readings["", "exp", "forward", 0].value == describe(mx.nd.exp(inputs).asnumpy())
    assert readings["", "_plus_scalar", "forward", 0].inputs == describe(mx.nd.exp(inputs).asnumpy())
    slope = 2 * (math.exp(0.5) + 1) * math.exp(0.5)  # of (e^x + 1)^2
    assert readings["", "_backward_exp", "backward", 0].value.largest == pytest.approx(slope)
    assert "test_numerics.py:" in readings["", "exp", "forward", 0].place
    assert mx.nd.exp is before


def test_a_step_of_a_trainer_among_operations_is_taken_and_not_read(backend, net, batch):
    trainer = mx.gluon.Trainer(net.collect_params(), "adam")
    before = net[2].weight.data().asnumpy()
    with offer(backend, Probe).watch(None, Watching(operations=True)) as watch:
        with mx.autograd.record():
            loss = net(batch).mean()
        loss.backward()
        trainer.step(1)
    assert not np.array_equal(net[2].weight.data().asnumpy(), before)
    assert not [reading for reading in watch.readings() if "adam" in reading.operation]


def test_every_element_of_a_value_is_kept_in_the_layouts_of_onednn(backend):
    """MXNet refuses to copy an array's view of one dimension there: "!is_view"."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3, in_channels=3), nn.GlobalAvgPool2D())
    net.initialize(mx.init.Xavier())
    inputs = mx.nd.random.normal(shape=(4, 3, 16, 16))
    with offer(backend, Probe).watch(net, Watching(samples=8192)) as watch, mx.autograd.record():
        output = net(inputs)
        output.backward()
    readings = {(reading.module, reading.direction): reading.sample for reading in watch.readings()}
    assert np.array_equal(readings["1", "forward"], output.asnumpy().ravel())
    assert np.allclose(readings["0", "backward"], np.full(4 * 8 * 14**2, 1 / 14**2), rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_rounded_as_numpy_rounds_them(dtype):
    numbers = np.random.default_rng(0).normal(size=999) * 10.0 ** np.random.default_rng(1).integers(-12, 12, 999)
    numbers = np.append(numbers, VALUES[:-1]).astype("float32")  # instructions for bfloat16 flush what is not normal
    assert np.array_equal(rounded(mx.nd.array(numbers), dtype).asnumpy(), round_to(numbers, dtype), equal_nan=True)


@pytest.mark.parametrize(("plan", "looks"), [(None, 0), (CastPlan("cpu", "bfloat16"), 2)])
def test_a_clock_waits_for_the_check_of_gradients_where_something_is_cast(
    backend, net, batch, plan, looks, monkeypatch
):
    """The check is the trainer's own; what is computed is float32 here, so that every CPU can."""
    seen, computed = [], numerics._computed
    monkeypatch.setattr(numerics, "_computed", lambda b, m, s, _, scale: computed(b, m, s, None, scale))
    monkeypatch.setattr(numerics, "timed", lambda compute, wait: compute() or 1.0)
    finite = numerics.all_finite

    def look(batches):
        seen.append(sum(len(arrays) for kinds in batches for arrays in kinds.values()))
        return finite(batches)

    monkeypatch.setattr(numerics, "all_finite", look)
    assert offer(backend, Probe).clock(net, lambda model: (model(batch) ** 2).mean(), plan)() == 1.0
    assert seen == [len(trained(net))] * looks  # once before the clock starts, and once in it


@pytest.mark.bfloat16
def test_a_clock_puts_in_place_what_casts_once_and_not_in_every_step(backend, net, batch, monkeypatch):
    """It takes as long as a step of two products of a thousand."""
    put, init = [], amp.init
    monkeypatch.setattr(amp, "init", lambda *args, **kwargs: put.append(args) or init(*args, **kwargs))
    monkeypatch.setattr(numerics, "timed", lambda compute, wait: compute() or compute() or 1.0)
    plan = CastPlan("cpu", "bfloat16")
    assert offer(backend, Probe).clock(net, lambda model: (model(batch) ** 2).mean(), plan)() == 1.0
    assert put == [("bfloat16",)]


@pytest.mark.parametrize("plan", [None, pytest.param(CastPlan("cpu", "bfloat16"), marks=pytest.mark.bfloat16)])
def test_replays_and_the_clock_draw_the_same_numbers_of_every_kind_and_leave_what_waits(backend, net, batch, plan):
    """Those of MXNet, NumPy and Python; that all else is as before after a replay, is the kit's."""

    def step(model):
        return (model(batch * random.random() + mx.nd.array(np.random.rand(1, 3))) ** 2).mean()

    with mx.autograd.record():
        loss = step(net)
    loss.backward()  # gradients that wait
    state, waiting = values(net), [parameter.grad().asnumpy() for parameter in trained(net)]
    first, second = (offer(backend, Probe).replay(net, step, plan, scale) for scale in (1.0, 1024.0))
    assert offer(backend, Probe).clock(net, step, plan)() > 0
    assert first.loss == second.loss
    assert all(np.array_equal(values(net)[name], value) for name, value in state.items())
    assert all(np.array_equal(a.grad().asnumpy(), b) for a, b in zip(trained(net), waiting, strict=True))
    assert all(parameter.data()._fresh_grad for parameter in trained(net))
    if plan is None:  # the batch itself, computed by MXNet alone from the same random numbers, is the oracle
        mx.random.seed(0)
        with mx.autograd.record():
            loss = step(net)
        loss.backward()
        assert first.loss == loss.asscalar()
        assert np.array_equal(first.gradients["2.weight"], net[2].weight.grad().asnumpy())


def test_a_seeded_script_draws_the_same_numbers_after_a_replay_whenever_it_runs(backend, net, batch):
    drawn = []
    for _ in range(2):
        mx.random.seed(7)
        offer(backend, Probe).replay(net, lambda model: model(batch).mean(), None)
        drawn.append(mx.nd.random.uniform(shape=3).asnumpy().tolist())
    assert drawn[0] == drawn[1]


def test_a_parameter_that_the_loss_does_not_reach_has_no_gradient(backend, net, batch):
    replayed = offer(backend, Probe).replay(net, lambda model: model[0](batch).sum(), None)
    assert list(replayed.gradients) == ["0.weight", "0.bias"]


def test_gradients_that_add_up_are_those_of_the_batch_alone(backend, net, batch):
    net.collect_params().setattr("grad_req", "add")
    for parameter in trained(net):
        parameter.grad()[:] = 5.0
    replayed = offer(backend, Probe).replay(net, lambda model: model[0](batch).sum(), None)
    assert np.allclose(replayed.gradients["0.weight"], np.tile(batch.asnumpy().sum(0), (4, 1)), rtol=1e-5)
    assert all((parameter.grad().asnumpy() == 5.0).all() for parameter in trained(net))


# -- rules about modules -------------------------------------------------------------------------------------------


@pytest.mark.bfloat16
@pytest.mark.parametrize("hybridized", [False, True])
def test_modules_are_denied_and_allowed_by_name(batch, hybridized):
    net, inner = nn.HybridSequential(), nn.HybridSequential()
    inner.add(nn.Dense(4, in_units=4), nn.Dense(4, in_units=4))
    net.add(nn.Dense(4, in_units=3), inner, nn.Dense(1, in_units=4))
    net.initialize(mx.init.Xavier())
    low = {}
    for deny, allow in (
        ((), ()),
        (("module:1",), ()),
        (("module:1", "module:1.*"), ()),
        (("module:1",), ("module:1.1",)),
    ):
        amp = ampx.init("mxnet", dtype="bfloat16", deny=deny, allow=allow)
        if hybridized:
            net.hybridize()
        else:
            with offer(amp.backend, Probe).watch(net, Watching()) as watch:
                net(batch)
            low[deny, allow] = [r.module for r in watch.readings() if r.dtype == "bfloat16"]
        low[deny, allow, "output"] = net(batch).astype("float32").asnumpy().tolist()
        ampx.shutdown()
    if not hybridized:
        assert [
            sorted(names) for names in (low[(), ()], low[("module:1",), ()], low[("module:1",), ("module:1.1",)])
        ] == [*(["", "0", "1", "1.0", "1.1", "2"], ["", "0", "2"], ["", "0", "1", "1.1", "2"])]
    assert low[("module:1",), (), "output"] != low[(), (), "output"]
    assert low[("module:1",), (), "output"] == low[("module:1", "module:1.*"), (), "output"]
