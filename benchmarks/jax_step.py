"""What one training step costs through ampx in JAX, against flax's DynamicScale and jmp's, with a masked update.

The recipes by hand are those of flax's and jmp's own examples: update, then choose leaf by leaf, over all parameters
and all optimizer state, between the new and the old. All compile to one function that donates what it replaces. Both
sides scale the loss dynamically: in float32, where only the scaling differs, and in bfloat16, where products are cast
by ampx on one side and by hand on the other. The losses of both sides are compared first.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
from collections.abc import Callable
from typing import Any

# One thread: the other cores keep the rest of the machine out of the timing.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()

import jax
import jax.numpy as jnp
import optax
from _paired import limited, paired
from flax.training.dynamic_scale import DynamicScale

import ampx
import ampx_jax

Product = Callable[[Any, Any], Any]
Loss = Callable[[Any, Any, Any], Any]


def _by_hand(a: Any, b: Any) -> Any:
    """Multiply as ampx does in bfloat16: low-precision factors, sums in float32."""
    return jnp.matmul(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), preferred_element_type=jnp.float32)


def _mlp(*sizes: int) -> tuple[Callable[[Any], Any], Callable[[Any, Any, Product], Any], tuple[int, ...]]:
    def init(key: Any) -> Any:
        keys = jax.random.split(key, len(sizes))
        pairs = itertools.pairwise(sizes)
        return [
            (jax.random.normal(key, pair) / pair[0] ** 0.5, jnp.zeros(pair[1]))
            for key, pair in zip(keys, pairs, strict=False)
        ]

    def forward(params: Any, x: Any, product: Product) -> Any:
        for w, b in params[:-1]:
            x = jax.nn.relu(product(x, w) + b)
        w, b = params[-1]
        return product(x, w) + b

    return init, forward, sizes[:1]


def _transformer(width: int, heads: int, layers: int, length: int) -> tuple[Any, Any, tuple[int, ...]]:
    def init(key: Any) -> Any:
        def matrix(key: Any, rows: int, columns: int) -> Any:
            return jax.random.normal(key, (rows, columns)) / rows**0.5

        def block(key: Any) -> dict[str, Any]:
            shapes = {
                "qkv": (width, 3 * width),
                "out": (width, width),
                "up": (width, 4 * width),
                "down": (4 * width, width),
            }
            keys = jax.random.split(key, len(shapes))
            return {name: matrix(each, *shape) for each, (name, shape) in zip(keys, shapes.items(), strict=True)}

        *blocks, last = jax.random.split(key, layers + 1)
        return {"blocks": [block(key) for key in blocks], "head": matrix(last, width, 10)}

    def norm(x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def forward(params: Any, x: Any, product: Product) -> Any:
        for block in params["blocks"]:
            batch = x.shape[0]
            parts = product(norm(x), block["qkv"]).reshape(batch, length, 3, heads, width // heads)
            q, k, v = (parts[:, :, part].swapaxes(1, 2) for part in range(3))
            weights = jax.nn.softmax(product(q, k.swapaxes(2, 3)) / (width // heads) ** 0.5)
            x = x + product(product(weights, v).swapaxes(1, 2).reshape(batch, length, width), block["out"])
            x = x + product(jax.nn.gelu(product(norm(x), block["up"])), block["down"])
        return product(x.mean(1), params["head"])

    return init, forward, (length, width)


def _embeddings(rows: int, width: int) -> tuple[Any, Any, tuple[int, ...]]:
    head, predict, _ = _mlp(2 * width, 64, 10)

    def init(key: Any) -> Any:
        first, other = jax.random.split(key)
        return {"table": jax.random.normal(first, (rows, width)) * 0.1, "head": head(other)}

    def forward(params: Any, x: Any, product: Product) -> Any:
        places = (jnp.abs(x) * 1e4).astype(jnp.int32) % rows
        return predict(params["head"], params["table"][places].reshape(len(x), -1), product)

    return init, forward, (2,)


WORKLOADS: dict[str, tuple[Any, int, Callable[[], optax.GradientTransformation], int, int]] = {
    # name: model, batch, optimizer, pairs, steps in one timing
    "MLP 32-64-64-10, batch 32, SGD": (_mlp(32, 64, 64, 10), 32, lambda: optax.sgd(1e-3, 0.9), 100, 20),
    "MLP 40 layers of 64, batch 64, Adam": (_mlp(*[64] * 40, 10), 64, lambda: optax.adam(1e-3), 60, 4),
    "MLP 1024-4096-1024, batch 256, Adam": (_mlp(1024, 4096, 1024, 10), 256, lambda: optax.adam(1e-3), 16, 1),
    "transformer 4 x 128, batch 8 x 32, Adam": (_transformer(128, 4, 4, 32), 8, lambda: optax.adam(1e-3), 30, 1),
    "embeddings 100,000 x 32, batch 256, Adam": (_embeddings(100_000, 32), 256, lambda: optax.adam(1e-3), 30, 1),
}


def _loss(forward: Callable[[Any, Any], Any]) -> Loss:
    def loss(params: Any, x: Any, y: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(forward(params, x), y).mean()

    return loss


def _through_ampx(loss: Loss, raw: optax.GradientTransformation, params: Any) -> tuple[Any, Any]:
    tx = ampx.wrap_optimizer(raw)

    def step(params: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any, Any]:
        def scaled_loss(params: Any) -> tuple[Any, Any]:
            value = loss(params, x, y)
            with ampx.scale_loss(value, state) as scaled:
                return scaled, value

        grads, value = jax.grad(scaled_loss, has_aux=True)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, tx.init(params)


def _through_flax(loss: Loss, tx: optax.GradientTransformation, params: Any) -> tuple[Any, Any]:
    def step(params: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any, Any]:
        scale, inner = state
        scale, finite, value, grads = scale.value_and_grad(lambda params: loss(params, x, y))(params)
        updates, new = tx.update(grads, inner, params)
        choose = functools.partial(jax.tree.map, functools.partial(jnp.where, finite))
        return choose(optax.apply_updates(params, updates), params), (scale, choose(new, inner)), value

    return step, (DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(2.0**16)), tx.init(params))


def _through_jmp(loss: Loss, tx: optax.GradientTransformation, params: Any) -> tuple[Any, Any]:
    import jmp

    def step(params: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any, Any]:
        scale, inner = state
        grads, value = jax.grad(lambda p: (lambda v: (scale.scale(v), v))(loss(p, x, y)), has_aux=True)(params)
        grads = scale.unscale(grads)
        finite = jmp.all_finite(grads)
        updates, new = tx.update(grads, inner, params)
        kept = jmp.select_tree(finite, (optax.apply_updates(params, updates), new), (params, inner))
        return kept[0], (scale.adjust(finite), kept[1]), value

    return step, (jmp.DynamicLossScale(jnp.float32(2.0**16)), tx.init(params))


RECIPES: dict[str, tuple[str, Callable[..., tuple[Any, Any]]]] = {
    # name: the package that it needs, and how a step is made
    "flax DynamicScale, masked update": ("flax", _through_flax),
    "jmp DynamicLossScale, masked update": ("jmp", _through_jmp),
}


class _Run:
    """A compiled step and what it carries from call to call; every call waits for its result."""

    def __init__(self, step_and_state: tuple[Any, Any], params: Any, x: Any, y: Any) -> None:
        step, state = step_and_state
        self._step = jax.jit(step, donate_argnums=(0, 1))
        self._carried = jax.tree.map(jnp.copy, (params, state))
        self._data = x, y

    def __call__(self) -> Any:
        *self._carried, value = self._step(*self._carried, *self._data)
        return jax.block_until_ready((value, self._carried))[0]


def measure(workload: str, recipe: str, dtype: str, quick: bool) -> dict[str, object]:
    """Time one workload through ampx and by a recipe.

    Raises:
        AssertionError: They do not train alike, so that a ratio would mean nothing.
    """
    (init, forward, shape), batch, optimizer, pairs, repeat = WORKLOADS[workload]
    facts: dict[str, object] = {"against": recipe, "workload": workload, "dtype": dtype}
    package, make = RECIPES[recipe]
    if importlib.util.find_spec(package) is None:
        return {**facts, "left_out": f"{package} is not installed"}
    keys = jax.random.split(jax.random.key(0), 3)
    params = init(keys[0])
    x, y = jax.random.normal(keys[1], (batch, *shape)), jax.random.randint(keys[2], (batch,), 0, 10)
    low = dtype == "bfloat16"
    plain = functools.partial(forward, product=jnp.matmul)
    with ampx.init("jax", device="cpu", dtype=dtype, level="O1" if low else "O0", loss_scale="dynamic"):
        ours = _Run(_through_ampx(_loss(ampx_jax.autocast(plain) if low else plain), optimizer(), params), params, x, y)
        by_hand = functools.partial(forward, product=_by_hand if low else jnp.matmul)
        theirs = _Run(make(_loss(by_hand), optimizer(), params), params, x, y)
        mine, other = [float(ours()) for _ in range(3)], [float(theirs()) for _ in range(3)]
        # The same operations on the same numbers, but compiled apart: roundings of sums in another order.
        epsilon = 2.0**-7 if low else 2.0**-16
        assert all(abs(a - b) <= epsilon * abs(b) for a, b in zip(mine, other, strict=True)), (mine, other)
        ratio = paired(ours, theirs, pairs=max(pairs // (8 if quick else 1), 8), repeat=repeat, warmup=3)
    return {**facts, **ratio.to_json()}


STEPS = 2 * len(RECIPES) * len(WORKLOADS)
"""How often `run` advances."""


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Measure every workload against every recipe; quickly, the two smallest in float32."""
    rows = []
    for dtype in ("float32",) if quick else ("float32", "bfloat16"):
        for recipe in RECIPES:
            for workload in limited(list(WORKLOADS)[: 2 if quick else None]):
                rows.append(measure(workload, recipe, dtype, quick))
                advance()
    return rows


if __name__ == "__main__":
    import sys

    for row in run("--quick" in sys.argv):
        named = f"{row['against']:36} {row['workload']:42} {row['dtype']:8}"
        if "left_out" in row:
            print(f"{named} {row['left_out']}")
            continue
        times = f"ampx {row['median_a'] * 1e6:8.0f} us  by hand {row['median_b'] * 1e6:8.0f} us"
        print(f"{named} {times}  {row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]", flush=True)
