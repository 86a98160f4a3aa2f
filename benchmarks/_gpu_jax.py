"""JAX's checks, and what JAX knows about the machine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _gpu_checks import Check, Figure, NotHere, Setup, require
from _paired import paired

import ampx
import ampx_jax
from ampx_jax.state import find_all

# 1 is an overflow; scales after each step, from 2**16 with a growth interval of 3.
PATTERN: Final = (0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0)
REFERENCE: Final = [2.0**power for power in (16, 16, 17, 16, 16, 16, 15, 14, 14, 14, 15, 15, 15, 16)]
OPTIMIZERS: Final[dict[str, Callable[[], optax.GradientTransformation]]] = {
    "sgd": lambda: optax.sgd(0.01, momentum=0.9),
    "adam": lambda: optax.adam(0.01),
    "adamw": lambda: optax.adamw(0.01),
    "lamb": lambda: optax.lamb(0.01),
}
# A wrapped step may cost this much of the one by hand, as the median of pairs.
LIMIT: Final = 1.02


def has(device: str) -> bool:
    """Return whether JAX offers the device here."""
    return device == "cpu" or any(gpu.platform == "gpu" for gpu in jax.devices())


def describe(device: str) -> dict[str, Any]:
    """Return versions and the device's name."""
    first = jax.devices("cpu" if device == "cpu" else "gpu")[0]
    return {"name": first.device_kind, "version": jax.__version__, "devices": jax.device_count()}


def scale_trace_is_the_reference_and_skips_change_nothing(setup: Setup) -> Figure:
    """Every optimizer, compiled, with donation: the specified trace, and the same bits after a skipped step."""
    for name, make in OPTIMIZERS.items():
        with _session(setup, level="O0", loss_scale=ampx.LossScale(growth_interval=3)):
            tx = ampx.wrap_optimizer(make())
            params, x = _model(), jnp.ones((8, 16))
            state, step, trace = tx.init(params), _compiled(tx, _predict), []
            for overflow in PATTERN:
                before = _bits(params, state)
                params, state, _ = step(params, state, x, jnp.float32(np.inf if overflow else 1.0))
                trace.append(ampx.loss_scale(state))
                same = before == _bits(params, state)
                require(same == bool(overflow), f"{name}: overflow {overflow}, unchanged {same}")
            require(trace == REFERENCE, f"{name}: {trace}, not {REFERENCE}")
    return Figure(f"{len(OPTIMIZERS)} optimizers", {"tried": list(OPTIMIZERS)})


def products_are_low_precision_and_sum_in_float32(setup: Setup) -> Figure:
    """A product of many terms is that of rounded factors, as float64 adds them up."""
    terms = 256 if setup.quick else 4096
    errors = {}
    for dtype in ("float16", "bfloat16"):
        with _session(setup, dtype=dtype):
            a = jax.random.normal(jax.random.key(0), (64, terms))
            b = jax.random.normal(jax.random.key(1), (terms, 64))
            product = np.asarray(jax.jit(ampx_jax.autocast(jnp.matmul))(a, b), np.float64)
            rounded = [np.asarray(factor.astype(dtype), np.float64) for factor in (a, b)]
            # The result is rounded to the dtype once (2**-8 at most); sums in float32 add far less.
            errors[dtype] = float(np.abs(product - rounded[0] @ rounded[1]).max() / np.abs(product).max())
            require(errors[dtype] <= 2.0**-8, f"{dtype}: off by {errors[dtype]} of the largest")
            require(not np.array_equal(product, np.asarray(a @ b)), f"{dtype}: nothing was cast")
    return Figure(", ".join(f"{dtype} {error:.1e}" for dtype, error in errors.items()), errors)


def a_float16_overflow_is_skipped_and_cured(setup: Setup) -> Figure:
    """From a scale that float16 cannot hold, training finds one that it can."""
    with _session(setup, dtype="float16", loss_scale=ampx.LossScale(init_scale=2.0**24)):
        tx = ampx.wrap_optimizer(optax.sgd(0.1))
        w, x = jnp.ones((64, 64)), jnp.ones((64, 64))
        state, applied = tx.init(w), []
        step = _compiled(tx, lambda w, x: x @ w)
        for _ in range(20):
            w, state, _ = step(w, state, x, jnp.float32(1.0))
            applied.append(ampx.last_step(state).applied)
        require(not applied[0] and applied[-1], f"applied: {applied}")
        require(np.isfinite(np.asarray(w)).all(), "a weight is not finite")
        scale = ampx.loss_scale(state)
    return Figure(f"{applied.count(False)} skipped, then a scale of {scale:g}", {"scale": scale})


def a_step_reads_nothing_back(setup: Setup) -> Figure:
    """Twenty steps with clipping and a dynamic scale, while JAX forbids copies to the host."""
    if not setup.on_gpu:
        raise NotHere("on a CPU arrays are on the host")
    with _session(setup, dtype="float16", loss_scale="dynamic"):
        tx = ampx.wrap_optimizer(optax.adamw(0.01), max_grad_norm=1.0)
        params, x, factor = _model(), jnp.ones((8, 16)), jnp.float32(1.0)
        state, step = tx.init(params), _compiled(tx, _predict)
        params, state, _ = step(params, state, x, factor)
        with jax.transfer_guard_device_to_host("disallow"):
            for _ in range(20):
                params, state, _ = step(params, state, x, factor)
        require(ampx.last_step(state).applied, "the last step was skipped")
    return Figure("20 steps, no copy to the host")


