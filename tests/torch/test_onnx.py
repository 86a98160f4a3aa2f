"""A converted model leaves PyTorch: exported to ONNX, it computes the same in ONNX Runtime on a CPU."""

import logging
import re

import numpy as np
import pytest
import torch
from torch import nn

import ampx
from ampx.backend import offer
from ampx.formats import FORMATS
from ampx.numerics.probe import Probe, Watching
from ampx.numerics.tune import Choice, TunedPolicy
from ampx.numerics.tune_script import exclusions
from ampx.plugins import default_registry

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")


class Network(nn.Module):
    """Convolution, normalization of two kinds, and a layer that is denied."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.body = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU())
        self.head = nn.Linear(64, 10)

    def forward(self, images):
        return self.head(self.body(self.features(images).mean((2, 3))))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore::DeprecationWarning")
def test_an_exported_model_computes_the_same_in_onnx_runtime(tmp_path):
    model, batch = Network(), torch.randn(3, 1, 8, 8)
    model(torch.randn(32, 1, 8, 8) + 0.5)  # running statistics
    low = ampx.convert(model, batches=[batch], deny=["module:head"])
    file = tmp_path / "model.onnx"
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # which operators of torchvision there would be
    torch.onnx.export(
        low,
        (batch,),
        file,
        dynamo=True,
        external_data=False,
        verbose=False,
        dynamic_shapes=({0: "n"},),
    )
    graph = onnx.load(file).graph
    stored = {tuple(sorted(entry.dims)): entry.data_type for entry in graph.initializer}  # some are transposed
    assert stored[1, 3, 3, 16] == stored[16, 64] == onnx.TensorProto.FLOAT16
    assert stored[10, 64] == onnx.TensorProto.FLOAT
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (entry,) = session.get_inputs()
    for images in (batch, torch.randn(5, 1, 8, 8)):
        (output,) = session.run(None, {entry.name: images.numpy()})
        expected = low(images).numpy()
        assert output.dtype == np.float32
        # The two add in another order, in each of half a dozen operations.
        error = np.linalg.norm(output - expected) / np.linalg.norm(expected)
        assert error < 6 * 2.0 ** -FORMATS["float16"].bits


class Stages(nn.Module):
    """Modules in containers that are called, and in some that are not."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        self.blocks = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(4, 4)})])
        self.rows = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])

    def forward(self, x):
        x = self.blocks[0]["up"](self.first(x))
        return self.rows[1](self.rows[0](x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_names_for_conversion_tools_are_those_of_the_nodes_of_the_module(tmp_path):
    model, batch = Stages(), torch.randn(2, 4)
    with offer(default_registry().load("torch"), Probe).watch(model, Watching()) as watch:
        model(batch)
    modules = tuple(dict.fromkeys(reading.module for reading in watch.readings()))
    torch.onnx.export(model, (batch,), tmp_path / "model.onnx", dynamo=False)
    nodes = [node.name for node in onnx.load(tmp_path / "model.onnx").graph.node if node.op_type == "Gemm"]
    layers = ["first.0", "first.1.0", "first.1.1", "blocks.0.up", "rows.0.0", "rows.1.0"]
    assert len(nodes) == len(layers)
    for position, layer in enumerate(layers):
        choices = (Choice(f"module:{layer}", ""),)
        (names,) = exclusions(TunedPolicy("torch", "cpu", "float16", "O1", 1.0, choices, modules=modules))
        assert [node for node in nodes if re.match(names["regex"], node)] == [nodes[position]]
