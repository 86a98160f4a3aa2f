"""A real model trained on MXNet's simulated GPU is as good as in float32; see `tests/kit/digits.py`."""

import mxnet as mx
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

import simulated_mxnet
from digits import DigitsSuite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not simulated_mxnet.started(), reason="there are no simulated GPUs for mxnet"),
]


class TestDigits(DigitsSuite):
    framework = "mxnet"

    def surroundings(self):
        return mx.autograd.is_recording(), mx.autograd.is_training(), mx.current_context()
