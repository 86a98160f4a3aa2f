"""MXNet's simulated GPUs: they round as NumPy does, compute nothing silently in float32, and show planted faults."""

import contextlib

import mxnet as mx
import numpy as np
import pytest

import ampx
import simulated_mxnet
from ampx_mxnet import casting, gradients, low_precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not simulated_mxnet.started(), reason="there are no simulated GPUs for mxnet"),
]
nn = mx.gluon.nn
RANDOM = np.random.default_rng(0)
VALUES = RANDOM.normal(size=(4, 6)).astype("float32")


@pytest.fixture(autouse=True)
def _seed():
    mx.random.seed(0)
    yield
    ampx.shutdown()


def on_gpu(values, dtype="float32"):
    return mx.nd.array(values, ctx=mx.gpu(0), dtype="float32").astype(dtype)


def test_casts_round_to_the_nearest():
    values = (RANDOM.normal(size=100_000) * np.exp2(RANDOM.integers(-30, 17, 100_000))).astype("float32")
    special = np.float32([0.0, -0.0, 65504, 65519.99, 65520, -65520, 2.0**-24, 2.0**-25, np.inf, -np.inf, np.nan])
    values = np.concatenate([values, np.float32(1 + np.arange(64) * 2.0**-12), special])
    with np.errstate(over="ignore"):
        expected = values.astype("float16")
    np.testing.assert_array_equal(on_gpu(values, "float16").asnumpy(), expected)
    np.testing.assert_array_equal(on_gpu(values, "float16").astype("float32").asnumpy(), expected.astype("float32"))


def test_a_context_is_a_gpu_and_not_the_hosts():
    array = on_gpu(VALUES)
    assert array.context == mx.gpu(0) == mx.Context(array.context) != mx.cpu(0)
    assert (array.context.device_type, mx.num_gpus()) == ("gpu", simulated_mxnet.GPUS)
    assert mx.gpu(1) != mx.gpu(0)
    with mx.gpu(1):
        assert mx.nd.ones((2,)).context == mx.gpu(1)


def weights(*shape):
    return on_gpu(np.random.default_rng(1).normal(size=shape))


# By name, what is computed of two factors, and the second factor.
PRODUCTS = {
    "FullyConnected": (lambda x, w: mx.nd.FullyConnected(x, w, num_hidden=3, no_bias=True), weights(3, 6)),
    "dot": (mx.nd.dot, weights(6, 3)),
    "batch_dot": (lambda x, w: mx.nd.batch_dot(x.reshape((2, 2, 6)), w), weights(2, 6, 3)),
    "linalg.gemm2": (mx.nd.linalg.gemm2, weights(6, 3)),
    "Convolution": (
        lambda x, w: mx.nd.Convolution(x.reshape((1, 1, 4, 6)), w, kernel=(3, 3), num_filter=2, no_bias=True),
        weights(2, 1, 3, 3),
    ),
    "Deconvolution": (
        lambda x, w: mx.nd.Deconvolution(x.reshape((1, 1, 4, 6)), w, kernel=(3, 3), num_filter=2, no_bias=True),
        weights(1, 2, 3, 3),
    ),
}


def computed(compute, *factors):
    """Return a product and the gradients of its factors."""
    for factor in factors:
        factor.attach_grad()
    with mx.autograd.record():
        product = compute(*factors)
    product.backward()
    return [product, *(factor.grad for factor in factors)]


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_and_its_gradients_are_those_of_float32_rounded_once(name):
    compute, weight = PRODUCTS[name]
    low = [on_gpu(VALUES, "float16"), weight.astype("float16")]
    results = computed(compute, *low)
    expected = computed(compute, *(factor.astype("float32") for factor in low))
    for result, exact in zip(results, expected, strict=True):
        assert result.dtype == np.float16
        np.testing.assert_array_equal(result.asnumpy(), exact.asnumpy().astype("float16"))


def network():
    layers = nn.HybridSequential()
    layers.add(
        nn.Conv2D(4, 3, in_channels=1),
        nn.BatchNorm(in_channels=4),
        nn.Activation("relu"),
        nn.MaxPool2D(2),
        nn.Dense(3, in_units=36),
    )
    return layers


