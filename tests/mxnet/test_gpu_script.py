"""`make gpu` checks MXNet too; here it runs what makes sense on a CPU."""


def test_the_checks_run_on_a_cpu(gpu_script_on_cpu):
    report, ends = gpu_script_on_cpu("mxnet")
    assert "mxnet" in report["machine"]
    assert ends.count("pass") == 5
    assert not {"FAIL", "ERROR"} & set(ends)
