"""Real training: casting costs next to no accuracy, and the scale alone costs nothing, because it is a power of two."""

import pytest

import ampx

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from ampx.cli.demo import Run, load_digits


@pytest.fixture
def trainer():
    ampx.init("mxnet", level="O0")
    return ampx.current().backend.demo()


def test_scaled_float32_equals_float32_exactly(trainer):
    """Loss by loss and image by image, while the scale grows from step to step."""
    data = load_digits()
    plain = trainer.train(data, Run("float32", 0, 6, 64), lambda: None)
    config = ampx.LossScale(init_scale=2.0**8, growth_interval=30)
    scaled = trainer.train(data, Run("float32", 0, 6, 64, loss_scale=config), lambda: None)
    assert len(plain.losses) == 6 * (1347 // 64)
    assert scaled.losses == plain.losses
    assert scaled.accuracy == plain.accuracy
    assert plain.accuracy > 0.95
    assert plain.scales == [1.0] * len(plain.losses)
    assert scaled.final_scale == 2.0 ** (8 + len(plain.losses) // 30)
    assert scaled.skipped == []


@pytest.mark.bfloat16
def test_bfloat16_is_as_accurate_as_float32(trainer):
    """Within 0.5 points, over three seeds: with 450 images a single run counts in steps of 0.22 points."""
    data = load_digits()
    accuracy, losses = {}, {}
    for dtype in ("float32", "bfloat16"):
        results = [trainer.train(data, Run(dtype, seed, 10, 64), lambda: None) for seed in range(3)]
        accuracy[dtype] = sum(one.accuracy for one in results) / len(results)
        losses[dtype] = results[0].losses
    assert accuracy["float32"] > 0.96
    assert abs(accuracy["bfloat16"] - accuracy["float32"]) <= 0.005
    assert losses["bfloat16"][0] != losses["float32"][0]  # it was cast


def test_one_overflow_costs_one_step(trainer):
    run = Run("float32", 1, 6, 64, overflow_at=40, loss_scale=ampx.LossScale())
    result = trainer.train(load_digits(), run, lambda: None)
    assert result.skipped == [40]
    assert result.final_scale == 2.0**15
    assert result.accuracy > 0.95


def test_training_leaves_mxnets_random_state_alone(trainer):
    """What comes after the demo is what would have come without it."""
    import mxnet as mx

    draws = []
    for train in (False, True):
        mx.random.seed(7)
        if train:
            trainer.train(load_digits(), Run("float32", 0, 1, 512), lambda: None)
        draws.append(mx.nd.random.uniform(shape=(3,)).asnumpy().tolist())
    assert draws[0] == draws[1]
