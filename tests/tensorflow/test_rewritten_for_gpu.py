"""Graphs as TensorFlow's rewriter leaves them for an NVIDIA GPU that is described to it, and is not there.

Which dtypes come out this shows. That the kernels run, their numbers and their speed it does not.
"""

import contextlib
import functools
import os
import warnings

import keras
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, device_properties_pb2
from tensorflow.python.grappler import cluster, tf_optimizer

import ampx
from ampx_tensorflow import gradients, rewrite
from evidence import COMBINATIONS

v1 = tf.compat.v1
WHERE = "/job:localhost/replica:0/task:0/device:"
GPU = f"{WHERE}GPU:0"
LOW = {"float16", "bfloat16"}
# All GPUs; else the newest: without the option, no rewriter asks which it is.
THOROUGH = bool(os.environ.get("AMPX_TEST_ALL"))


def machine(capability):
    """Describe a machine with a CPU and an NVIDIA GPU."""
    cpu, gpu = (device_properties_pb2.NamedDevice(name=f"{WHERE}{kind}:0") for kind in ("CPU", "GPU"))
    cpu.properties.type, gpu.properties.type = "CPU", "GPU"
    gpu.properties.environment.update(architecture=capability, cuda="12000")
    return cluster.Cluster(devices=[cpu, gpu])


def rewritten(graph, capability="9.0", dtype="float16"):
    """Return a graph as the option that ampx switches on for a dtype leaves it on such a GPU.

    With dtype None no option is on: it is left to all rewriters that TensorFlow runs by itself.
    """
    with graph.as_default():
        exported = v1.train.export_meta_graph(graph=graph)
    for node in exported.graph_def.node:
        node.device = GPU
    config = config_pb2.ConfigProto()
    options = config.graph_options.rewrite_options
    options.min_graph_nodes, options.fail_on_optimizer_errors = -1, True
    options.optimizers.extend([] if dtype is None else [rewrite._OPTIONS[dtype][0]])
    return tf_optimizer.OptimizeGraph(config, exported, cluster=machine(capability), verbose=False)


def as_traced(graph):
    return graph.as_graph_def()


def operations(definition):
    """Return the operations of a graph and of its functions, each with its dtype, if it has one."""
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    types = [(node.op, node.attr["T"].type or node.attr["dtype"].type) for node in nodes]  # 0 where there is none
    return [(op, tf.dtypes.as_dtype(dtype).name if dtype else "") for op, dtype in types]


def dtypes(definition, name):
    return {dtype for op, dtype in operations(definition) if op == name}


def keep(*outputs):
    """Have outputs of the graph kept, and what they need."""
    for output in outputs:
        v1.add_to_collection("train_op", output)


def loss_and_gradient(exponential=tf.exp):
    """Return the graph of a loss with two products and an exponential, and of its gradient."""
    with tf.Graph().as_default() as graph:
        x, w = v1.placeholder(tf.float32, [32, 64]), v1.get_variable("w", [64, 64], use_resource=True)
        loss = tf.reduce_mean(exponential(tf.matmul(tf.nn.relu(tf.matmul(x, w)), w)))
        keep(loss, tf.identity(v1.gradients(loss, w)[0]))
    return graph


def check_graph(definition, dtype):
    """Raise where products are computed in another dtype than this, or sensitive operations not in float32."""
    assert dtypes(definition, "MatMul") == {dtype}
    for name in ("Exp", "Mean"):
        assert dtypes(definition, name) == {"float32"}, name


@pytest.mark.parametrize("capability", ["9.0", "7.0"])
def test_products_are_float16_on_tensor_cores_and_sensitive_operations_float32(capability, covers):
    check_graph(rewritten(loss_and_gradient(), capability), "float16")
    covers("casting", "tensorflow", "gpu/float16/O1", "rewritten for GPU")


def test_nothing_is_rewritten_where_there_are_no_tensor_cores():
    definition = rewritten(loss_and_gradient(), "6.1")
    check_graph(definition, "float32")
    assert "float16" not in {dtype for _, dtype in operations(definition)}


def test_the_option_for_bfloat16_changes_nothing_on_a_gpu():
    definition = rewritten(loss_and_gradient(), dtype="bfloat16")
    check_graph(definition, "float32")
    assert "bfloat16" not in {dtype for _, dtype in operations(definition)}


def low_exponential(values):
    return tf.cast(tf.exp(tf.cast(values, tf.float16)), tf.float32)


@pytest.mark.parametrize(
    ("graph", "by", "word"),
    [
        (loss_and_gradient, as_traced, "float32"),
        (lambda: loss_and_gradient(low_exponential), rewritten, "Exp"),
    ],
    ids=["not rewritten", "an exponential in float16"],
)
def test_a_planted_fault_of_a_graph_is_noticed(graph, by, word):
    with pytest.raises(AssertionError, match=word):
        check_graph(by(graph()), "float16")


def layers():
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(8, activation="relu"), keras.layers.LayerNormalization()]
    )
    model.add(keras.layers.Dense(1))
    return model


