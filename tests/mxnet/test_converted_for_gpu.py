"""What a GPU would be given: the graph that training or conversion in float16 makes, with every result's dtype.

A CPU computes no float16 here, so that both refuse it; the device is described as a GPU's, and nothing is run.
"""

import mxnet as mx
import pytest

import ampx
import ampx_mxnet.backend  # loaded before a device is pretended, which it would keep
import ampx_mxnet.convert
from ampx_mxnet import devices, wrapping
from ampx_mxnet.dtypes import name_of

nn = mx.gluon.nn


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch):
    gpu = devices._describe_gpu()
    monkeypatch.setattr(devices, "describe", lambda name: gpu)  # conversion asks for the CPU
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 1)  # a backend that is loaded already asks itself
    monkeypatch.setattr(wrapping, "is_on_cpu", lambda trainer: False)  # though that is where the parameters are


def network():
    hidden = mx.sym.BatchNorm(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=16, name="first"), name="norm")
    return mx.sym.softmax(mx.sym.FullyConnected(hidden, num_hidden=4, name="last"), name="probabilities")


def dtypes(symbol, **inputs):
    """Infer, by name of a node, the dtype of its result where all that goes in is float32, but for these inputs."""
    parts = symbol.get_internals()
    _, results, _ = parts.infer_type(**{**dict.fromkeys(symbol.list_inputs(), "float32"), **inputs})
    names = [name.removesuffix("_output") for name in parts.list_outputs()]
    return {name: dtype.__name__ for name, dtype in zip(names, results, strict=True)}


class Training(mx.gluon.HybridBlock):
    """A convolutional network, and its loss."""

    def __init__(self):
        super().__init__(prefix="")
        with self.name_scope():
            self.network = nn.HybridSequential(prefix="")
            self.network.add(
                nn.Conv2D(4, 3, in_channels=1, prefix="convolution_"),
                nn.BatchNorm(in_channels=4, prefix="batch_norm_"),
                nn.Dense(8, in_units=4 * 6 * 6, activation="relu", prefix="hidden_"),
                nn.LayerNorm(in_channels=8, prefix="layer_norm_"),
                nn.Dense(4, in_units=8, prefix="last_"),
            )
            self.loss = mx.gluon.loss.SoftmaxCrossEntropyLoss(prefix="loss_")

    def hybrid_forward(self, space, images, labels):
        return self.loss(self.network(images), labels)


def trained(level, **options):
    """Return by name the dtypes of parameters and of the results of operators, of a network that trains on a GPU."""
    amp = ampx.init("mxnet", device="gpu", dtype="float16", level=level, **options)
    training = Training()
    training.initialize(ctx=mx.cpu())
    trainer = mx.gluon.Trainer(training.collect_params(), "sgd")
    if level != "O1":
        training.network, trainer = amp.prepare(training.network, trainer)
    amp.wrap_optimizer(trainer)
    parameters = {parameter.name: name_of(parameter.dtype) for parameter in training.collect_params().values()}
    results = dtypes(training(mx.sym.Variable("images"), mx.sym.Variable("labels")), **parameters)
    return parameters, results


PRODUCTS = {"convolution_fwd", "hidden_fwd", "last_fwd"}
# By level, the parameters that a backward trains in low precision.
WEIGHTS = {f"{layer}_{kind}" for layer in ("convolution", "hidden", "last") for kind in ("weight", "bias")}
LOW = {"O1": set(), "O2": WEIGHTS, "O3": {*WEIGHTS, "layer_norm_gamma", "layer_norm_beta"}}


def check_training(level, parameters, results):
    """Raise where products are not in float16, norms and the loss not in float32, or parameters as the level says."""
    assert {results[name] for name in PRODUCTS} == {"float16"}
    norm, loss = (
        [name for name in results if name.startswith(prefix) and word in name]
        for prefix, word in (("layer_norm_", "layernorm0"), ("loss_", "softmax"))
    )
    assert (len(norm), len(loss)) == (1, 1)
    assert (results[norm[0]], results[loss[0]]) == ("float32", "float32")
    assert {name for name, dtype in results.items() if name.startswith("loss_") and dtype != "float32"} == set()
    assert {name for name, dtype in parameters.items() if dtype == "float16"} == LOW[level]
    assert set(parameters.values()) <= {"float16", "float32"}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_network_that_trains_has_products_in_float16_and_norms_and_loss_in_float32(level, covers):
    check_training(level, *trained(level))
    covers("casting", "mxnet", f"gpu/float16/{level}", "rewritten for GPU")


@pytest.mark.parametrize("options", [{"deny": ["FullyConnected"]}, {"allow": ["log_softmax"]}], ids=str)
def test_a_planted_fault_of_a_network_that_trains_is_noticed(options):
    with pytest.raises(AssertionError):
        check_training("O1", *trained("O1", **options))


def test_the_check_of_a_network_that_trains_knows_the_levels_apart():
    with pytest.raises(AssertionError):
        check_training("O2", *trained("O3"))


def test_products_are_in_float16_and_softmax_in_float32():
    seen = dtypes(ampx_mxnet.convert.convert_symbol(network()))
    assert {name: seen[name] for name in ("first", "last", "probabilities")} == {
        "first": "float16",
        "last": "float16",
        "probabilities": "float32",
    }
    assert set(dtypes(network()).values()) == {"float32"}


@pytest.mark.parametrize("options", [{"exclude": ["last"]}, {"deny": ["FullyConnected"]}])
def test_what_is_left_out_stays_in_float32(options):
    seen = dtypes(ampx_mxnet.convert.convert_symbol(network(), **options))
    assert (seen["last"], seen["first"]) == ("float32", "float16" if "exclude" in options else "float32")


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_gpu_refuses_bfloat16(level, record_property):
    """MXNet's kernels for GPUs have no bfloat16."""
    with pytest.raises(ampx.UnsupportedDtypeError, match="float16") as refusal:
        ampx.init("mxnet", device="gpu", dtype="bfloat16", level=level)
    record_property("ampx.refused", ["mxnet", f"gpu/bfloat16/{level}", str(refusal.value)])
