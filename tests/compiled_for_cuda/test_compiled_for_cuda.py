"""A whole step, compiled for an H200 by JAX's compiler for NVIDIA GPUs: its kernels, donated memory, and peak memory.

That it runs, its numbers and its speed this does not show.
"""

import collections
import functools
import math
import re
import warnings

import h200
import pytest

from evidence import COMBINATIONS

try:
    DEVICES = h200.devices(2)
except (h200.CannotCompileError, ImportError) as reason:
    pytest.skip(f"cannot compile for CUDA: {reason}", allow_module_level=True)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ampx
import ampx_jax

SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
WIDTH, LAYERS, BATCH = 1024, 4, 8192
PRODUCTS = 3 * LAYERS - 1  # one forward and two backward each; nobody asks for the gradient of the first one's input
OF_THE_NORM = 2  # parameters, of one dimension
LOW = [combination for combination in COMBINATIONS if combination[0] != "float32"]
ADDS = "add|subtract|multiply|divide|sqrt|rsqrt|power"


@functools.cache  # JAX's own cache cannot read what was compiled for an absent device
def compiled(dtype, level, devices):
    """Compile a step of a network of `LAYERS` layers and a norm, its batch divided among the devices.

    Return it, and the bytes of the arrays of its parameters and its state.
    """

    @ampx_jax.autocast
    def network(params, x):
        for weight in params["weights"]:
            x = jnp.tanh(x @ weight)
        x = jax.nn.standardize(x) * params["norm"]["scale"] + params["norm"]["bias"]
        return jax.nn.log_softmax(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampx.PrecisionWarning)  # a CPU is slow in these
        ampx.init("jax", device="cpu", dtype=dtype, level=level, loss_scale="dynamic")
    try:
        tx = ampx.wrap_optimizer(optax.adam(1e-3))

        def step(params, state, x):
            def scaled_loss(params):
                with ampx.scale_loss(-jnp.mean(network(params, x)), state) as scaled:
                    return scaled

            updates, state = tx.update(jax.grad(scaled_loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        step.__name__ = f"step_{dtype}_{level}_{devices}"
        params = {
            "weights": [jnp.ones((WIDTH, WIDTH))] * LAYERS,
            "norm": {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)},
        }
        params, state = ampx.prepare(params, tx.init(params))
        arrays = sum(leaf.nbytes for leaf in jax.tree.leaves((params, state)) if leaf.ndim)
        mesh = Mesh(np.array(DEVICES[:devices]), ("data",))

        def on(tree, *axes):
            where = NamedSharding(mesh, PartitionSpec(*axes))
            return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), tree)

        arguments = on(params), on(state), on(jnp.ones((BATCH, WIDTH)), "data")
        traced = jax.jit(step, donate_argnums=(0, 1)).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).compile(), arrays
    finally:
        ampx.shutdown()


def program(dtype, level, devices=1):
    """Return the text of a compiled step."""
    return compiled(dtype, level, devices)[0].as_text()


def operands(text, operations):
    """Return the dtypes of what some operations of a program get, one entry for each operation."""
    dtypes = dict(re.findall(r"%?([\w.-]+) = (\w+)\[", text))
    calls = re.findall(rf"\](?:\{{[\d,]*\}})? (?:{operations})\(([^)]*)\)", text)
    return [tuple(dtypes[name] for name in re.findall(r"%([\w.-]+)", call)) for call in calls]


def stored(text, shape=f"{WIDTH},{WIDTH}"):
    """Count the arrays of a shape, by default a weight's, that a program gets and that it returns, by their dtypes."""
    layout = re.search(r"entry_computation_layout=\{\((.*?)\)->\((.*?)\)\}", text).groups()
    return tuple(collections.Counter(re.findall(rf"(\w+)\[{shape}\]", side)) for side in layout)


