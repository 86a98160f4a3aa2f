"""Graphs as TensorFlow's rewriter leaves them for NVIDIA GPUs that are described to it, and are not there.

Which dtypes come out this shows; of two replicas, what each asks the other; of a checkpoint, that it leads to the same
graph and variables. That the kernels run, their numbers and speed, and that GPUs talk to one another, it does not.
"""

import collections
import contextlib
import functools
import hashlib
import os
import pathlib
import typing
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, device_properties_pb2, meta_graph_pb2
from tensorflow.python.grappler import cluster, tf_optimizer

import ampx
import processes
from ampx_tensorflow import device_scale, gradients, rewrite
from evidence import COMBINATIONS
from keras_networks import Products, layers

v1 = tf.compat.v1
WHERE = "/job:localhost/replica:0/task:0/device:"
GPU = f"{WHERE}GPU:0"
LOW = {"float16", "bfloat16"}
# All GPUs; else the newest: without the option, no rewriter asks which it is.
THOROUGH = bool(os.environ.get("AMPX_TEST_ALL"))


def machine(capability):
    """Describe a machine with a CPU and two NVIDIA GPUs."""
    devices = [device_properties_pb2.NamedDevice(name=f"{WHERE}{name}") for name in ("CPU:0", "GPU:0", "GPU:1")]
    for device in devices:
        device.properties.type = device.name.removeprefix(WHERE).partition(":")[0]
    for gpu in devices[1:]:
        gpu.properties.environment.update(architecture=capability, cuda="12000")
    return cluster.Cluster(devices=devices)


def rewritten(graph, capability="9.0", dtype="float16"):
    """Return a graph as the option that ampx switches on for a dtype leaves it on such a GPU: see `optimized`."""
    with graph.as_default():
        exported = v1.train.export_meta_graph(graph=graph)
    for node in exported.graph_def.node:
        node.device = GPU
    return optimized(exported, capability, dtype)


def optimized(exported, capability, dtype):
    """Return an exported graph, which is on GPUs, as an option leaves it.

    With dtype None no option is on: it is left to all rewriters that TensorFlow runs by itself.
    """
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
    return [(node.op, dtype_of(node)) for node in nodes]


def dtype_of(node):
    """Return the dtype of an operation; "" where it has none."""
    dtype = node.attr["T"].type or node.attr["dtype"].type
    return tf.dtypes.as_dtype(dtype).name if dtype else ""


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


class Traced(typing.NamedTuple):
    """The graph of a step, and the model and optimizer that it changes."""

    graph: typing.Any
    model: typing.Any
    opt: typing.Any


def whole_step(*args, **options):
    """Return the graph of a step: see `trace`."""
    return trace(*args, **options).graph


def trace(network, dtype="float16", level="O1", finite=True, tell=None, checkpoint=None):
    """Trace a step: forward, backward, unscaling, the test, clipping and the update; after reading a checkpoint."""
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
    if checkpoint is not None:
        tf.train.Checkpoint(model=model, optimizer=opt).read(checkpoint).assert_consumed()

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
    return Traced(graph, model, opt)


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
def trace_layers(dtype, level):
    return trace(layers, dtype, level)


def step_of_layers(dtype, level):
    return trace_layers(dtype, level).graph


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


# -- a checkpoint -------------------------------------------------------------------------------------------


def variables(traced):
    """Return the bits of all variables of a model and its optimizer, as steps compute with them and as they are saved.

    At O2 a variable is saved in float32, and computed with in low precision.
    """
    kept = [*traced.model.variables, *traced.opt.variables]
    computed = [variable.value.numpy() for variable in kept]
    return [values.tobytes() for values in (*computed, *map(np.asarray, kept))]


def fill(traced):
    """Write something else into every variable, as steps would."""
    numbers = np.random.default_rng(0)
    for variable in (*traced.model.variables, *traced.opt.variables):
        floating = tf.as_dtype(variable.dtype).is_floating
        drawn = numbers.uniform(0.5, 1.5, variable.shape) if floating else numbers.integers(3, 99, variable.shape)
        variable.assign(tf.cast(drawn, variable.dtype))


