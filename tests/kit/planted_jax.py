"""Small models in JAX with one planted fault each, and clean ones: for the tests and the benchmark of `diagnose`.

What JAX computes in float32 under casting (sums, exponentials, constants beyond float16) cannot fail there, so the
faults stand where it computes in float16. Shapes are alike in most models, since each is compiled for anew.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn, nnx

EYE = np.eye(8, dtype=np.float32)


class Function(nnx.Module):
    """A module with a function that it is passed."""

    def __init__(self, function):
        self.function = function

    def __call__(self, x):
        return self.function(x)


def linear(weight):
    """A layer that computes in float16 and multiplies by a number."""
    layer = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel[...] = EYE * weight
    return layer


def sized(scale, *layers):
    """A model of layers and a batch of numbers of one magnitude; the loss is the mean of what comes out."""
    batch = jnp.full((4, 8), scale, jnp.float32)
    return nnx.Sequential(*layers), lambda model: model(batch).astype(jnp.float32).mean()


class Branches(nnx.Module):
    def __init__(self):
        self.branches = nnx.List([linear(weight) for weight in (1.0, 1e5, 2.0)])

    def __call__(self, x):
        return sum(branch(x) for branch in self.branches)


@jax.custom_vjp
def multiplied(x):
    return x @ (jnp.eye(8) * 3e4)


multiplied.defvjp(lambda x: (multiplied(x), None), lambda _, g: (g * 3e4,))


multiplied.defvjp(lambda x: (multiplied(x), None), lambda _, g: (g * 3e4,))


def scores(params):
    x = jnp.full((4, 8), 100.0)
    with jax.named_scope("attention"):
        query = x @ params["query"]
        with jax.named_scope("scores"):
            product = query @ query.T
        return jax.nn.softmax(product).sum()


def branched(params):
    def large(x):
        with jax.named_scope("large"):
            return (x @ params["w"]) * 1e4

    x = jnp.full((4, 8), 10.0)
    return jax.lax.cond(params["w"][0, 0] > 0, large, lambda x: x @ params["w"], x).mean()


def looped(params):
    def turn(x, _):
        with jax.named_scope("turn"):
            return x @ params["w"], None

    with jax.named_scope("loop"):
        x, _ = jax.lax.scan(turn, jnp.full((4, 8), 10.0), None, length=6)
    return x.mean()


def poisoned():
    model, _ = sized(1.0, linear(1.0), linear(1.0))
    batch = jnp.ones((4, 8)).at[2, 3].set(jnp.nan)
    return model, lambda model: model(batch).mean()


def rooted(params):
    with jax.named_scope("root"):
        return jnp.sqrt((jnp.zeros((4, 8)) @ params["w"]).astype(jnp.float32) ** 2).mean()


def standardised(x):
    """Standardise by the variance that is a difference of large numbers."""
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) - x.mean(-1, keepdims=True) ** 2)


def similar(x):
    """Return the cosine of the angle to a small vector, bounded as `cosine_similarity` is."""
    small = x * 1e-4
    lengths = jnp.sqrt((small * small).sum(-1)) * jnp.sqrt((x * x).sum(-1))
    return (x * small).sum(-1) / jnp.maximum(lengths, 1e-8)


def uneven():
    """A model and a batch of numbers around 30 that differ little."""
    batch = 30 + jnp.linspace(-0.1, 0.1, 32).reshape(4, 8)
    model = nnx.Sequential(linear(1.0), Function(standardised))
    return model, lambda model: model(batch).astype(jnp.float32).mean()


# By name what makes it, what else to pass, and what is to be named: kind, direction and module.
FAULTS = {
    "a middle layer": (
        lambda: sized(10.0, linear(10.0), linear(1e4), linear(1e-4)),
        {},
        ("overflow", "forward", "layers.1"),
    ),
    "attention scores": (
        lambda: ({"query": jnp.eye(8)}, scores),
        {},
        ("overflow", "forward", "attention.scores"),
    ),
    "a sum": (
        lambda: sized(1e4, linear(1.0), Function(lambda x: x.sum(-1))),
        {"allow": ["reduce_sum"]},
        ("sum", "forward", "layers.1"),
    ),
    "backward": (
        lambda: sized(1e-3, linear(1.0), linear(1.0), Function(lambda x: x.astype(jnp.float32) * 1e9)),
        {},
        ("overflow", "backward", "layers.2"),
    ),
    "an epsilon": (
        lambda: sized(0.0, linear(1.0), Function(lambda x: x / (jnp.abs(x).max(-1, keepdims=True) + 1e-9))),
        {},
        ("epsilon", "forward", "layers.1"),
    ),
    "a mask constant": (
        lambda: sized(1.0, Function(lambda x: jnp.where(jnp.arange(8) < 4, x, -1e9)), linear(1.0)),
        {},
        ("mask", "forward", "layers.1"),
    ),
    "a logarithm of 0": (
        lambda: sized(1e-3, linear(1e-6), Function(jnp.log)),
        {},
        ("logarithm", "forward", "layers.1"),
    ),
    "a variance as a difference": (uneven, {}, ("digits", "forward", "layers.1")),
    "a mask of float32's lowest number": (
        lambda: sized(
            1.0, linear(1.0), Function(lambda x: jax.nn.softmax(x + jnp.ones(8) * jnp.finfo(jnp.float32).min))
        ),
        {"allow": ["add"]},
        ("mask", "forward", "layers.1"),
    ),
    "a position beyond the dtype": (
        lambda: sized(1.0, linear(1.0), Function(lambda x: x * jnp.sin(jnp.arange(100_000.0, 100_008.0) * x[:1]))),
        {"allow": ["mul"]},
        ("overflow", "forward", "layers.1"),
    ),
    "logsumexp by hand": (
        lambda: sized(12.0, linear(1.0), Function(lambda x: jnp.log(jnp.exp(x).sum(-1)))),
        {"allow": ["exp"]},
        ("overflow", "forward", "layers.1"),
    ),
    "a temperature of 1e-4": (
        lambda: sized(10.0, linear(1.0), Function(lambda x: jax.nn.softmax(x / 1e-4))),
        {},
        ("overflow", "forward", "layers.1"),
    ),
    # In the next two a length that flushes to 0 fails first in the derivative of its root, which JAX computes before.
    "cosine similarity": (
        lambda: sized(1.0, linear(1.0), Function(similar)),
        {},
        ("logarithm", "backward", "layers.1"),
    ),
    "a constant image": (
        lambda: sized(
            1.0,
            linear(1.0),
            Function(lambda x: (x - x.mean()) / jnp.sqrt(jnp.square(x - x.mean()).mean() + 1e-8)),
        ),
        {"allow": ["reduce_sum", "sub", "add", "sqrt"]},
        ("logarithm", "backward", "layers.1"),
    ),
    "the focal factor of a sure prediction": (
        lambda: sized(
            10.0,
            linear(1.0),
            Function(lambda x: ((1 - jax.nn.sigmoid(x)) ** 0.5) * -jnp.log(jax.nn.sigmoid(x))),
        ),
        {},
        ("digits", "backward", "layers.1"),  # of the difference, which is why the root is at zero
    ),
    "NaN in one sample": (poisoned, {}, ("data", "forward", "layers.0")),
    "an exploded learning rate": (
        lambda: sized(1e3, linear(1e15), linear(1e15), linear(1e15)),
        {},
        ("learning rate", "forward", "layers.2"),
    ),
    "weights that are NaN": (
        lambda: sized(1.0, linear(1.0), linear(math.nan)),
        {},
        ("weights", "forward", "layers.1"),
    ),
    "a sensitive normalization": (
        lambda: sized(300.0, linear(1.0), Function(lambda x: x * x / (x * x).max(-1, keepdims=True))),
        {},
        ("overflow", "forward", "layers.1"),
    ),
    "a custom function": (
        lambda: sized(10.0, linear(1.0), Function(multiplied)),
        {},
        ("overflow", "forward", "layers.1"),
    ),
    "one of several branches": (
        lambda: sized(10.0, linear(1.0), Branches(), Function(lambda x: x / 1e6)),
        {},
        ("overflow", "forward", "layers.1.branches.1"),
    ),
    "the branch of a condition": (lambda: ({"w": jnp.asarray(EYE)}, branched), {}, ("overflow", "forward", "large")),
    "the fourth turn of a loop": (
        lambda: ({"w": jnp.asarray(EYE) * 10}, looped),
        {},
        ("overflow", "forward", "loop.turn"),
    ),
    "a division by 0 in any precision": (
        lambda: sized(1.0, linear(1.0), Function(lambda x: x / (x - x))),
        {},
        ("division", "forward", "layers.1"),
    ),
    "the derivative of a root at 0": (lambda: ({"w": jnp.asarray(EYE)}, rooted), {}, ("logarithm", "backward", "root")),
}


X = jax.random.normal(jax.random.key(0), (4, 8))
IMAGES = jax.random.normal(jax.random.key(1), (2, 8, 8, 3))


def of_linen(module, x=X):
    return lambda: (module.init(jax.random.key(2), x), lambda params: jnp.square(module.apply(params, x)).mean())


def of_nnx(make, x=X):
    def clean():
        return make(nnx.Rngs(0)), lambda model: jnp.square(model(x)).mean()

    return clean


def causal(params):
    x = X @ params["w"]
    mask = jnp.tril(jnp.ones((4, 4), bool))
    weights = jax.nn.softmax(jnp.where(mask, x @ x.T / 4, -jnp.inf))
    return (weights @ x).mean()


def recurrent(params):
    def turn(state, x):
        with jax.named_scope("cell"):
            return jnp.tanh(state @ params["w"] + x), None

    return jax.lax.scan(turn, jnp.zeros((2, 8)), X.reshape(2, 2, 8))[0].mean()


def classifier(params):
    return -jax.nn.log_softmax(X @ params["w"])[..., 0].mean()


class Residual(nn.Module):
    @nn.compact
    def __call__(self, x):
        inner = nn.remat(nn.Dense)(8)
        return x + nn.gelu(inner(nn.LayerNorm()(x)))


CLEAN = {
    "layers": of_linen(nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(8)])),
    "convolutions": of_linen(nn.Sequential([nn.Conv(4, (3, 3)), nn.relu]), IMAGES),
    "an attention": of_linen(nn.MultiHeadDotProductAttention(2)),
    "a residual that is computed again": of_linen(Residual()),
    "a recurrent network": lambda: ({"w": jnp.eye(8)}, recurrent),
    "a norm over the batch": of_nnx(lambda rngs: nnx.BatchNorm(8, rngs=rngs)),
    "dropout": of_nnx(lambda rngs: nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))),
    "a masked attention": lambda: ({"w": jnp.eye(8)}, causal),
    "a classifier": lambda: ({"w": jnp.eye(8)}, classifier),
    "a bounded exponential": lambda: ({"w": jnp.eye(8)}, lambda p: jnp.exp(-jax.nn.softplus(X @ p["w"])).mean()),
    "a norm with an epsilon that fits": lambda: (
        {"w": jnp.eye(8)},
        lambda p: ((y := X @ p["w"]) / (jnp.abs(y).max(-1, keepdims=True) + 1e-3)).mean(),
    ),
}
