"""`make gpu` works from a source tree with nothing but torch and pluggy, and tells what it did."""

import json
import os
import pathlib
import sys
import time
from importlib.util import find_spec

import pytest
import torch

from processes import run_python

# The checks are files beside gpu.py; only their folder goes on the path, so that ampx stays the installed one.
sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))

from _gpu_checks import Outcome, Report, Setup, run_check
from _gpu_tests import run_tests

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


@pytest.mark.nightly  # those of JAX, MXNet and Paddle run every time
def test_all_checks_run_on_the_cpu_and_end_in_a_table_and_json(tmp_path):
    target = tmp_path / "deep" / "gpu.json"
    done = run_torch("--device", "cpu", "--out", str(target))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(target.read_text())
    status = {check["check"]: check["status"] for check in report["checks"]}
    assert len(status) == 21
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


# -- what needs no framework ---------------------------------------------------------------------------------

TESTS_MARKED_GPU = """
import pytest

@pytest.mark.gpu
def test_shows(record_property):
    record_property("ampx.tested", ["torch", "cuda/float16/O1/casting"])

@pytest.mark.gpu
def test_fails(record_property):
    record_property("ampx.tested", ["torch", "cuda/float16/O2/casting"])
    assert 1 + 1 == 3

@pytest.mark.gpu
def test_is_skipped():
    pytest.skip("there is no CUDA device")

def test_of_the_cpu():
    raise RuntimeError
"""


@pytest.fixture
def tree(tmp_path):
    for name, text in (("tests/conformance/test_torch.py", ""), ("tests/torch/test_a.py", TESTS_MARKED_GPU)):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_tests_marked_gpu_are_checks_and_what_passed_counts(tree, capsys):
    outcomes = list(run_tests(tree, "torch", "ampx_torch", "", False, float("inf")))
    ends = {outcome.check.rpartition("::")[2]: (outcome.status, outcome.covers) for outcome in outcomes}
    assert ends == {
        "test_shows": ("pass", ["cuda/float16/O1/casting"]),
        "test_fails": ("FAIL", []),
        "test_is_skipped": ("not here", []),
        "tests marked gpu": ("FAIL", []),
    }
    assert "assert (1 + 1) == 3" in outcomes[-1].data["traceback"]
    assert "1 pass, 1 FAIL, 1 not here" in capsys.readouterr().out


STARTS_A_PROCESS = """
import subprocess, sys
import pytest

@pytest.mark.gpu
def test_starts_a_process():
    code = "import ampx; raise SystemExit('amphora' not in ampx.backends())"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
"""


def test_processes_that_tests_start_find_a_backend_that_is_not_installed(tmp_path):
    for name, text in (("conformance/test_amphora.py", ""), ("amphora/test_a.py", STARTS_A_PROCESS)):
        (tmp_path / "tests" / name).parent.mkdir(parents=True)
        (tmp_path / "tests" / name).write_text(text)
    (tmp_path / "ampx_amphora.py").write_text(
        "import ampx\n\n\n@ampx.hookimpl\ndef ampx_register_backends(register):\n"
        "    register('amphora', None, roots=('amphora',), requires='amphora')\n"
    )
    outcomes = list(run_tests(tmp_path, "amphora", "ampx_amphora", "", False, float("inf")))
    assert [outcome.status for outcome in outcomes] == ["pass", "pass"], outcomes[-1].data


def test_tests_that_pytest_cannot_collect_are_an_error(tree):
    (tree / "tests" / "torch" / "test_a.py").write_text("import pytest\npytest.mark.gpu\nraise RuntimeError\n")
    file, whole = run_tests(tree, "torch", "ampx_torch", "", False, float("inf"))
    assert (file.check, file.status) == ("tests/torch/test_a.py", "FAIL")
    assert (whole.status, "RuntimeError" in whole.data["traceback"]) == ("ERROR", True)


def test_a_file_that_is_left_out_says_what_it_lacks(tree):
    (tree / "tests" / "torch" / "test_a.py").write_text(
        "import pytest\npytest.mark.gpu\npytest.importorskip('amphora')\n"
    )
    file, whole = run_tests(tree, "torch", "ampx_torch", "", False, float("inf"))
    assert (file.check, file.status, "'amphora'" in file.line) == ("tests/torch/test_a.py", "not here", True)
    assert whole.status == "not here"


