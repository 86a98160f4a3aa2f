"""A real model trained on Paddle's simulated GPU is as good as in float32; see `tests/kit/digits.py`."""

import paddle
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

import simulated_paddle
from digits import DigitsSuite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not simulated_paddle.started(), reason="there is no simulated GPU for paddle"),
]


class TestDigits(DigitsSuite):
    framework = "paddle"

    def surroundings(self):
        return paddle.get_device()
