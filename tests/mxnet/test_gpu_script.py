"""`make gpu` checks MXNet too; here it runs what makes sense on a CPU, and all of it on simulated GPUs."""

from ampx_mxnet.devices import describe


def test_the_checks_run_on_a_cpu(gpu_script_on_cpu):
    report, ends = gpu_script_on_cpu("mxnet")
    assert "mxnet" in report["machine"]
    cpu = describe("cpu")
    assert ends.count("pass") == (5 if cpu.native | cpu.emulated else 2)  # MXNet's bfloat16 needs AVX-512
    assert not {"FAIL", "ERROR"} & set(ends)


def test_the_checks_run_on_simulated_gpus(gpu_script_on_cpu):
    _, ends = gpu_script_on_cpu("mxnet", "simulated")
    assert ends == ["pass"] * 5