def test_after_the_deadline_nothing_is_started(tree):
    def never(setup):
        raise RuntimeError

    for outcome in (
        run_check("torch", never, Setup("cpu"), (), time.monotonic() - 1),
        *run_tests(tree, "torch", "ampx_torch", "", False, time.monotonic() - 1),
    ):
        assert (outcome.status, outcome.line) == ("not here", "no time was left")


def test_the_report_is_there_after_every_check_and_processes_add_to_it(tmp_path):
    path = tmp_path / "deep" / "gpu.json"
    first = Report(path, "cuda", append=False)
    first.machine["torch"] = {"name": "a GPU"}
    first.add(Outcome("torch", "a", "pass", "", 0.1, ["cuda/float16/O1/casting"]))
    assert [check["check"] for check in json.loads(path.read_text())["checks"]] == ["a"]
    second = Report(path, "cuda", append=True)
    second.add(Outcome("jax", "b", "FAIL", "", 0.1, []))
    content = json.loads(path.read_text())
    assert [check["check"] for check in content["checks"]] == ["a", "b"]
    assert content["counts"] == {"pass": 1, "FAIL": 1, "ERROR": 0, "not here": 0}
    assert content["machine"]["torch"] == {"name": "a GPU"}
    first.read()
    assert first.failed()


def test_each_framework_runs_in_a_process_of_its_own(tmp_path):
    target = tmp_path / "gpu.json"
    Report(target, "cpu", append=False).add(Outcome("torch", "of a former run", "FAIL", "", 0.1, []))
    path = f"{ROOT}{os.pathsep}{ROOT / 'backends'}"
    arguments = ("--device", "cpu", "--quick", "--only", "scale_trace_is", "--out", target)
    done = run_python(ROOT / "benchmarks" / "gpu.py", *arguments, check=True, nests=True, PYTHONPATH=path)
    others = [framework for framework in ("jax", "tensorflow", "paddle", "mxnet") if not find_spec(framework)]
    assert all(f"{framework}: not installed" in done.stdout for framework in others)
    checks = json.loads(target.read_text())["checks"]
    assert [(check["framework"], check["status"], check["quick"]) for check in checks] == [("torch", "pass", True)]
    assert "1 pass, 0 FAIL, 0 ERROR, 0 not here" in done.stdout


@pytest.fixture
def run_broken(tmp_path):
    """Run two checks in a run of their own, the first of which breaks; give how they ended."""

    def run(end, device):
        checks = tmp_path / "_gpu_broken.py"
        checks.write_text(f"""
import os, time
from _gpu_checks import Figure
def breaks(setup): {end}
def passes(setup): return Figure(str(os.getpid()))
CHECKS, COVERS, NOT_SIMULATED = (breaks, passes), {{}}, {{}}
has, describe = lambda device: True, lambda device: {{}}
""")
        source, target = (ROOT / "benchmarks" / "gpu.py").read_text(), tmp_path / "gpu.json"
        script = tmp_path / "gpu.py"
        script.write_text(
            source.replace('("_gpu_torch", "ampx_torch")', '("_gpu_broken", "ampx_torch")').replace("120.0", "1.0")
        )
        path = os.pathsep.join(map(str, (ROOT, ROOT / "backends", ROOT / "benchmarks", tmp_path)))
        arguments = ("--device", device, "--quick", "--only", "breaks|passes", "--out", target)
        done = run_python(script, *arguments, nests=True, PYTHONPATH=path)
        assert done.returncode == 1, done.stderr
        broken, passed = json.loads(target.read_text())["checks"]
        assert (broken["status"], passed["status"]) == ("ERROR", "pass")
        return broken, passed

    return run


@pytest.mark.parametrize(("end", "code"), [("os._exit(7)", 7), ("time.sleep(60)", 1)], ids=["crashes", "hangs"])
def test_a_check_that_takes_its_process_with_it_is_an_error_and_the_next_check_runs(run_broken, end, code):
    broken, _ = run_broken(end, "cpu")
    assert broken["line"] == f"did not end: its process ended with {code}"


def test_after_a_check_that_broke_on_a_gpu_another_process_goes_on(run_broken):
    """What failed on the device may fail all that the process asks of it later."""
    broken, passed = run_broken("raise RuntimeError(os.getpid())", "cuda")
    assert broken["line"].startswith("RuntimeError: ")
    assert broken["line"] != f"RuntimeError: {passed['line']}"
