"""Every test starts without a session and leaves none."""

import gc
import itertools
import os

import pytest

import processes

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
keras = pytest.importorskip("keras", reason="Keras is not installed")

import ampx  # noqa: E402 -- after the check that there is anything to test

_tests = itertools.count()


@pytest.fixture(autouse=True)
def _no_session():
    # What the last tests left in cycles goes soon, in 0.03 s: a collection that found what many tests had left, the
    # iterators of tf.data among it, stood still for 40 s. What survives is never looked at again.
    if next(_tests) % 8 == 0:
        gc.collect()
        gc.freeze()
    keras.utils.set_random_seed(0)
    ampx.shutdown()
    yield
    ampx.shutdown()


@pytest.fixture
def amp():
    """A session that scales losses dynamically; a loss that is NaN is an overflow like any other."""
    return ampx.init("tensorflow", level="O0", loss_scale="dynamic", nan_loss="skip")


@pytest.fixture
def native():
    """Run a script of plain TensorFlow in a process of its own: what it does to itself stays there."""

    return processes.native("import numpy as np\nimport tensorflow as tf\nimport keras\n")