def branches(text):
    """Return the branch that updates and the one that skips, each with all that it calls.

    At O3 there is another condition, in which the meter counts.
    """
    conditions = re.findall(r" conditional\(.*branch_computations=\{([^}]*)\}", text)
    bodies = dict(re.findall(r"^%([\w.-]+) \(.*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))

    def whole(name):
        called = re.findall(r"(?:calls|to_apply|body|condition)=%([\w.-]+)", bodies[name])
        return bodies[name] + "".join(whole(other) for other in dict.fromkeys(called))

    pairs = [[whole(name.strip("% ")) for name in condition.split(",")] for condition in conditions]
    ((skip, update),) = (pair for pair in pairs if operands(pair[1], "sqrt|rsqrt"))
    return update, skip


def tensor_core_instructions(dtype, level):
    """Return the dtypes that the kernels' Tensor Core instructions name: of the sum, the factors and the result."""
    kernels = list(h200.KERNELS.glob(f"*.jit_step_{dtype}_{level}_1.*.ptx"))
    assert kernels, "the compiler left no kernel"
    named = (re.findall(r"\bmma\.sync\.aligned\.\w+\.row\.col\.([\w.]+)", kernel.read_text()) for kernel in kernels)
    return set().union(*named)


@pytest.mark.parametrize(("dtype", "level"), COMBINATIONS)
def test_products_have_factors_of_the_dtype_and_the_host_has_no_part(dtype, level, covers):
    text = program(dtype, level)
    assert collections.Counter(operands(text, "dot")) == {(SHORT[dtype],) * 2: PRODUCTS}
    assert not re.findall(r"custom_call_target|infeed|outfeed|\bsend\b|\brecv\b", text)
    norm = collections.Counter(operands(text, "rsqrt"))
    norm -= collections.Counter(operands("".join(branches(text)), "rsqrt"))
    assert norm
    assert set(norm) == {("f32",)} or level == "O3"
    weights = SHORT["float32" if level in ("O0", "O1") else dtype]
    for side in stored(text):
        assert side[weights] >= LAYERS
    if level != "O0":
        covers("casting", "jax", f"cuda/{dtype}/{level}", "compiled for CUDA")


@pytest.mark.parametrize(("dtype", "level"), COMBINATIONS)
def test_gradients_are_tested_in_float32_and_a_branch_of_the_device_skips(dtype, level, covers):
    text = program(dtype, level)
    update, skip = branches(text)
    # The largest numbers of either sign, whose bits say it, are those of integers with and without a sign.
    dtypes = dict(re.findall(r"%?([\w.-]+) = (\w+)\[", text))
    tested = [dtypes[name] for name in re.findall(r" = u32\[\S+ bitcast\(%([\w.-]+)\)", text)]
    assert tested == ["f32"] * (LAYERS + OF_THE_NORM)
    assert not re.findall(r" = u32\[\S+ bitcast\(", "".join(branches(text)))
    assert operands(update, "sqrt|rsqrt"), "the branch of an applied step does not update"
    assert not operands(skip, "sqrt|rsqrt|divide"), "the branch of a skipped step updates"
    covers("scaling", "jax", f"cuda/{dtype}/{level}", "compiled for CUDA")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_copies_and_norms_are_float32_and_updated_in_float32(dtype, covers):
    """At O3, where there are none, the same look at the program sees low precision."""
    text, without = program(dtype, "O2"), program(dtype, "O3")
    low = SHORT[dtype]
    for side in stored(text):
        assert side == {low: LAYERS, "f32": 3 * LAYERS}  # the weights; their copies and the two moments of Adam
    for side in stored(text, str(WIDTH)):
        assert side == {"f32": 3 * OF_THE_NORM}
    for side in stored(without):
        assert side == {low: 3 * LAYERS}
    computed = [set().union(*operands(branches(each)[0], ADDS)) & set(SHORT.values()) for each in (text, without)]
    assert computed[0] == {"f32"}
    assert low in computed[1] or dtype == "bfloat16"  # in which kernels compute by float32, rounded
    covers("master weights", "jax", f"cuda/{dtype}/O2", "compiled for CUDA")


@pytest.mark.parametrize(("dtype", "level"), COMBINATIONS)
def test_products_are_of_tensor_cores_that_sum_in_float32(dtype, level):
    """A GPU rounds float32 factors to TF32."""
    compiled(dtype, level, 1)
    factor = "tf32" if dtype == "float32" else SHORT[dtype]
    assert tensor_core_instructions(dtype, level) == {f"f32.{factor}.{factor}.f32"}


@pytest.mark.parametrize(("dtype", "level"), COMBINATIONS)
def test_parameters_and_state_are_donated(dtype, level):
    step, arrays = compiled(dtype, level, 1)
    assert step.memory_analysis().alias_size_in_bytes >= arrays


@pytest.mark.parametrize(("dtype", "level"), LOW)
def test_less_is_kept_than_in_float32(dtype, level):
    steps = compiled(dtype, level, 1)[0], compiled("float32", "O0", 1)[0]
    low, full = (step.memory_analysis().temp_size_in_bytes for step in steps)
    print(f"temporary memory: {full / 2**20:.0f} MiB in float32, {low / 2**20:.0f} MiB in {dtype} at {level}")
    # The backward pass needs the input of every layer but the first again, and of each two bytes an element are saved.
    assert full - low >= 2 * BATCH * WIDTH * (LAYERS - 1)


@pytest.mark.parametrize(("dtype", "level"), COMBINATIONS)
def test_two_gpus_add_up_each_gradient_once_in_the_dtype_of_its_parameter(dtype, level, covers):
    """At O1 that is float32: a sum in float16 would overflow, with more devices earlier, at scales that each can bear.

    What overflows in a sum of low-precision gradients is infinite on both, and both skip.
    """
    text = program(dtype, level, 2)
    summed = collections.Counter()
    for shapes in re.findall(r" = (\S.*?) all-reduce(?:-start)?\(", text):
        for kind, shape in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            summed[kind] += math.prod(int(length) for length in shape.split(",") if length)
    weights, norm = LAYERS * WIDTH * WIDTH, OF_THE_NORM * WIDTH
    low = SHORT[dtype]
    expected = {"O2": {low: weights, "f32": norm}, "O3": {low: weights + norm}}
    assert summed == expected.get(level, {"f32": weights + norm})
    assert branches(text), "no branch of the device skips"
    covers("distributed", "jax", f"cuda/{dtype}/{level}", "compiled for CUDA")
