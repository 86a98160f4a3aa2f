"""A whole step, lowered for CUDA by the CPU's JAX: which dtypes it computes in, and that the host has no part in it.

That it runs, its numbers and its speed this does not show.
"""

import collections
import contextlib
import itertools
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
from evidence import COMBINATIONS

SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@pytest.fixture(params=["float16", "bfloat16"])
def dtype(request):
    yield request.param
    ampx.shutdown()


@ampx_jax.autocast
def network(params, x):
    x = jnp.tanh(x @ params["a"]) @ params["b"]
    return jax.nn.log_softmax(x * params["norm"]["scale"] + params["norm"]["bias"])


def lowered(dtype, level="O1", network=network, finite=True, tell=None, shards=1):
    """Return the text of a step with two products, which are five with their derivatives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampx.PrecisionWarning)  # a CPU is slow in these
        ampx.init("jax", device="cpu", dtype=dtype, level=level, loss_scale="dynamic")
    tx = optax.adam(1e-3)
    if finite:
        tx = ampx.wrap_optimizer(tx)
    params = {"a": jnp.ones((4, 8)), "b": jnp.ones((8, 6)), "norm": {"scale": jnp.ones(6), "bias": jnp.zeros(6)}}
    state, x = tx.init(params), jnp.ones((2, 4))
    params = ampx.prepare(params)

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


def check(text, dtype, level="O1"):
    """Raise where the program is not what the level on a GPU is to be."""
    low = SHORT[dtype]
    products = re.findall(r"stablehlo\.dot_general .*\(tensor<[0-9x]+x(\w+)>, tensor<[0-9x]+x(\w+)>\)", text)
    assert products == [(low, low)] * 5
    full = {low if level == "O3" else "f32"}
    for operation, dtypes in {"exponential": full, "log": full, "sqrt": full, "is_finite": {"f32"}}.items():
        computed = set(re.findall(rf"stablehlo\.{operation} .*: \(?tensor<(?:[0-9x]+x)?(\w+)>", text))
        assert computed == dtypes, operation
    assert not re.findall(r"callback|infeed|outfeed|stablehlo\.send|stablehlo\.recv", text)
    assert "stablehlo.case" in text, "the step that is skipped is no branch of the device"
    assert collections.Counter(stored(text)) == STORED[level](low), "parameters and state have other dtypes"


def stored(text):
    """List the dtypes of the parameters' shapes among the arguments: of the two weights and the two of the norm."""
    (arguments,) = re.findall(r"func\.func public @main\((.*?)\) ->", text)
    shapes = {"4x8": "weight", "8x6": "weight", "6": "norm"}
    arrays = re.findall(r"tensor<(4x8|8x6|6)x(\w+)>", arguments)
    return [(shapes[shape], dtype) for shape, dtype in arrays]


def _all(dtype):
    return {("weight", dtype): 6, ("norm", dtype): 6}  # the parameters, and the two moments of Adam


# How many arrays have the shape of a parameter, by its kind and their dtype.
STORED = {
    "O0": _all,
    "O1": lambda low: _all("f32"),
    "O2": lambda low: {("weight", low): 2, ("weight", "f32"): 6, ("norm", "f32"): 6},
    "O3": _all,
}

SHOWN = {
    "O0": ["scaling"],
    "O1": ["casting", "scaling"],
    "O2": ["casting", "scaling", "master weights"],
    "O3": ["casting", "scaling"],
}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(("dtype", "level"), COMBINATIONS)
def test_each_level_computes_in_its_dtypes_and_the_host_has_no_part(dtype, level, shards, covers, quiet_end):
    text = lowered(dtype, level, shards=shards)
    check(text, dtype, level)
    assert f"mhlo.num_partitions = {shards} " in text
    for aspect in ["distributed"] if shards == 2 else SHOWN[level]:
        covers(aspect, "jax", f"cuda/{dtype}/{level}", "lowered for CUDA")


@pytest.mark.parametrize(("level", "other"), list(itertools.permutations(["O1", "O2", "O3"], 2)))
def test_no_level_passes_for_another(dtype, level, other):
    text = lowered(dtype, level)
    with pytest.raises(AssertionError):
        check(text, dtype, other)


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
