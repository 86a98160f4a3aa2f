"""Programs written for TensorFlow 1 and Keras 2 train unedited, as they do in float32."""

import math
from pathlib import Path

import numpy as np
import pytest

from ampx_tensorflow import rewrite
from processes import last_json

PROGRAMS = Path(__file__).parents[1] / "programs" / "tensorflow"
START = """
import runpy, sys, warnings
import ampx, ampx_tensorflow
warnings.simplefilter("ignore", ampx.PrecisionWarning)  # a CPU without bfloat16 is slow, but not wrong
ampx_tensorflow.install(dtype="bfloat16", device="cpu")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def train(name, *arguments):
    numbers = last_json("-c", START, PROGRAMS / f"{name}.py", *arguments)
    return np.array(numbers["losses"]), numbers["metric"]


def binomial(count):
    """Three standard deviations of the difference of two shares of `count` samples, one of which is `share`."""
    return lambda share: 3 * math.sqrt(2 * share * (1 - share) / count)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "arguments", "good", "tolerance"),
    [
        ("image_classification", ["--use_fp16"], lambda accuracy: accuracy > 0.94, binomial(397)),
        # as many points as a batch holds
        pytest.param("gan", ["--amp"], lambda share: share > 0.9, binomial(128), marks=pytest.mark.nightly),
        pytest.param(
            *("rnn_language_model", ["--amp"]),
            *(lambda perplexity: perplexity < 2, lambda perplexity: perplexity * 2.0**-4),
            marks=pytest.mark.nightly,
        ),
        # test_migrated_programs.py trains it on every run
        pytest.param(
            *("keras2_custom_loop", ["--policy", "mixed_bfloat16"]),
            *(lambda accuracy: accuracy > 0.9, binomial(397)),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_program_trains_as_in_float32(name, arguments, good, tolerance):
    if name != "keras2_custom_loop" and not rewrite._works("cpu", "bfloat16"):  # which casts by a policy
        pytest.skip("TensorFlow's rewriter casts nothing to bfloat16 here: it was tried")
    exact, exact_metric = train(name)
    mixed, mixed_metric = train(name, *arguments)
    # bfloat16 rounds products by up to 2**-9 of them, both operands and the result: less than 2**-7 of the first loss.
    assert 0 < abs(mixed[0] - exact[0]) <= 2.0**-7 * exact[0]
    # Later both are runs of one process: their means differ by what they scatter, here four standard errors, and the
    # rounding of each loss.
    last = len(exact) // 4
    scatter = math.sqrt((exact[-last:].var() + mixed[-last:].var()) / last)
    assert abs(mixed[-last:].mean() - exact[-last:].mean()) <= 4 * scatter + 2.0**-7 * exact[-last:].mean()
    assert good(exact_metric)
    assert abs(mixed_metric - exact_metric) <= tolerance(exact_metric)
