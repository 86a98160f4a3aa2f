"""`make gpu` checks TensorFlow too; here it runs what makes sense on a CPU."""

import pytest

from ampx_tensorflow import rewrite


@pytest.mark.nightly
def test_the_checks_run_on_a_cpu(gpu_script_on_cpu):
    report, ends = gpu_script_on_cpu("tensorflow")
    assert "keras" in report["machine"]["tensorflow"]
    assert ends.count("pass") == (3 if rewrite._works("cpu", "bfloat16") else 2)  # TensorFlow's rewriter needs AVX-512
    assert not {"FAIL", "ERROR"} & set(ends)
