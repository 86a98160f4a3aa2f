"""A whole step, compiled for an H200 by JAX's compiler for NVIDIA GPUs: its kernels, donated memory, and peak memory.

That it runs, its numbers and its speed this does not show.
"""

import collections
import functools
import re
import warnings

import h200
import pytest

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


@pytest.fixture(params=["float16", "bfloat16"])
def dtype(request):
    return request.param


@functools.cache  # JAX's own cache cannot read what was compiled for an absent device
def compiled(dtype, devices=1):
    """Compile a step of a network of `LAYERS` layers, its batch divided among the devices."""

    @ampx_jax.autocast
    def network(params, x):
        for weight in params:
            x = jnp.tanh(x @ weight)
        return jax.nn.log_softmax(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampx.PrecisionWarning)  # a CPU is slow in these
        low = {} if dtype == "float32" else {"dtype": dtype, "loss_scale": "dynamic"}
        ampx.init("jax", device="cpu", level="O0" if dtype == "float32" else "O1", **low)
    try:
        tx = ampx.wrap_optimizer(optax.adam(1e-3))

        def step(params, state, x):
            def scaled_loss(params):
                with ampx.scale_loss(-jnp.mean(network(params, x)), state) as scaled:
                    return scaled

            updates, state = tx.update(jax.grad(scaled_loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        step.__name__ = f"step_{dtype}"
        params = [jnp.ones((WIDTH, WIDTH))] * LAYERS
        arguments = params, tx.init(params), jnp.ones((BATCH, WIDTH))
        mesh = Mesh(np.array(DEVICES[:devices]), ("data",))

        def on(tree, *axes):
            where = NamedSharding(mesh, PartitionSpec(*axes))
            return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), tree)

        arguments = on(arguments[0]), on(arguments[1]), on(arguments[2], "data")
        traced = jax.jit(step, donate_argnums=(0, 1)).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).compile()
    finally:
        ampx.shutdown()


def factors(text):
    """Count the products of a program by the dtypes of their factors."""
    dtypes = dict(re.findall(r"%?([\w.-]+) = (\w+)\[", text))
    products = re.findall(r" dot\(%?([\w.-]+), %?([\w.-]+)\)", text)
    return collections.Counter(tuple(dtypes[name] for name in names) for names in products)


def tensor_core_instructions(dtype):
    """Return the dtypes that the kernels' Tensor Core instructions name: of the sum, the factors and the result."""
    kernels = list(h200.KERNELS.glob(f"*.jit_step_{dtype}.*.ptx"))
    assert kernels, "the compiler left no kernel"
    named = (re.findall(r"\bmma\.sync\.aligned\.\w+\.row\.col\.([\w.]+)", kernel.read_text()) for kernel in kernels)
    return set().union(*named)


def test_every_product_has_factors_in_low_precision_and_the_host_has_no_part(dtype, covers):
    text = compiled(dtype).as_text()
    assert factors(text) == {(SHORT[dtype],) * 2: PRODUCTS}
    assert not re.findall(r"custom_call_target|infeed|outfeed|\bsend\b|\brecv\b", text)
    for aspect in ("casting", "scaling"):
        covers(aspect, "jax", f"cuda/{dtype}/O1", "compiled for CUDA")


def test_products_are_of_tensor_cores_that_sum_in_float32(dtype):
    compiled(dtype)
    short = SHORT[dtype]
    assert tensor_core_instructions(dtype) == {f"f32.{short}.{short}.f32"}


def test_float32_is_seen_to_be_float32_whose_factors_a_gpu_rounds_to_tf32():
    assert factors(compiled("float32").as_text()) == {("f32", "f32"): PRODUCTS}
    assert tensor_core_instructions("float32") == {"f32.tf32.tf32.f32"}


def test_weights_and_state_are_donated_and_less_is_kept(dtype):
    memory = {which: compiled(which).memory_analysis() for which in ("float32", dtype)}
    weights = 4 * WIDTH * WIDTH * LAYERS
    for analysis in memory.values():
        assert analysis.alias_size_in_bytes >= 3 * weights  # the weights and the two moments of Adam
    low, full = (memory[which].temp_size_in_bytes for which in (dtype, "float32"))
    print(f"temporary memory: {full / 2**20:.0f} MiB in float32, {low / 2**20:.0f} MiB in {dtype}")
    # The backward pass needs the input of every layer but the first again, and of each two bytes an element are saved.
    assert full - low >= 2 * BATCH * WIDTH * (LAYERS - 1)


def test_between_two_gpus_gradients_are_added_up_in_float32(dtype, covers):
    """A sum in float16 would overflow, with more devices earlier, at scales that each device alone can bear."""
    program = compiled(dtype, 2)
    summed = re.findall(r"= \(?(\w+)\[[\d,]*\][^=\n]* all-reduce(?:-start)?\(", program.as_text())
    assert summed
    assert set(summed) == {"f32"}
    covers("distributed", "jax", f"cuda/{dtype}/O1", "compiled for CUDA")
