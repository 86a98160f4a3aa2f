"""What a GPU would be given: the graph that conversion to float16 makes, with the dtype of every result in it.

A CPU computes no float16 here, so that conversion refuses it; the device is described as a GPU's, and nothing is run.
"""

import mxnet as mx
import pytest

import ampx
import ampx_mxnet.backend  # loaded before a device is pretended, which it would keep
import ampx_mxnet.convert
from ampx_mxnet import devices


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch):
    gpu = devices._describe_gpu()
    monkeypatch.setattr(devices, "describe", lambda name: gpu)  # conversion asks for the CPU
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 1)  # a backend that is loaded already asks itself


def network():
    hidden = mx.sym.BatchNorm(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=16, name="first"), name="norm")
    return mx.sym.softmax(mx.sym.FullyConnected(hidden, num_hidden=4, name="last"), name="probabilities")


def dtypes(symbol):
    """Infer, by name of a node, the dtype of its result where all that goes in is float32."""
    parts = symbol.get_internals()
    _, results, _ = parts.infer_type(**dict.fromkeys(symbol.list_inputs(), "float32"))
    names = [name.removesuffix("_output") for name in parts.list_outputs()]
    return {name: dtype.__name__ for name, dtype in zip(names, results, strict=True)}


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
