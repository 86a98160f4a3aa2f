"""A real model trained in mixed precision is as good as in float32."""

from __future__ import annotations

import os
import statistics

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

from ampx.cli import demo  # noqa: E402 -- after the check that there is anything to test
from ampx.plugins import Registry  # noqa: E402

# Accuracies are compared over three seeds, by `make test-all`; one shows what an overflow does.
SEEDS = (0, 1, 2) if os.environ.get("AMPX_TEST_ALL") else (0,)
EPOCHS = 15
BATCH_SIZE = 32
STEPS = EPOCHS * (1347 // BATCH_SIZE)


@pytest.fixture(scope="module")
def results():
    backend = Registry().load("torch")
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


def test_training_leaves_torch_as_it_was():
    data = demo.load_digits()
    data = demo.Digits(data.train_images[:64], data.train_labels[:64], data.test_images, data.test_labels)
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    runs = demo.plan_runs(["bfloat16"], [0], 1, 32, 64)
    assert len(list(demo.train_all(Registry().load("torch").demo(), data, runs, lambda run: lambda: None))) == 1
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert not torch.is_autocast_enabled("cpu")