class Products(tf.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = tf.Variable(tf.ones([8, 8])), tf.Variable(tf.ones([8, 1]))

    def __call__(self, x):
        return tf.matmul(tf.nn.relu(tf.matmul(x, self.first)), self.second)


def whole_step(network, dtype="float16", level="O1", finite=True, tell=None):
    """Return the graph of a step: forward, backward, unscaling, the test, clipping and the update."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampx.PrecisionWarning)  # a CPU is slow in these
        ampx.init("tensorflow", device="cpu", dtype=dtype, level=level, loss_scale="dynamic")
    model, opt = network(), keras.optimizers.Adam(0.01)
    if finite:
        opt = ampx.wrap_optimizer(opt, max_grad_norm=1.0)
    if level in ("O2", "O3"):
        ampx.prepare(model, opt)
    variables = model.trainable_variables
    opt.build(variables)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(model(x), tf.float32) - y))
            with ampx.scale_loss(loss, opt) if finite else contextlib.nullcontext(loss) as scaled:
                pass
        opt.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))
        if tell is not None:
            tell(loss)
        return loss

    graph = step.get_concrete_function(tf.TensorSpec([4, 8]), tf.TensorSpec([4, 1])).graph
    with graph.as_default():
        keep(*graph.outputs, *graph.control_outputs)
    return graph


def check_step(definition, dtype="float16", level="O1"):
    """Raise where a step of two products, which are five with their derivatives, is not what it is to be on a GPU."""
    nodes = operations(definition)
    updated = dtype if level == "O3" else "float32"
    assert [kind for op, kind in nodes if op == "MatMul"] == [dtype] * 5
    # The norm of all gradients is tested and divided by in float32 at every level.
    for name in ("IsFinite", "RealDiv", "Sqrt"):
        assert dtypes(definition, name) == {"float32", updated}, name
    # Div takes the scale out of the gradients; a scale of 2**16 is infinite in float16.
    for name in ("Mean", "Div"):
        assert dtypes(definition, name) == {"float32"}, name
    assert dtypes(definition, "AssignSubVariableOp") == {updated}, "what is updated"
    # Float32 copies are rounded into two kernels and two biases.
    rounded = [op for op, kind in nodes if op == "AssignVariableOp" and kind in LOW]
    assert len(rounded) == (4 if level == "O2" else 0), "what is rounded"
    # Variables are read and written in one branch only, or in one of two where the meter looks at some updates; the
    # rewriter makes switches of it.
    switches = ("Switch", "resource"), ("_SwitchN", "resource")
    branch = [op for op, kind in nodes if op in ("If", "Case") or (op, kind) in switches]
    assert branch, "the step that is skipped is no branch of the device"
    assert not [op for op, _ in nodes if "Py" in op or "Print" in op or "Host" in op], "the host has a part"


def check_layers(definition, dtype, level):
    """Raise where a step of layers with a normalization between them is not what it is to be on a GPU."""
    check_step(definition, dtype, level)
    for name in ("Rsqrt", "SquaredDifference"):
        assert dtypes(definition, name) == {"float32"}, name
    assert {kind for _, kind in operations(definition)} & LOW == {dtype} & LOW


@functools.cache
def step_of_layers(dtype, level):
    return whole_step(layers, dtype, level)


@pytest.mark.parametrize(("dtype", "level"), COMBINATIONS)
def test_a_step_of_layers_computes_as_its_policies_say(dtype, level, covers):
    """Layers cast by their policies, on any GPU, and no rewriter that TensorFlow runs by itself changes that."""
    graph = step_of_layers(dtype, level)
    for capability in ("9.0", "7.0", "6.1") if THOROUGH else ("9.0",):
        check_layers(rewritten(graph, capability, None), dtype, level)
    for aspect in ("casting",) * (level != "O0") + ("scaling",) + ("master weights",) * (level == "O2"):
        covers(aspect, "tensorflow", f"gpu/{dtype}/{level}", "rewritten for GPU")


# How a step was traced, as what it is checked, and a word of what notices that these differ.
MISTAKEN = [
    (("float32", "O0"), ("float16", "O1"), "float32"),
    (("float16", "O1"), ("bfloat16", "O1"), "float16"),
    (("bfloat16", "O1"), ("bfloat16", "O2"), "what is rounded"),
    (("bfloat16", "O2"), ("bfloat16", "O1"), "what is rounded"),
    (("float16", "O3"), ("float16", "O2"), "IsFinite"),
    (("float16", "O2"), ("float16", "O3"), "IsFinite"),
]


@pytest.mark.parametrize(("traced", "checked", "word"), MISTAKEN)
def test_a_step_of_another_dtype_or_level_is_noticed(traced, checked, word):
    with pytest.raises(AssertionError, match=word):
        check_layers(rewritten(step_of_layers(*traced), dtype=None), *checked)


def test_a_step_of_plain_variables_is_rewritten_up_to_its_gradients(covers):
    check_step(rewritten(whole_step(Products)))
    for aspect in ("casting", "scaling"):
        covers(aspect, "tensorflow", "gpu/float16/O1", "rewritten for GPU")


# What is planted, and a word of what notices it.
FAULTS = {
    "not rewritten": (as_traced, {}, "float32"),
    "nothing is tested": (rewritten, {"finite": False}, "IsFinite"),
    "a print": (rewritten, {"tell": tf.print}, "the host"),
    "a call of Python": (rewritten, {"tell": lambda loss: tf.py_function(float, [loss], tf.float32)}, "the host"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_a_step_is_noticed(fault):
    by, planted, word = FAULTS[fault]
    with pytest.raises(AssertionError, match=word):
        check_step(by(whole_step(Products, **planted)))


def test_a_division_that_the_rewriter_moves_to_float16_is_noticed(monkeypatch):
    monkeypatch.setattr(gradients, "unscale", lambda grads, scale: [grad / scale for grad in grads])
    with pytest.raises(AssertionError, match="IsFinite"):
        check_step(rewritten(whole_step(Products)))