class Attention(mx.gluon.HybridBlock):
    """Attention of some vectors to others, then a linear layer; no gradient is a sum, which has an order."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.norm = nn.LayerNorm(in_channels=8)
            self.layer = nn.Dense(3, in_units=8, flatten=False)

    def hybrid_forward(self, space, inputs):
        weights = space.softmax(space.batch_dot(self.norm(inputs), inputs, transpose_b=True))
        return self.layer(space.batch_dot(weights, inputs))


@pytest.mark.parametrize(("make", "shape"), [(network, (6, 1, 8, 8)), (Attention, (6, 8, 8))])
def test_a_graph_in_float16_computes_what_its_operators_do_one_by_one(make, shape):
    """And its gradients have the dtype of what they are the gradients of."""
    inputs, results = on_gpu(np.random.default_rng(0).normal(size=shape), "float16"), []
    for hybridize in (False, True):
        mx.random.seed(0)
        net = make()
        net.initialize(mx.init.Xavier(), ctx=mx.gpu(0))
        net.cast("float16")
        if hybridize:
            net.hybridize()
        with mx.autograd.record():
            output = net(inputs)
        output.backward()
        trained = [parameter for parameter in net.collect_params().values() if parameter.grad_req != "null"]
        assert all(parameter.grad().dtype == parameter.data().dtype for parameter in trained)
        assert output.dtype == np.float16
        results.append([output.asnumpy(), *(parameter.grad().asnumpy() for parameter in trained)])
    for one_by_one, graph in zip(*results, strict=True):
        np.testing.assert_array_equal(one_by_one, graph)


def test_what_a_graph_is_made_of_stays_as_mxnet_traced_it():
    net = network()
    net.initialize(ctx=mx.gpu(0))
    net.hybridize()
    net(on_gpu(np.ones((2, 1, 8, 8))))
    _, symbol = net._cached_graph
    assert "amp_multicast" not in symbol.tojson(remove_amp_cast=False)


def train(context):
    """Train a small convolutional network in float32; return its losses and its weights."""
    mx.random.seed(0)
    net, losses = network(), []
    net.initialize(mx.init.Xavier(), ctx=context)
    net.hybridize()
    trainer = mx.gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    inputs = mx.nd.array(np.random.default_rng(0).normal(size=(6, 1, 8, 8)), ctx=context)
    for _ in range(5):
        with mx.autograd.record():
            loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()(net(inputs), mx.nd.arange(6, ctx=context) % 3)
        loss.backward()
        trainer.step(6)
        losses.append(loss.asnumpy().tolist())
    return losses, [parameter.data().asnumpy().tolist() for parameter in net.collect_params().values()]


def test_a_training_in_float32_has_the_numbers_of_the_cpu():
    assert train(mx.gpu(0)) == train(mx.cpu())


def test_an_operator_without_a_kernel_is_refused():
    with pytest.raises(mx.MXNetError, match="32-bit and 64-bit"):
        mx.nd.linalg.syrk(on_gpu(np.eye(2), "float16")).wait_to_read()


# -- faults that only a device with float16 shows ----------------------------------------------------------------------


def computes_in():
    ones = on_gpu(np.ones((2, 2)))
    with ampx.init("mxnet", dtype="float16"):
        return np.dtype(mx.nd.FullyConnected(ones, ones, num_hidden=2, no_bias=True).dtype).name


def trained(level, slope=1.0, steps=1):
    """Train a weight of 1 in float16 with this gradient; return its values, and whether the last step was applied."""
    with ampx.init("mxnet", dtype="float16", level=level, loss_scale=ampx.LossScale(init_scale=2.0**8)) as amp:
        net = nn.Dense(1, in_units=2, use_bias=False)
        net.initialize(mx.init.One(), ctx=mx.gpu(0))
        raw = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 2.0**-13})
        opt = amp.wrap_optimizer(raw)
        if level != "O1":
            amp.prepare(net, opt)
        inputs = on_gpu(np.full((1, 2), slope))
        for _ in range(steps):
            with mx.autograd.record(), ampx.scale_loss(net(inputs).astype("float32").sum(), opt) as scaled:
                scaled.backward()
            opt.step(1)
        return net.weight.data().astype("float32").asnumpy().ravel().tolist(), opt.last_step.applied


def test_planted_faults_are_seen(monkeypatch):
    """A region that casts nothing, gradients that are not tested, updates that are rounded away."""
    assert computes_in() == "float16"
    assert trained("O1", slope=300.0) == ([1.0, 1.0], False)  # times the scale it is beyond float16
    assert trained("O2", steps=8) == ([1 - 2.0**-10] * 2, True)  # half a digit each, added up in the master
    with monkeypatch.context() as patch:
        patch.setattr(casting, "region", lambda plan, enabled: contextlib.nullcontext())
        patch.setattr(casting.switch, "current", lambda: None)
        assert computes_in() == "float32"
    with monkeypatch.context() as patch:
        patch.setattr(gradients, "_multi_all_finite", lambda *arrays, **_: mx.nd.ones((1,), ctx=mx.gpu(0)))
        assert trained("O1", slope=300.0) == ([-np.inf, -np.inf], True)
    with monkeypatch.context() as patch:
        patch.setattr(low_precision.LowParameter, "take_over_writes", lambda parameter: None)
        patch.setattr(
            low_precision.LowParameter,
            "updated",
            lambda parameter, place: low_precision.cast_tensor(parameter._data[place], "float32"),
        )
        assert trained("O2", steps=8) == ([1.0, 1.0], True)
