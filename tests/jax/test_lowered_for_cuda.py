"""A whole step, lowered for CUDA by the CPU's JAX: which dtypes it computes in, and that the host has no part in it.

That it runs, its numbers and its speed this does not show.
"""

import contextlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ampx
import ampx_jax

SHORT = {"float16": "f16", "bfloat16": "bf16"}


@pytest.fixture(params=SHORT)
def dtype(request):
    yield request.param
    ampx.shutdown()


@ampx_jax.autocast
def network(params, x):
    return jax.nn.log_softmax(jnp.tanh(x @ params["a"]) @ params["b"])


def lowered(dtype, network=network, finite=True, tell=None, shards=1):
    """Return the text of a step with two products, which are five with their derivatives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampx.PrecisionWarning)  # a CPU is slow in these
        ampx.init("jax", device="cpu", dtype=dtype, loss_scale="dynamic")
    tx = optax.adam(1e-3)
    if finite:
        tx = ampx.wrap_optimizer(tx)
    params = {"a": jnp.ones((4, 8)), "b": jnp.ones((8, 6))}
    state, x = tx.init(params), jnp.ones((2, 4))

    def step(params, state, x):
        def scaled_loss(params):
            loss = -jnp.mean(network(params, x))
            with ampx.scale_loss(loss, state) if finite else contextlib.nullcontext(loss) as scaled:
                return scaled, loss

        gradients, loss = jax.grad(scaled_loss, has_aux=True)(params)
        if tell is not None:
            jax.debug.callback(tell, loss)
        updates, after = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), after, loss

    mesh = Mesh(np.array(jax.devices()[:shards]), ("data",))
    everywhere, split = (NamedSharding(mesh, PartitionSpec(*names)) for names in ((), ("data",)))
    arguments = *jax.device_put((params, state), everywhere), jax.device_put(x, split)
    return jax.jit(step).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def check(text, dtype):
    """Raise where the program is not what mixed precision on a GPU is to be."""
    products = re.findall(r"stablehlo\.dot_general .*\(tensor<[0-9x]+x(\w+)>, tensor<[0-9x]+x(\w+)>\)", text)
    assert products == [(SHORT[dtype], SHORT[dtype])] * 5
    for operation in ("exponential", "log", "sqrt", "is_finite"):
        computed = set(re.findall(rf"stablehlo\.{operation} .*: \(?tensor<(?:[0-9x]+x)?(\w+)>", text))
        assert computed == {"f32"}, operation
    assert not re.findall(r"callback|infeed|outfeed|stablehlo\.send|stablehlo\.recv", text)
    assert "stablehlo.case" in text, "the step that is skipped is no branch of the device"


@pytest.mark.parametrize("shards", [1, 2])
def test_products_are_low_precision_and_the_host_has_no_part(dtype, shards, covers):
    text = lowered(dtype, shards=shards)
    check(text, dtype)
    assert f"mhlo.num_partitions = {shards} " in text
    for aspect in ("casting", "scaling") if shards == 1 else ("distributed",):
        covers(aspect, "jax", f"cuda/{dtype}/O1", "lowered for CUDA")


def not_cast(params, x):
    return network.__wrapped__(params, x)


@ampx_jax.autocast
def with_float32(params, x):
    with ampx.autocast(False):
        hidden = jnp.tanh(x @ params["a"])
    return jax.nn.log_softmax(hidden @ params["b"])


@ampx_jax.autocast
def logits(params, x):
    return jnp.tanh(x @ params["a"]) @ params["b"]


def low_exponential(params, x):
    return jax.nn.log_softmax(logits(params, x).astype("bfloat16")).astype("float32")


# What is planted, and a word of what notices it; a callback of the host JAX itself refuses to lower.
FAULTS = {
    "nothing is cast": ({"network": not_cast}, "f32"),
    "one product is not cast": ({"network": with_float32}, "f32"),
    "an exponential in low precision": ({"network": low_exponential}, "exponential"),
    "a callback": ({"tell": lambda loss: None}, "lowering platform"),
    "nothing is skipped": ({"finite": False}, "is_finite"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(dtype, fault):
    planted, word = FAULTS[fault]
    with pytest.raises((AssertionError, ValueError), match=word):
        check(lowered(dtype, **planted), dtype)
