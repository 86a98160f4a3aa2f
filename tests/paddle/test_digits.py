"""Real training: where only the scale is active, it changes nothing, because it is a power of two."""

import pytest

import ampx

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from ampx.cli.demo import Run, load_digits


def test_scaled_float32_equals_float32_exactly():
    """Loss by loss and image by image, while the scale grows from step to step."""
    ampx.init("paddle", level="O0")
    trainer = ampx.current().backend.demo()
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


def test_one_overflow_costs_one_step():
    ampx.init("paddle", level="O0")
    trainer = ampx.current().backend.demo()
    run = Run("float32", 1, 6, 64, overflow_at=40, loss_scale=ampx.LossScale())
    result = trainer.train(load_digits(), run, lambda: None)
    assert result.skipped == [40]
    assert result.final_scale == 2.0**15
    assert result.accuracy > 0.95
