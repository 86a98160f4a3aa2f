"""Real training in any framework: casting costs next to no accuracy, and a loss scale alone costs nothing at all."""

import functools
import os
import statistics

import pytest

from ampx.backend import offer
from ampx.cli import demo
from ampx.cli.demo import Demo
from ampx.plugins import default_registry

# Accuracies are compared over three seeds, by `make test-all`; one shows what an overflow does.
SEEDS = (0, 1, 2) if os.environ.get("AMPX_TEST_ALL") else (0,)
EPOCHS = 15 if os.environ.get("AMPX_TEST_ALL") else 6
SHORT = 3  # where no accuracy is compared: the overflow is in the second
BATCH_SIZE = 64
STEPS = EPOCHS * (1347 // BATCH_SIZE)
OVERFLOW_AT = 40
SCALE = demo.LossScale(init_scale=2.0**8, growth_interval=30)


@functools.cache
def _train(framework, run):
    trainer = offer(default_registry().load(framework), Demo)
    ((result, _),) = demo.train_all(trainer, demo.load_digits(), [run], lambda run: lambda: None)
    return result


class DigitsSuite:
    """Tests of one backend's demo; subclass it as `TestDigits`.

    Of the same trainings tests/cli/test_smoke.py has the command look at an epoch on every run: at the step that is
    skipped, and at losses that a scale leaves as they are.

    Attributes:
        framework: Name of the backend.
    """

    framework: str

    def surroundings(self):
        """Return what training must leave as it was."""
        raise NotImplementedError

    def train(self, dtype, seed=0, epochs=EPOCHS, **options):
        return _train(self.framework, demo.Run(dtype, seed, epochs, BATCH_SIZE, **options))

    def skip_without(self, dtype):
        if dtype not in demo.choose_dtypes(default_registry().load(self.framework)):
            pytest.skip(f"{self.framework} computes no {dtype} on this device")

    @pytest.mark.slow
    @pytest.mark.nightly
    @pytest.mark.timeout(600)
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_mixed_precision_is_as_accurate_as_float32(self, dtype):
        """Within 0.5 points: with 450 images a single run counts in steps of 0.22 points."""
        self.skip_without(dtype)
        exact, mixed = (
            100 * statistics.mean(self.train(name, seed, **options).accuracy for seed in SEEDS)
            for name, options in (("float32", {}), (dtype, {"overflow_at": OVERFLOW_AT}))
        )
        assert exact >= 97
        assert mixed >= 97
        assert abs(mixed - exact) <= 0.5

    @pytest.mark.slow
    def test_an_overflow_skips_one_step_and_halves_the_scale(self):
        self.skip_without("float16")
        result = self.train("float16", epochs=SHORT, overflow_at=OVERFLOW_AT, loss_scale=demo.DEMO_SCALE)
        assert OVERFLOW_AT in result.skipped
        assert len(result.scales) == len(result.losses) == SHORT * STEPS // EPOCHS
        assert result.scales[OVERFLOW_AT + 1] == result.scales[OVERFLOW_AT] / 2
        finite = set(range(1, len(result.scales))) - {step + 1 for step in result.skipped}
        assert all(result.scales[step] >= result.scales[step - 1] for step in finite)

    @pytest.mark.slow
    @pytest.mark.nightly
    def test_an_overflow_skips_one_step_under_a_static_scale_too(self):
        self.skip_without("bfloat16")
        plain, result = self.train("float32"), self.train("bfloat16", epochs=SHORT, overflow_at=OVERFLOW_AT)
        assert result.skipped == [OVERFLOW_AT]
        assert set(result.scales) == {result.final_scale} == {1.0}
        assert result.losses[0] != plain.losses[0]  # it was cast

    @pytest.mark.nightly
    def test_an_overflow_costs_one_step_where_nothing_is_cast(self):
        result = self.train("float32", overflow_at=OVERFLOW_AT, loss_scale=demo.LossScale())
        assert result.skipped == [OVERFLOW_AT]
        assert result.final_scale == 2.0**15
        assert result.accuracy > 0.95

    @pytest.mark.nightly
    def test_scaled_float32_equals_float32_exactly(self):
        """Loss by loss and image by image, while the scale grows from step to step: scales are powers of two."""
        plain, scaled = self.train("float32"), self.train("float32", loss_scale=SCALE)
        assert len(plain.losses) == STEPS
        assert scaled.losses == plain.losses
        assert scaled.accuracy == plain.accuracy > 0.95
        assert scaled.final_scale == min(SCALE.max_scale, 2.0 ** (8 + STEPS // 30))
        assert scaled.skipped == []

    def test_a_disabled_session_trains_in_plain_float32(self):
        plain = self.train("float32")
        assert (plain.skipped, set(plain.scales), plain.final_scale) == ([], {1.0}, 1.0)

    def test_training_leaves_the_framework_as_it_was(self):
        before, data = self.surroundings(), demo.load_digits()
        small = demo.Digits(data.train_images[:64], data.train_labels[:64], data.test_images, data.test_labels)
        dtype = demo.choose_dtypes(default_registry().load(self.framework))[-1]
        runs = demo.plan_runs([dtype], [5], 1, 32, 64)
        trainer = offer(default_registry().load(self.framework), Demo)
        assert len(list(demo.train_all(trainer, small, runs, lambda run: lambda: None))) == 1
        assert self.surroundings() == before
