"""What only a GPU can show; for a CUDA build of MXNet."""

import math

import mxnet as mx
import numpy as np
import pytest

import ampx
from ampx.run import Run, RunSettings
from ampx_mxnet.convert import convert_hybrid_block
from ampx_mxnet.run import automate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(mx.context.num_gpus() == 0, reason="MXNet sees no GPU"),
]
# float16 keeps 11 significant bits: rounding changes a number by at most this share of it.
U = 2.0**-11


@pytest.fixture
def dense():
    """A layer on the GPU whose products come near no power of two."""
    layer = mx.gluon.nn.Dense(8, in_units=64, use_bias=False)
    layer.initialize(mx.init.Uniform(0.5), ctx=mx.gpu(0))
    return layer


def test_auto_chooses_float16():
    assert ampx.init("mxnet").effective.dtype == "float16"


def test_bfloat16_is_refused_with_what_works():
    with pytest.raises(ampx.UnsupportedDtypeError, match="float16"):
        ampx.init("mxnet", dtype="bfloat16", device="gpu")


def on_cpu():
    layer = mx.gluon.nn.Dense(1, in_units=2)
    layer.initialize()
    return mx.gluon.Trainer(layer.collect_params(), "sgd")


def test_a_trainer_of_parameters_on_the_cpu_is_refused():
    ampx.init("mxnet", dtype="float16")
    with pytest.raises(ampx.UnsupportedDtypeError, match=r"ctx=mx\.gpu\(\)"):
        ampx.wrap_optimizer(on_cpu())


@pytest.mark.filterwarnings("ignore:mixed precision is off on cpu:ampx.PrecisionWarning")  # simulated, without oneDNN
def test_a_script_that_does_without_the_gpu_runs_in_what_its_cpu_computes():
    run = Run("mxnet", RunSettings())
    with automate(run):
        on_cpu()
        assert run.amp.effective.device == "cpu"


@pytest.mark.parametrize("hybridize", [False, True])
def test_products_are_float16_and_accumulate_in_float32(dense, hybridize):
    """Operands and output are rounded once each; the products of 64 terms add up without further loss."""
    x = mx.nd.random.uniform(shape=(4, 64), ctx=mx.gpu(0))
    exact = x.asnumpy().astype("float64") @ dense.weight.data().asnumpy().astype("float64").T
    sizes = abs(x.asnumpy()) @ abs(dense.weight.data().asnumpy()).T
    if hybridize:
        dense.hybridize()
    with ampx.init("mxnet", dtype="float16"):
        output = dense(x)
        assert output.dtype == np.float16
        error = abs(output.asnumpy().astype("float64") - exact)
    assert (error <= ((1 + U) ** 3 - 1 + 64 * 2.0**-24) * sizes).all()
    assert error.max() > 2.0**-20


def test_float16_overflow_is_skipped_and_cured(dense):
    ampx.init("mxnet", dtype="float16", loss_scale=ampx.LossScale(init_scale=2.0**24))
    trainer = ampx.wrap_optimizer(mx.gluon.Trainer(dense.collect_params(), "sgd", {"learning_rate": 1e-3}))
    applied = []
    for _ in range(20):
        with mx.autograd.record():
            loss = dense(mx.nd.ones((4, 64), ctx=mx.gpu(0))).astype("float32").sum()
            with ampx.scale_loss(loss, trainer) as scaled:
                scaled.backward()
        trainer.step(1)
        applied.append(trainer.last_step.applied)
    assert not applied[0]
    assert applied[-1]
    assert np.isfinite(dense.weight.data().asnumpy()).all()


def test_gradients_that_add_are_true_sums():
    """Native MXNet adds up rightly in float16; ampx must not add a second time."""
    ampx.init("mxnet", dtype="float16", loss_scale=1024.0)
    layer = mx.gluon.nn.Dense(1, in_units=2, use_bias=False)
    layer.initialize(mx.init.One(), ctx=mx.gpu(0))
    layer.collect_params().setattr("grad_req", "add")
    trainer = ampx.wrap_optimizer(mx.gluon.Trainer(layer.collect_params(), "sgd", {"learning_rate": 0.125}))
    for _ in range(3):
        with mx.autograd.record():
            loss = layer(mx.nd.array([[1.0, 2.0]], ctx=mx.gpu(0))).astype("float32").sum()
            with ampx.scale_loss(loss, trainer) as scaled:
                scaled.backward()
    trainer.step(1)
    np.testing.assert_array_equal(layer.weight.data().asnumpy(), [[1 - 0.375, 1 - 0.75]])


@pytest.mark.parametrize("overflow", [0, 1])
def test_overflow_on_either_gpu_skips_on_both(overflow):
    if mx.context.num_gpus() < 2:
        pytest.skip("MXNet sees one GPU; this needs two")
    ampx.init("mxnet", dtype="float16", loss_scale="dynamic", nan_loss="skip")
    contexts = [mx.gpu(0), mx.gpu(1)]
    layer = mx.gluon.nn.Dense(1, in_units=2, use_bias=False)
    layer.initialize(mx.init.One(), ctx=contexts)
    trainer = ampx.wrap_optimizer(mx.gluon.Trainer(layer.collect_params(), "sgd", {"learning_rate": 0.25}))
    with mx.autograd.record():
        losses = [
            layer(mx.nd.ones((1, 2), ctx=context)).astype("float32").sum() * (math.inf if index == overflow else 1.0)
            for index, context in enumerate(contexts)
        ]
        with ampx.scale_loss(losses, trainer) as scaled:
            mx.autograd.backward(scaled)
    trainer.step(1)
    assert not trainer.last_step.applied
    for context in contexts:
        np.testing.assert_array_equal(layer.weight.data(context).asnumpy(), [[1.0, 1.0]])


def test_converted_block_computes_in_float16(dense):
    x = mx.nd.random.uniform(shape=(4, 64), ctx=mx.gpu(0))
    dense.hybridize()
    exact = dense(x).asnumpy()
    sizes = abs(x.asnumpy()) @ abs(dense.weight.data().asnumpy()).T
    converted = convert_hybrid_block(dense, cast_parameters=True)
    assert converted.collect_params()[dense.weight.name].dtype == np.float16
    error = abs(converted(x).astype("float32").asnumpy() - exact)
    assert (error <= ((1 + U) ** 3 - 1 + 64 * 2.0**-22) * sizes).all()
    assert error.max() > 2.0**-20
