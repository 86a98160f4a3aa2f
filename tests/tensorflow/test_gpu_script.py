"""`make gpu` checks TensorFlow too; here it runs what makes sense on a CPU."""


def test_the_checks_run_on_a_cpu(gpu_script_on_cpu):
    report, ends = gpu_script_on_cpu("tensorflow")
    assert "keras" in report["machine"]["tensorflow"]
    assert ends.count("pass") == 3
    assert not {"FAIL", "ERROR"} & set(ends)