class Digest:
    """Hashes of what a graph computes, whatever its nodes are called: of every node, of all that it is made of."""

    # Attributes that say how something is called.
    NAMES = ("_class", "_gradient_op_type", "_output_shapes", "_user_specified_name", "shared_name")

    def __init__(self, definition, inputs):
        """Take a graph, and the names of its inputs in their order."""
        self._functions = {function.signature.name: function for function in definition.library.function}
        self.nodes = collections.Counter(self._computed(definition.node, self._hash(definition.node, inputs)))

    def _hash(self, definitions, inputs):
        """Return the hash of each node by its name."""
        nodes, places = {node.name: node for node in definitions}, {name: place for place, name in enumerate(inputs)}
        hashes = {name: f"input {place}" for name, place in places.items() if name not in nodes}  # of a function
        waiting = list(nodes)
        while waiting:
            node = nodes[waiting[-1]]
            needed = [name.lstrip("^").partition(":")[0] for name in node.input]
            if missing := [name for name in needed if name not in hashes]:
                waiting.extend(missing)
            else:
                hashes[waiting.pop()] = self._hash_node(node, hashes, places.get(node.name))
        return hashes

    def _hash_node(self, node, hashes, place):
        said = [node.op, node.device, place]
        for name in sorted({*node.attr} - {*self.NAMES}):
            value = node.attr[name]
            called = value.func.name if value.HasField("func") else None
            said.append((name, value.SerializeToString(deterministic=True) if called is None else self._body(called)))
        data = [name.partition(":") for name in node.input if not name.startswith("^")]
        said.append([(hashes[name], output) for name, _, output in data])
        said.append(sorted(hashes[name[1:]] for name in node.input if name.startswith("^")))
        return hashlib.sha256(repr(said).encode()).hexdigest()

    def _body(self, name):
        function = self._functions[name]
        hashes = self._hash(function.node_def, [argument.name for argument in function.signature.input_arg])
        returned = [function.ret[argument.name].partition(":") for argument in function.signature.output_arg]
        return self._computed(function.node_def, hashes), [(hashes[name], output) for name, _, output in returned]

    @staticmethod
    def _computed(definitions, hashes):
        """Return the hashes of nodes, sorted; of equal constants, of which the rewriter leaves one or more, one."""
        constants = {hashes[node.name] for node in definitions if node.op == "Const"}
        return sorted([*constants, *(hashes[node.name] for node in definitions if node.op != "Const")])


def digest(traced):
    """Return the hashes of a step as it is rewritten for a GPU."""
    return Digest(rewritten(traced.graph, dtype=None), [tensor.op.name for tensor in traced.graph.inputs]).nodes


def check_goes_on(before, after):
    """Raise where a step that goes on from a checkpoint is another than the one that wrote it, or starts elsewhere."""
    assert variables(after) == variables(before), "the variables"
    assert digest(after) == digest(before), "the graph"


@pytest.mark.parametrize(("dtype", "level"), COMBINATIONS)
def test_a_step_from_a_checkpoint_is_the_same_graph_of_variables_with_the_same_bits(dtype, level, tmp_path, covers):
    before = trace_layers(dtype, level)
    fill(before)
    path = tf.train.Checkpoint(model=before.model, optimizer=before.opt).write(tmp_path / "checkpoint")
    after = trace(layers, dtype, level, checkpoint=path)
    check_goes_on(before, after)
    covers("state", "tensorflow", f"gpu/{dtype}/{level}", "rewritten for GPU")


def test_a_step_that_holds_the_loss_scale_of_its_trace_is_noticed(tmp_path, monkeypatch):
    def factor(self, group, loss_id):
        with tf.init_scope():
            self.last_factor = tf.constant(float(self.scale))
        return tf.constant(float(self.last_factor))

    monkeypatch.setattr(device_scale.VariableLedger, "factor", factor)
    before = trace(layers)
    fill(before)
    path = tf.train.Checkpoint(model=before.model, optimizer=before.opt).write(tmp_path / "checkpoint")
    with pytest.raises(AssertionError, match="the graph"):
        check_goes_on(before, trace(layers, checkpoint=path))


def test_a_variable_that_no_checkpoint_holds_is_noticed():
    before = trace_layers("float16", "O2")
    fill(before)
    with pytest.raises(AssertionError, match="the variables"):
        check_goes_on(before, trace(layers, "float16", "O2"))


# -- two replicas -------------------------------------------------------------------------------------------

WORKER = pathlib.Path(__file__).with_name("replicas_for_gpu.py")


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """Return a function that gives the step of two replicas, traced in a process of its own, rewritten for two GPUs."""
    folder = tmp_path_factory.mktemp("replicas")
    policies = [f"{dtype} {level}" for dtype, level in COMBINATIONS]
    processes.run_python(WORKER, folder, *policies, CUDA_VISIBLE_DEVICES="-1", check=True, timeout=400)

    @functools.cache
    def rewritten_for_two(name, capability="9.0", dtype=None):
        exported = meta_graph_pb2.MetaGraphDef.FromString((folder / f"{name}.meta").read_bytes())
        bodies = [function.node_def for function in exported.graph_def.library.function]
        for node in [*exported.graph_def.node, *(node for body in bodies for node in body)]:
            node.device = node.device.replace("CPU", "GPU") or GPU
        if dtype is not None:  # an option alone leaves the branches of a condition in functions
            exported.graph_def.CopyFrom(optimized(exported, capability, dtype))
        return optimized(exported, capability, None)

    return rewritten_for_two


