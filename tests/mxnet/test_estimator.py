"""Gluon's Estimator trains through a wrapped trainer."""

import math

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon, nd
from mxnet.gluon.contrib.estimator import BatchProcessor as NativeProcessor, Estimator

import ampx
from ampx_mxnet.estimator import BatchProcessor

CONTEXTS = [mx.cpu(0), mx.cpu(1)]


@pytest.fixture
def data():
    """Sixteen points of two classes that a line separates."""
    x = np.random.default_rng(0).normal(size=(16, 2)).astype("float32")
    dataset = gluon.data.ArrayDataset(nd.array(x), nd.array((x[:, 0] > x[:, 1]).astype("float32")))
    return gluon.data.DataLoader(dataset, batch_size=8)


def make_network(contexts):
    network = gluon.nn.Dense(2, in_units=2)
    network.initialize(mx.init.One(), ctx=contexts)
    return network, gluon.Trainer(network.collect_params(), "sgd", {"learning_rate": 0.5})


def fit(network, trainer, processor, data, contexts, metric=None, epochs=4):
    estimator = Estimator(
        network,
        gluon.loss.SoftmaxCrossEntropyLoss(),
        train_metrics=metric or mx.metric.Accuracy(),
        trainer=trainer,
        context=contexts,
        batch_processor=processor,
    )
    estimator.logger.disabled = True
    estimator.fit(data, val_data=data, epochs=epochs)
    return estimator


@pytest.mark.parametrize("contexts", [CONTEXTS[:1], CONTEXTS])
def test_scaled_training_is_native_training(amp, data, contexts):
    """Exactly, because the scale is a power of two."""
    network, raw = make_network(contexts)
    trainer = amp.wrap_optimizer(raw)
    fit(network, trainer, BatchProcessor(), data, contexts)
    assert trainer.last_step == ampx.StepResult(True, True, 2.0**16, 2.0**16, 0)
    oracle, plain = make_network(contexts)
    fit(oracle, plain, NativeProcessor(), data, contexts)
    np.testing.assert_array_equal(network.weight.data().asnumpy(), oracle.weight.data().asnumpy())
    assert trainer.optimizer.num_update == plain.optimizer.num_update == 8


@pytest.mark.bfloat16
def test_metrics_read_what_bfloat16_predicted(data):
    """NumPy has no bfloat16: what MXNet hands it instead are structures, not numbers."""
    amp = ampx.init("mxnet", dtype="bfloat16", loss_scale="dynamic")
    network, raw = make_network(CONTEXTS[:1])
    metric = mx.metric.CustomMetric(lambda labels, scores: (scores.argmax(1) == labels).mean(), name="share")
    fitted = fit(network, amp.wrap_optimizer(raw), BatchProcessor(), data, CONTEXTS[:1], metric, epochs=20)
    shares = [
        value
        for name, value in map(mx.metric.EvalMetric.get, (*fitted.train_metrics, *fitted.val_metrics))
        if "share" in name
    ]
    assert len(shares) == 2
    assert min(shares) > 0.9


def test_an_overflow_is_skipped(amp):
    network, raw = make_network(CONTEXTS[:1])
    trainer = amp.wrap_optimizer(raw)
    bad = gluon.data.DataLoader(gluon.data.ArrayDataset(nd.array([[math.inf, 1.0]]), nd.zeros((1,))), batch_size=1)
    fit(network, trainer, BatchProcessor(), bad, CONTEXTS[:1], epochs=1)
    assert not trainer.last_step.applied
    np.testing.assert_array_equal(network.weight.data().asnumpy(), np.ones((2, 2)))


def test_gluons_own_processor_is_refused_at_the_first_step(amp, data):
    network, raw = make_network(CONTEXTS[:1])
    with pytest.raises(ampx.NotScaledError):
        fit(network, amp.wrap_optimizer(raw), NativeProcessor(), data, CONTEXTS[:1])
    np.testing.assert_array_equal(network.weight.data().asnumpy(), np.ones((2, 2)))


def test_raw_trainer_is_refused(amp, data):
    network, raw = make_network(CONTEXTS[:1])
    with pytest.raises(ampx.NotWrappedError):
        fit(network, raw, BatchProcessor(), data, CONTEXTS[:1])
