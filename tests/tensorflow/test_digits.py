"""A real model trained in mixed precision is as good as in float32; where only the scale is active, it is the same."""

from __future__ import annotations

import os
import random
import statistics

import keras
import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

import ampx
from ampx.cli import demo
from ampx.plugins import Registry

# Accuracies are compared over three seeds, by `make test-all`; one shows what an overflow does.
SEEDS = (0, 1, 2) if os.environ.get("AMPX_TEST_ALL") else (0,)
EPOCHS = 15
BATCH_SIZE = 32
STEPS = EPOCHS * (1347 // BATCH_SIZE)


@pytest.fixture(scope="module")
def results():
    backend = Registry().load("tensorflow")
    data = demo.load_digits()
    dtypes = demo.choose_dtypes(backend)
    runs = demo.plan_runs(dtypes, SEEDS, EPOCHS, BATCH_SIZE, len(data.train_images))
    trained = demo.train_all(backend.demo(), data, runs, lambda run: lambda: None)
    return [(run, result) for run, (result, _) in zip(runs, trained, strict=True)]


def of(results, dtype):
    found = [(run, result) for run, result in results if result.dtype == dtype]
    if not found:
        pytest.skip(f"this device does not compute {dtype}")
    return found


def mean_accuracy(results, dtype):
    return 100 * statistics.mean(result.accuracy for _, result in of(results, dtype))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mixed_precision_is_as_accurate_as_float32(results, dtype):
    exact, mixed = mean_accuracy(results, "float32"), mean_accuracy(results, dtype)
    assert exact >= 97
    assert abs(mixed - exact) <= 0.5


@pytest.mark.slow
def test_injected_overflow_skips_one_step_and_halves_the_scale(results):
    for run, result in of(results, "float16"):
        assert run.overflow_at in result.skipped
        assert len(result.scales) == len(result.losses) == STEPS
        assert result.scales[run.overflow_at + 1] == result.scales[run.overflow_at] / 2
        finite = set(range(1, STEPS)) - {step + 1 for step in result.skipped}
        assert all(result.scales[step] >= result.scales[step - 1] for step in finite)


@pytest.mark.slow
def test_injected_overflow_skips_one_step_under_a_static_scale_too(results):
    for run, result in of(results, "bfloat16"):
        assert result.skipped == [run.overflow_at]
        assert set(result.scales) == {result.final_scale} == {1.0}


def test_scaled_float32_equals_float32_exactly():
    """Loss by loss and image by image, while the scale grows from step to step: scales are powers of two."""
    trainer, data = Registry().load("tensorflow").demo(), demo.load_digits()
    plain = trainer.train(data, demo.Run("float32", 0, 6, 64), lambda: None)
    config = ampx.LossScale(init_scale=2.0**8, growth_interval=30)
    scaled = trainer.train(data, demo.Run("float32", 0, 6, 64, loss_scale=config), lambda: None)
    assert len(plain.losses) == 6 * (1347 // 64)
    assert scaled.losses == plain.losses
    assert scaled.accuracy == plain.accuracy
    assert plain.accuracy > 0.95
    assert plain.scales == [1.0] * len(plain.losses)
    assert scaled.final_scale == 2.0 ** (8 + len(plain.losses) // 30)
    assert scaled.skipped == []


def test_training_leaves_tensorflow_as_it_was():
    data = demo.load_digits()
    data = demo.Digits(data.train_images[:64], data.train_labels[:64], data.test_images, data.test_labels)

    def surroundings():
        options = tf.config.optimizer.get_experimental_options()
        randomness = random.getstate(), np.random.get_state()[1].tolist()
        return keras.config.dtype_policy().name, options, randomness

    before = surroundings()
    runs = demo.plan_runs(["bfloat16"], [0], 1, 32, 64)
    assert len(list(demo.train_all(Registry().load("tensorflow").demo(), data, runs, lambda run: lambda: None))) == 1
    assert surroundings() == before
