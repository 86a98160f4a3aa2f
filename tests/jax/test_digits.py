"""A real model trained in mixed precision is as good as in float32; see `tests/kit/digits.py`."""

import jax
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from ampx_jax import casting
from digits import DigitsSuite


class TestDigits(DigitsSuite):
    framework = "jax"

    def surroundings(self):
        return jax.config.values.copy(), casting.active.value
