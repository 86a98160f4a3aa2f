"""`make gpu` works from a source tree with nothing but torch and pluggy, and tells what it did."""

import json
import pathlib

import pytest
import torch

from processes import run_python

ROOT = pathlib.Path(__file__).parents[2]
# What a machine with only torch and pluggy does not have: an installed ampx with its entry points, test and plot tools.
BARE = """
import importlib.metadata, runpy, sys
importlib.metadata.entry_points = lambda **_: importlib.metadata.EntryPoints()
sys.modules.update(dict.fromkeys(("pytest", "hypothesis", "rich", "typer", "sklearn", "matplotlib")))
sys.path[:0] = [{root!r}, {backends!r}, {benchmarks!r}]
sys.argv = ["benchmarks/gpu.py", *{arguments!r}]
runpy.run_path({script!r}, run_name="__main__")
"""


def run_script(*arguments, before=""):
    paths = {"root": ROOT, "backends": ROOT / "backends", "benchmarks": ROOT / "benchmarks"}
    code = before + BARE.format(
        **{name: str(path) for name, path in paths.items()},
        script=str(ROOT / "benchmarks" / "gpu.py"),
        arguments=arguments,
    )
    return run_python("-c", code)


def run_torch(*arguments, before=""):
    """Run PyTorch's checks in the process that has been made bare."""
    return run_script("--framework", "torch", "--quick", *arguments, before=before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_and_runs_nothing():
    done = run_torch()
    assert done.returncode == 2, done.stderr
    assert done.stdout.splitlines()[-1] == "no CUDA device: nothing was run"


def test_all_checks_run_on_the_cpu_and_end_in_a_table_and_json(tmp_path):
    target = tmp_path / "deep" / "gpu.json"
    done = run_torch("--device", "cpu", "--out", str(target))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(target.read_text())
    status = {check["check"]: check["status"] for check in report["checks"]}
    assert len(status) == 17
    assert {name for name, outcome in status.items() if outcome != "pass"} == {"syncs_per_step_are_not_more"}
    assert report["machine"]["torch"]["torch"] == torch.__version__
    assert all(f" {name} " in done.stdout for name in status)
    operators = next(check for check in report["checks"] if check["check"] == "kernels_per_step_are_not_more")
    assert all(ours <= native for ours, native in operators["data"].values())


def test_a_check_that_fails_makes_the_run_fail(tmp_path):
    target = tmp_path / "gpu.json"
    # Overflows are injected with fill_: without it, nothing overflows and the trace is another.
    before = "import torch; torch.Tensor.fill_ = lambda tensor, value: tensor\n"
    done = run_torch("--device", "cpu", "--only", "scale_trace", "--out", str(target), before=before)
    assert done.returncode == 1
    assert "FAIL" in done.stdout
    assert "AssertionError: SGD foreach, device_scale=None: [65536.0, 65536.0, 131072.0, 131072.0" in done.stdout
    assert json.loads(target.read_text())["counts"]["FAIL"] == 1
