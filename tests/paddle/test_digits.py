"""A real model trained in mixed precision is as good as in float32; see `tests/kit/digits.py`."""

import numpy as np
import paddle
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from digits import DigitsSuite


class TestDigits(DigitsSuite):
    framework = "paddle"

    def surroundings(self):
        state = paddle.get_rng_state()
        draws = paddle.rand([3]).tolist()  # what comes after the demo is what would have come without it
        paddle.set_rng_state(state)
        return draws, np.random.get_state()[1].tolist(), paddle.get_device()
