"""`ampx.convert` in Paddle: an inference program that keeps norms, denied layers and tied weights, saved and loaded."""

import os

import numpy as np
import paddle
import pytest

import ampx
from ampx_paddle import devices

computed = pytest.mark.skipif(
    not devices.programs_compute_bfloat16(), reason="programs of Paddle compute no bfloat16 on this CPU"
)


class Network(paddle.nn.Layer):
    """Normalization of two kinds, and a weight that two layers share."""

    def __init__(self):
        super().__init__()
        self.features = paddle.nn.Sequential(paddle.nn.Linear(64, 32), paddle.nn.BatchNorm1D(32), paddle.nn.ReLU())
        self.wide = paddle.nn.Linear(32, 64)
        self.norm = paddle.nn.LayerNorm(64)
        self.first = paddle.nn.Linear(64, 64)
        self.second = paddle.nn.Linear(64, 64)
        self.second.weight = self.first.weight

    def forward(self, images):
        rows = self.norm(self.wide(self.features(images.flatten(1))))
        scores = self.second(paddle.nn.functional.relu(self.first(rows)))
        return scores, (rows, scores.shape[-1])


@pytest.fixture
def model():
    paddle.seed(0)
    return Network()


def dtypes(program):
    """Return the dtypes of what a program stores, by the kind of the layer."""
    stored = {}
    for value in program.state_dict().values():
        kind = value.name.rpartition("_")[0].split(".")[0].rstrip("_0123456789")
        stored.setdefault(kind, set()).add(str(value.dtype))
    return stored


@computed
def test_a_program_is_low_and_its_norms_are_not(model, tmp_path):
    images = paddle.randn([4, 1, 8, 8])
    before = {name: value.numpy() for name, value in model.state_dict().items()}
    low = ampx.convert(model, "bfloat16", batches=[images])
    kinds = dtypes(low)
    assert kinds["linear"] == {"paddle.bfloat16"}
    assert kinds["batch_norm1d"] == kinds["layer_norm"] == {"paddle.float32"}
    assert sum(value.shape == [64, 64] for value in low.state_dict().values()) == 1
    assert model.training
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), before[name])
    outputs = low(images)
    assert outputs[0].dtype == outputs[1].dtype == paddle.float32
    model.eval()
    np.testing.assert_allclose(outputs[0].numpy(), model(images)[0].numpy(), rtol=0.05, atol=0.05)
    sizes = []
    for name, layer in (("wide", model), ("low", low)):
        path = str(tmp_path / name)
        paddle.jit.save(layer, path, input_spec=[paddle.static.InputSpec([None, 1, 8, 8], "float32")])
        sizes.append(os.path.getsize(f"{path}.pdiparams"))
    assert sizes[1] < 0.6 * sizes[0]
    loaded = paddle.jit.load(str(tmp_path / "low"))
    np.testing.assert_array_equal(loaded(images)[0].numpy(), outputs[0].numpy())


@computed
def test_a_denied_layer_keeps_the_weight_that_it_shares(model):
    low = ampx.convert(model, "bfloat16", batches=[paddle.randn([4, 1, 8, 8])], deny=["module:second"])
    shared = [value for value in low.state_dict().values() if value.shape == [64, 64]]
    assert [str(value.dtype) for value in shared] == ["paddle.float32"]


def test_what_paddle_cannot_convert_is_refused(model):
    images = paddle.randn([4, 1, 8, 8])
    with pytest.raises(ampx.UnsupportedDtypeError, match="float16"):
        ampx.convert(model, "float16", batches=[images])
    with pytest.raises(ampx.InvalidOptionError, match="accepted: a paddle"):
        ampx.convert(paddle.nn.functional.relu, "bfloat16", batches=[images], framework="paddle")


@computed
def test_a_batch_that_is_no_tensor_is_refused(model):
    with pytest.raises(ampx.InvalidOptionError, match="tensors of Paddle"):
        ampx.convert(model, "bfloat16", batches=[np.ones((1, 1, 8, 8), "float32")])
