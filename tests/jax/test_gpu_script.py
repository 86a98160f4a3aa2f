"""`make gpu` checks JAX too; here it runs what makes sense on a CPU."""


def test_the_checks_run_on_a_cpu(gpu_script_on_cpu):
    report, ends = gpu_script_on_cpu("jax")
    assert "jax" in report["machine"]
    assert ends.count("pass") == 4
    assert not {"FAIL", "ERROR"} & set(ends)
