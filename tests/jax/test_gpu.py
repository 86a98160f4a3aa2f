"""What only a GPU can show."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ampx
import ampx_jax

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="JAX sees no GPU"),
]


@pytest.fixture(autouse=True)
def end():
    yield
    ampx.shutdown()


def test_auto_chooses_float16_on_tensor_cores():
    assert ampx.init("jax").effective.dtype == "float16"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_are_low_precision_and_accumulate_in_float32(dtype):
    ampx.init("jax", dtype=dtype)
    a = jax.random.normal(jax.random.key(0), (256, 4096))
    b = jax.random.normal(jax.random.key(1), (4096, 256))
    product = jax.jit(ampx_jax.autocast(jnp.matmul))(a, b)
    rounded = [np.asarray(factor.astype(dtype), np.float64) for factor in (a, b)]
    np.testing.assert_allclose(product, rounded[0] @ rounded[1], rtol=2**-7, atol=0.5)
    assert not np.array_equal(product, a @ b)


def test_a_float16_overflow_is_skipped_and_cured():
    ampx.init("jax", dtype="float16", loss_scale=ampx.LossScale(init_scale=2.0**24))
    tx = ampx.wrap_optimizer(optax.sgd(0.1))
    model = ampx_jax.autocast(lambda w, x: x @ w)
    w, x = jnp.ones((64, 64)), jnp.ones((64, 64))
    state = tx.init(w)

    @jax.jit
    def step(w, state):
        def scaled_loss(w):
            with ampx.scale_loss(jnp.sum(model(w, x)) / 64, state) as scaled:
                return scaled

        updates, state = tx.update(jax.grad(scaled_loss)(w), state, w)
        return optax.apply_updates(w, updates), state

    applied = []
    for _ in range(20):
        w, state = step(w, state)
        applied.append(ampx.last_step(state).applied)
    assert not applied[0]
    assert applied[-1]
    assert np.isfinite(np.asarray(w)).all()


def test_autocast_is_faster_than_full_float32():
    import time

    a = jax.random.normal(jax.random.key(0), (8192, 8192))

    def seconds(function):
        function(a, a).block_until_ready()
        start = time.perf_counter()
        for _ in range(5):
            result = function(a, a)
        result.block_until_ready()
        return time.perf_counter() - start

    with jax.default_matmul_precision("float32"):
        exact = seconds(jax.jit(jnp.matmul))
    ampx.init("jax", dtype="bfloat16")
    assert seconds(jax.jit(ampx_jax.autocast(jnp.matmul))) < exact
