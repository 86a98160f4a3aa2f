"""A real model trained in mixed precision is as good as in float32; see `tests/kit/digits.py`."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from digits import DigitsSuite


class TestDigits(DigitsSuite):
    framework = "tensorflow"

    def surroundings(self):
        options = tf.config.optimizer.get_experimental_options()
        return keras.config.dtype_policy().name, options, random.getstate(), np.random.get_state()[1].tolist()
