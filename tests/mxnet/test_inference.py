"""`ampx.convert` in MXNet: a SymbolBlock that keeps norms and denied blocks, and is exported and imported."""

import importlib.util

import numpy as np
import pytest

if importlib.util.find_spec("mxnet") is None:
    pytest.skip("MXNet is not installed", allow_module_level=True)

import ampx
from ampx_mxnet.compat import mx
from ampx_mxnet.dtypes import name_of

pytestmark = pytest.mark.bfloat16


def array(*shape):
    values = mx.nd.empty(shape)
    values[:] = np.random.default_rng(0).normal(size=shape)
    return values


@pytest.fixture
def block():
    mx.random.seed(0)
    network = mx.gluon.nn.HybridSequential()
    network.add(
        mx.gluon.nn.Conv2D(8, 3, in_channels=1),
        mx.gluon.nn.BatchNorm(in_channels=8),
        mx.gluon.nn.Dense(16, in_units=8 * 36, activation="relu"),
        mx.gluon.nn.Dense(4, in_units=16),
    )
    network.initialize(mx.init.Xavier())
    return network


def test_operators_are_denied_as_blocks_are(block):
    low = ampx.convert(block, "bfloat16", batches=[array(4, 1, 8, 8)], deny=["FullyConnected"])
    stored = {name: name_of(parameter.dtype) for name, parameter in low.collect_params().items()}
    wide = {name for name, dtype in stored.items() if dtype == "float32"}
    assert {name for name in wide if name.endswith("weight")} == {f"{layer.prefix}weight" for layer in block[2:]}
    assert stored[f"{block[0].prefix}weight"] == "bfloat16"


# MXNet says so on import: it makes the block before it knows the input's dtype.
@pytest.mark.filterwarnings("ignore:Cannot decide type for the following arguments:UserWarning")
def test_a_converted_block_is_exported_and_imported(block, tmp_path):
    images = array(4, 1, 8, 8)
    low = ampx.convert(block, "bfloat16", batches=[images])
    expected = low(images).asnumpy()
    low.hybridize()
    low(images)
    low.export(str(tmp_path / "model"), remove_amp_cast=False)
    files = [str(tmp_path / name) for name in ("model-symbol.json", "model-0000.params")]
    loaded = mx.gluon.SymbolBlock.imports(files[0], ["data0"], files[1], ctx=mx.cpu())
    np.testing.assert_array_equal(loaded(images).asnumpy(), expected)


class Several(mx.gluon.HybridBlock):
    """Two inputs, two outputs, and a weight that is used twice."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.dense = mx.gluon.nn.Dense(4, in_units=4)

    def hybrid_forward(self, space, first, second):
        scores = self.dense(self.dense(first) + second)
        return scores, space.argmax(scores, axis=1)


def test_several_inputs_and_outputs(block):
    model = Several()
    model.initialize()
    inputs = array(2, 4), array(2, 4) * 2
    low = ampx.convert(model, "bfloat16", batches=[inputs], tolerance=0.05)
    assert len(list(low.collect_params())) == 2
    scores, choice = low(*inputs)
    assert choice.asnumpy().tolist() == model(*inputs)[1].asnumpy().tolist()
    np.testing.assert_allclose(scores.asnumpy(), model(*inputs)[0].asnumpy(), rtol=0.05, atol=0.05)


def test_what_mxnet_cannot_convert_is_refused(block):
    images = array(1, 1, 8, 8)
    with pytest.raises(ampx.UnsupportedDtypeError, match="float16"):
        ampx.convert(block, "float16", batches=[images])
    with pytest.raises(ampx.InvalidOptionError, match="HybridBlock"):
        ampx.convert(mx.gluon.nn.Sequential(), "bfloat16", batches=[images])
    with pytest.raises(ampx.InvalidOptionError, match="before it has weights"):
        ampx.convert(mx.gluon.nn.Dense(2), "bfloat16", batches=[images])
    with pytest.raises(ampx.InvalidOptionError, match="NDArrays"):
        ampx.convert(block, "bfloat16", batches=[np.ones((1, 1, 8, 8))])
