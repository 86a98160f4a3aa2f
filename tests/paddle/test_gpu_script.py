"""`make gpu` checks Paddle too; here it runs what makes sense on a CPU."""


def test_the_checks_run_on_a_cpu(gpu_script_on_cpu):
    report, ends = gpu_script_on_cpu("paddle")
    assert "paddle" in report["machine"]
    assert ends.count("pass") == 2
    assert not {"FAIL", "ERROR"} & set(ends)
