"""A real model trained in mixed precision is as good as in float32; see `tests/kit/digits.py`."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from digits import DigitsSuite  # noqa: E402 -- after the check that there is anything to test


class TestDigits(DigitsSuite):
    framework = "torch"

    def surroundings(self):
        return torch.get_rng_state().tolist(), torch.get_num_threads(), torch.is_autocast_enabled("cpu")
