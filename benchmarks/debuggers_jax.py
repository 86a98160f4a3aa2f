"""Planted faults in JAX: ampx and `jax_debug_nans` with `jax_debug_infs`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _paired import limited
from debuggers import Fault, Said, Tool, compared, heard, planted, written
from flax import nnx

import ampx
import ampx_jax

PLANTED = planted("jax")


def _code(model: Any, modules: tuple[str, ...]) -> list[Any]:
    """Return the functions of the models' own modules of these names."""
    if not isinstance(model, nnx.Module):
        return []
    named = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    return [
        function
        for name in modules
        if isinstance(named.get(name), PLANTED.Function)
        for function in written(named[name].function)
    ]


def _fault(name: str) -> Fault:
    make, options, (kind, direction, module) = PLANTED.FAULTS[name]
    return Fault(name, make, kind, (module,), direction, lambda model: _code(model, (module,)), options)


@contextlib.contextmanager
def _checked(_: Any = None) -> Iterator[None]:
    with jax.debug_nans(True), jax.debug_infs(True):
        yield


def _by_debug_nans(model: Any, step: Callable[[Any], Any], dtype: str, scale: float, **options: Any) -> Said:
    """Differentiate as a training script does that uses ampx: the step cast, compiled as a whole."""
    differentiate = nnx.value_and_grad if isinstance(model, nnx.Module) else jax.value_and_grad
    compiled = nnx.jit if isinstance(model, nnx.Module) else jax.jit
    with ampx.init("jax", dtype=dtype, device="cpu", nan_loss="skip", **options):  # type: ignore[arg-type]
        cast = ampx_jax.autocast(step)
        function = compiled(differentiate(lambda model: cast(model).astype(jnp.float32) * scale))
        with _checked():
            said = heard(lambda: jax.block_until_ready(jax.tree.leaves(function(model))))
    return said if said.trace else Said("")


TOOLS = (Tool("jax_debug_nans, jax_debug_infs", _by_debug_nans, _checked),)


def _timed() -> tuple[Any, Callable[[Any], Any], Callable[[], object]]:
    keys = jax.random.split(jax.random.key(0), 5)
    inputs = jax.random.normal(keys[0], (256, 1024))
    labels = jax.random.randint(keys[1], (256,), 0, 10)
    params = [jax.random.normal(key, (1024, 1024)) / 32 for key in keys[1:]]
    optimizer = optax.sgd(1e-3)

    def step(params: Any) -> Any:
        x = inputs
        for number, weight in enumerate(params):
            with jax.named_scope(f"layer{number}"):
                x = jax.nn.relu(x @ weight)
        return optax.softmax_cross_entropy_with_integer_labels(x[:, :10], labels).mean()

    @jax.jit
    def update(params: Any) -> Any:
        updates, _ = optimizer.update(jax.grad(step)(params), optimizer.init(params))
        return optax.apply_updates(params, updates)

    return params, step, lambda: jax.block_until_ready(update(params))


STEPS = len(PLANTED.FAULTS) + 3 + len(TOOLS)
"""How often `run` advances."""


def run(quick: bool, advance: Callable[[], object] = lambda: None) -> list[dict[str, object]]:
    """Try the tools on all faults, and time them."""
    faults = [_fault(name) for name in limited(PLANTED.FAULTS)]
    return compared("jax", faults, limited(PLANTED.CLEAN.values()), TOOLS, _timed, 8 if quick else 24, advance)
