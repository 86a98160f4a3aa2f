"""A real model trained in mixed precision is as good as in float32."""

from __future__ import annotations

import os
import statistics

import jax
import optax
import pytest

pytest.importorskip("sklearn")

import ampx
from ampx.cli import demo
from ampx.plugins import Registry
from ampx_jax import casting
from ampx_jax.demo import apply_network, make_parameters

# Accuracies are compared over three seeds, by `make test-all`; one shows what an overflow does.
SEEDS = (0, 1, 2) if os.environ.get("AMPX_TEST_ALL") else (0,)
EPOCHS = 15
BATCH_SIZE = 32
STEPS = EPOCHS * (1347 // BATCH_SIZE)


@pytest.fixture(scope="module")
def results():
    backend = Registry().load("jax")
    data = demo.load_digits()
    dtypes = demo.choose_dtypes(backend)
    runs = demo.plan_runs(dtypes, SEEDS, EPOCHS, BATCH_SIZE, len(data.train_images))
    trained = demo.train_all(backend.demo(), data, runs, lambda run: lambda: None)
    return [(run, result) for run, (result, _) in zip(runs, trained, strict=True)]


def mean_accuracy(results, dtype):
    return 100 * statistics.mean(result.accuracy for _, result in results if result.dtype == dtype)


def of(results, dtype):
    return [(run, result) for run, result in results if result.dtype == dtype]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mixed_precision_is_as_accurate_as_float32(results, dtype):
    if not of(results, dtype):
        pytest.skip(f"this device does not compute {dtype}")
    exact, mixed = mean_accuracy(results, "float32"), mean_accuracy(results, dtype)
    assert exact >= 97
    assert mixed >= 97
    assert abs(mixed - exact) <= 0.5


@pytest.mark.slow
def test_injected_overflow_skips_one_step_and_halves_the_scale(results):
    if not of(results, "float16"):
        pytest.skip("this device does not compute float16")
    for run, result in of(results, "float16"):
        assert run.overflow_at in result.skipped
        assert len(result.scales) == len(result.losses) == STEPS
        assert result.scales[run.overflow_at + 1] == result.scales[run.overflow_at] / 2
        finite = set(range(1, STEPS)) - {step + 1 for step in result.skipped}
        assert all(result.scales[step] >= result.scales[step - 1] for step in finite)


@pytest.mark.slow
def test_injected_overflow_skips_one_step_under_a_static_scale_too(results):
    if not of(results, "bfloat16"):
        pytest.skip("this device does not compute bfloat16")
    for run, result in of(results, "bfloat16"):
        assert result.skipped == [run.overflow_at]
        assert set(result.scales) == {result.final_scale} == {1.0}


@pytest.mark.slow
def test_disabled_session_trains_in_plain_float32(results):
    for _, result in of(results, "float32"):
        assert (result.skipped, set(result.scales), result.final_scale) == ([], {1.0}, 1.0)


def test_training_leaves_jax_as_it_was():
    data = demo.load_digits()
    data = demo.Digits(data.train_images[:64], data.train_labels[:64], data.test_images, data.test_labels)
    before = jax.config.values.copy()
    runs = demo.plan_runs(["bfloat16"], [0], 1, 32, 64)
    assert len(list(demo.train_all(Registry().load("jax").demo(), data, runs, lambda run: lambda: None))) == 1
    assert jax.config.values == before
    assert casting.active.value is None


def test_a_loss_scale_alone_changes_no_bit():
    """Scales are powers of two: at O0 the parameters are those of training without ampx."""
    data = demo.load_digits()
    images, labels = jax.numpy.asarray(data.train_images[:256]), jax.numpy.asarray(data.train_labels[:256])
    trained = []
    for enabled in (False, True):
        with ampx.init("jax", level="O0", loss_scale=ampx.LossScale(growth_interval=7), enabled=enabled):
            tx = ampx.wrap_optimizer(optax.adamw(1e-2))
            parameters = make_parameters(jax.random.key(0))
            state = tx.init(parameters)

            @jax.jit
            def gradients(parameters, state, rows):
                def scaled_loss(parameters):
                    logits = apply_network(parameters, images[rows])
                    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels[rows]).mean()
                    with ampx.scale_loss(loss, state) as scaled:
                        return scaled

                return jax.grad(scaled_loss)(parameters)

            update = jax.jit(tx.update)
            for step in range(40):
                rows = jax.numpy.arange(32) + 32 * (step % 8)
                updates, state = update(gradients(parameters, state, rows), state, parameters)
                parameters = optax.apply_updates(parameters, updates)
            trained.append([leaf.tobytes() for leaf in jax.tree.leaves(jax.device_get(parameters))])
            scale = ampx.loss_scale(state)
    assert scale == 2.0**21
    assert trained[0] == trained[1]
