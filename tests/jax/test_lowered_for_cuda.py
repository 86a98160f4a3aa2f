"""A whole step, lowered for CUDA by the CPU's JAX: which dtypes it computes in, and that the host has no part in it.

That it runs, its numbers and its speed this does not show.
"""

import collections
import contextlib
import itertools
import json
import pickle
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


def begin(dtype, level):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampx.PrecisionWarning)  # a CPU is slow in these
        return ampx.init("jax", device="cpu", dtype=dtype, level=level, loss_scale="dynamic")


def make(network, finite=True, tell=None):
    """Return a step, parameters, the optimizer's state, and a batch."""
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

    return step, params, state, x


def lower(step, *arguments, **options):
    """Return the text of the program that JAX's compiler for NVIDIA GPUs would get."""
    return jax.jit(step, **options).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def lowered(dtype, level="O1", network=network, finite=True, tell=None, shards=1):
    """Return the text of a step with two products, which are five with their derivatives."""
    begin(dtype, level)
    step, params, state, x = make(network, finite, tell)
    mesh = Mesh(np.array(jax.devices()[:shards]), ("data",))
    everywhere, split = (NamedSharding(mesh, PartitionSpec(*names)) for names in ((), ("data",)))
    return lower(step, *jax.device_put((params, state), everywhere), jax.device_put(x, split))


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


def trained(step, params, state, x):
    """Return parameters and state after two steps and one that was skipped between them."""
    for factor in (1.0, jnp.inf, 1.0):
        params, state, _ = jax.jit(step)(params, state, x * factor)
    return params, state


def bits(tree):
    return [(leaf.dtype, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize(("dtype", "level"), COMBINATIONS)
def test_a_loaded_state_goes_into_the_program_of_the_saved_one(dtype, level, covers, quiet_end):
    """Every bit of it, and the loss scale in it, is an argument of the program: a GPU goes on with what was loaded.

    That arrays come to a GPU and back as they are, and that the program runs, this does not show.
    """
    amp = begin(dtype, level)
    step, params, state, x = make(network)
    params, state = trained(step, params, state, x)
    program = lower(step, params, state, x, donate_argnums=(0, 1))
    saved = pickle.dumps([np.asarray(leaf) for leaf in jax.tree.leaves((params, state))])
    scale = json.dumps(amp.state_dict(state))
    ampx.shutdown()

    amp = begin(dtype, level)
    step, *fresh, x = make(network)
    loaded = jax.tree.unflatten(jax.tree.structure(tuple(fresh)), map(jnp.asarray, pickle.loads(saved)))
    assert bits(loaded) == bits((params, state))
    assert lower(step, *loaded, x, donate_argnums=(0, 1)) == program
    moved = amp.load_state_dict(json.loads(scale), fresh[1])
    assert lower(step, fresh[0], moved, x, donate_argnums=(0, 1)) == program
    (before,) = json.loads(scale)["groups"][0]["losses"]
    assert ampx.loss_scale(loaded[1]) == ampx.loss_scale(moved) == before["scale"] < 2.0**16
    donated = re.findall(r"(?:tf\.aliasing_output|jax\.buffer_donor)", program)
    assert len(donated) == len(jax.tree.leaves(loaded))
    covers("state", "jax", f"cuda/{dtype}/{level}", "lowered for CUDA")


def test_a_loss_scale_that_is_no_argument_and_a_state_of_another_dtype_make_another_program(dtype):
    begin(dtype, "O2")
    step, params, state, x = make(network)
    program = lower(step, params, state, x)

    def with_a_constant(state):
        return lower(lambda params, x: step(params, state, x), params, x)

    assert with_a_constant(state) != with_a_constant(trained(step, params, state, x)[1])
    rounded = jax.tree.map(lambda leaf: leaf.astype(dtype).astype(leaf.dtype), state)
    assert lower(step, params, rounded, x) == program
    assert bits(rounded) != bits(trained(step, params, state, x)[1])
    low = jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.dtype == jnp.float32 else leaf, state)
    assert lower(step, params, low, x) != program


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