class Replicas:
    """The nodes of a graph, and what each depends on, on whichever replica."""

    def __init__(self, definition):
        self.nodes = {node.name: node for node in definition.node}
        self._partners = collections.defaultdict(list)
        for node in definition.node:
            if node.op == "CollectiveReduceV2":
                self._partners[self._place(node)].append(node)

    def on(self, gpu, op):
        """List the dtypes of an operation on one GPU."""
        nodes = [node for node in self.nodes.values() if node.op == op]
        return [dtype_of(node) for node in nodes if node.device == f"{WHERE}GPU:{gpu}"]

    def sums(self, gpu):
        """List the dtypes of the sums over replicas that one GPU takes part in, in order."""
        nodes = [node for place in sorted(self._partners) for node in self._partners[place]]
        return [dtype_of(node) for node in nodes if node.device == f"{WHERE}GPU:{gpu}"]

    def conditions(self):
        """Return the names of what decides whether variables are reached."""
        switches = [node for node in self.nodes.values() if node.op in ("Switch", "_SwitchN")]
        return {self._node(node.input[1]).name for node in switches if dtype_of(node) == "resource"}

    def behind(self, name):
        """Return what a node is computed from, where a sum over replicas is computed from what all put in."""
        behind, waiting = {}, [self.nodes[name]]
        while waiting:
            node = waiting.pop()
            if node.name in behind:
                continue
            behind[node.name] = node
            together = self._partners[self._place(node)] if node.op == "CollectiveReduceV2" else [node]
            waiting += [self._node(name) for each in together for name in each.input if not name.startswith("^")]
        return list(behind.values())

    def _node(self, name):
        return self.nodes[name.lstrip("^").partition(":")[0]]

    def _place(self, node):
        """Return how many sums over replicas a replica makes before one."""
        seen, waiting = set(), [node]
        while waiting:
            for name in map(self._node, waiting.pop().input):
                if name.name not in seen:
                    seen.add(name.name)
                    waiting.append(name)
        return sum(self.nodes[name].op == "CollectiveReduceV2" for name in seen)


def check_replicas(definition, dtype, level):
    """Raise where the step of two replicas is not what it is to be on two GPUs."""
    graph, gpus = Replicas(definition), {f"{WHERE}GPU:0", f"{WHERE}GPU:1"}
    updated = dtype if level == "O3" else "float32"
    assert {node.device for node in definition.node} == gpus
    for gpu in range(2):
        assert graph.on(gpu, "MatMul") == [dtype] * 5
        for name in ("Mean", "Div"):
            assert set(graph.on(gpu, name)) == {"float32"}, name
        assert set(graph.on(gpu, "AssignSubVariableOp")) == {updated}, "what is updated"
        # Who has an overflow is summed up in float32, and gradients in the dtype of what they update.
        assert set(graph.sums(gpu)) == {"float32", updated}, "what is summed"
    (condition,) = graph.conditions()
    assert {node.device for node in graph.behind(condition) if node.op == "IsFinite"} == gpus, "who is asked"
    # Replicas that sum up different things wait for one another for ever.
    assert graph.sums(0) == graph.sums(1)
    assert not [op for op, _ in operations(definition) if "Py" in op or "Print" in op or "Host" in op], "the host"


@pytest.mark.parametrize(("dtype", "level"), COMBINATIONS)
def test_two_replicas_step_together_and_sum_gradients_in_the_dtype_of_variables(replicas, dtype, level, covers):
    for capability in ("9.0", "7.0", "6.1") if THOROUGH else ("9.0",):
        check_replicas(replicas(f"{dtype} {level}", capability), dtype, level)
    covers("distributed", "tensorflow", f"gpu/{dtype}/{level}", "rewritten for GPU")


def test_two_replicas_that_clip_ask_both_and_sum_in_float32(replicas):
    check_replicas(replicas("clipped"), "float16", "O2")


@pytest.mark.parametrize(("capability", "dtype"), [("9.0", "float16"), ("7.0", "float16"), ("6.1", "float32")])
def test_the_products_of_two_replicas_are_rewritten_and_their_sums_are_not(replicas, capability, dtype):
    check_replicas(replicas("products", capability, "float16"), dtype, "O1")


# How two replicas were traced, and a word of what notices it.
MISTAKEN_REPLICAS = [
    ("alone", "who is asked"),
    ("low sums", "what is summed"),
    ("float16 O3", "what is updated"),
    ("bfloat16 O1", "bfloat16"),
    ("native", "Div"),
]


@pytest.mark.parametrize(("traced", "word"), MISTAKEN_REPLICAS)
def test_a_planted_fault_of_two_replicas_is_noticed(replicas, traced, word):
    with pytest.raises(AssertionError, match=word):
        check_replicas(replicas(traced), "float16", "O1")


def test_natively_one_replica_decides_for_both(replicas):
    """Should Keras learn to ask both, this fails, and its own answer is to be taken."""
    graph = Replicas(replicas("native"))
    tested = [node.device for name in graph.conditions() for node in graph.behind(name) if node.op == "IsFinite"]
    assert set(tested) == {GPU}
