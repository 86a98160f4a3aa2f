"""A real model trained in mixed precision is as good as in float32; see `tests/kit/digits.py`."""

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from ampx_mxnet.compat import mx
from digits import DigitsSuite


class TestDigits(DigitsSuite):
    framework = "mxnet"

    def surroundings(self):
        return np.random.get_state()[1].tolist()

    def test_training_leaves_mxnets_random_state_alone(self):
        """What comes after the demo is what would have come without it."""
        draws = []
        for train in (lambda: None, self.test_training_leaves_the_framework_as_it_was):
            mx.random.seed(7)
            train()
            draws.append(mx.nd.random.uniform(shape=(3,)).asnumpy().tolist())
        assert draws[0] == draws[1]