def step_takes_no_longer_than_a_masked_update(setup: Setup) -> Figure:
    """Against the recipe by hand: unscale, test, update, choose leaf by leaf between new and old."""
    width, layers, repeat = (16, 2, 1) if setup.is_tiny else (1024, 12, 10)
    with _session(setup, level="O0", loss_scale="dynamic"):
        raw = optax.adam(1e-3)
        tx = ampx.wrap_optimizer(raw)
        params = [jax.random.normal(key, (width, width)) for key in jax.random.split(jax.random.key(0), layers)]
        x = jnp.ones((width, width)) / width
        ours = _Carried(_compiled(tx, _deep), params, tx.init(params), x)
        theirs = _Carried(_masked(raw, _deep), params, (jnp.float32(2.0**16), jnp.int32(0), raw.init(params)), x)
        pairs = 8 if setup.is_tiny else 100
        ratio = paired(ours.steps(repeat), theirs.steps(repeat), pairs=pairs)
    line = f"{ratio.ratio:.3f} [{ratio.ratio_low:.3f}, {ratio.ratio_high:.3f}]"
    if not setup.is_tiny:
        require(ratio.ratio <= LIMIT, f"ampx/by hand: {line}")
    return Figure(f"ampx/by hand: {line}, {ratio.median_b / repeat * 1e6:.0f} us by hand", ratio.to_json())


CHECKS: Final[tuple[Check, ...]] = (
    scale_trace_is_the_reference_and_skips_change_nothing,
    products_are_low_precision_and_sum_in_float32,
    a_float16_overflow_is_skipped_and_cured,
    a_step_reads_nothing_back,
    step_takes_no_longer_than_a_masked_update,
)
# Those that are larger in full runs, in the order in which time is spent on them.
MEASURED: Final[tuple[Check, ...]] = (
    products_are_low_precision_and_sum_in_float32,
    step_takes_no_longer_than_a_masked_update,
)
# What a pass on a GPU shows in the table of what is covered.
COVERS: Final = {
    "scale_trace_is_the_reference_and_skips_change_nothing": ("cuda/float32/O0/scaling",),
    "products_are_low_precision_and_sum_in_float32": ("cuda/float16/O1/casting", "cuda/bfloat16/O1/casting"),
    "a_float16_overflow_is_skipped_and_cured": ("cuda/float16/O1/scaling",),
}


def _session(setup: Setup, **options: Any) -> ampx.Amp:
    return ampx.init("jax", device="cpu" if not setup.on_gpu else "cuda", **options)


def _model() -> Any:
    keys = jax.random.split(jax.random.key(0), 2)
    return {"a": jax.random.normal(keys[0], (16, 32)) / 4, "b": jax.random.normal(keys[1], (32, 4)) / 6}


def _predict(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["a"]) @ params["b"]


def _deep(params: Any, x: Any) -> Any:
    for weight in params:
        x = jnp.tanh(x @ weight)
    return x


def _compiled(tx: Any, predict: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    model = ampx_jax.autocast(predict)

    def step(params: Any, state: Any, x: Any, factor: Any) -> tuple[Any, Any, Any]:
        def scaled_loss(params: Any) -> Any:
            with ampx.scale_loss(jnp.mean((model(params, x) - 1.0) ** 2) * factor, state) as scaled:
                return scaled

        value, grads = jax.value_and_grad(scaled_loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step, donate_argnums=(0, 1))


def _masked(tx: Any, predict: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def step(params: Any, state: Any, x: Any, factor: Any) -> tuple[Any, Any, Any]:
        scale, tracker, inner = state
        loss = lambda params: jnp.mean((predict(params, x) - 1.0) ** 2) * factor * scale  # noqa: E731
        value, grads = jax.value_and_grad(loss)(params)
        grads = jax.tree.map(lambda grad: grad / scale, grads)
        finite = functools.reduce(jnp.logical_and, [jnp.isfinite(grad).all() for grad in jax.tree.leaves(grads)])
        updates, after = tx.update(grads, inner, params)
        new = optax.apply_updates(params, updates), after
        params, inner = jax.tree.map(functools.partial(jnp.where, finite), new, (params, inner))
        grows = finite & (tracker + 1 >= 2000)
        scale = jnp.where(finite, jnp.where(grows, scale * 2, scale), scale / 2)
        return params, (scale, jnp.where(finite & ~grows, tracker + 1, 0), inner), value

    return jax.jit(step, donate_argnums=(0, 1))


class _Carried:
    """A compiled step and what it hands on from call to call."""

    def __init__(self, step: Callable[..., Any], params: Any, state: Any, x: Any) -> None:
        self._step, self._x, self._factor = step, x, jnp.float32(1.0)
        self._carried = jax.tree.map(jnp.copy, (params, state))

    def steps(self, count: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(count):
                *self._carried, _ = self._step(*self._carried, self._x, self._factor)
            jax.block_until_ready(self._carried)

        return run


def _bits(params: Any, state: Any) -> list[bytes]:
    inner = find_all(state)[0].inner
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((params, inner))]
