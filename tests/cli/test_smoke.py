"""The command beside the framework of this environment: what it says is what the framework and its backend say."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path

import pytest

from ampx.cli import plot
from ampx.cli.capability_table import BEGIN, END
from ampx.plugins import default_registry

README = Path(__file__).parents[2] / "README.md"
# The framework's module, and the distributions of which one has its version.
FRAMEWORKS = {
    "torch": ("torch",),
    "tensorflow": ("tensorflow-cpu", "tensorflow"),
    "mxnet": ("mxnet",),
    "paddle": ("paddlepaddle", "paddlepaddle-gpu"),
    "jax": ("jax",),
}


@pytest.fixture
def framework():
    installed = [name for name in FRAMEWORKS if importlib.util.find_spec(name)]
    if not installed:
        pytest.skip("no framework is installed")
    return installed[0]


def installed_version(framework):
    for distribution in FRAMEWORKS[framework]:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    pytest.fail(f"no distribution of {framework} is installed")


def test_doctor_says_what_is_installed(framework, installed_command):
    report = json.loads(installed_command("doctor", "--json", "--framework", framework, code=None).stdout)
    (facts,) = report["frameworks"]
    assert facts["state"] == "ready"
    assert facts["version"].partition("+")[0] == installed_version(framework).partition("+")[0]
    assert facts["mixed_precision"] in {"native", "emulated", "none"}
    assert "cpu" in [device["name"] for device in facts["devices"]]
    assert facts["init"]["reason"]


def test_the_readme_shows_what_the_backend_declares(framework, ampx_command):
    """Frameworks do not coexist, so each environment checks the lines of the framework that it has."""
    generated = ampx_command("backends", "--markdown").stdout.splitlines()
    (declared,) = [line for line in generated if line.startswith(f"| {framework} |")]
    readme = README.read_text(encoding="utf-8")
    shown = readme[readme.index(BEGIN) : readme.index(END)].splitlines()
    assert declared in shown, "update README.md from `ampx backends --markdown`"
    assert not any("| unavailable (" in line for line in shown)


@pytest.mark.filterwarnings("ignore:No ccache found")  # Paddle's, while it is imported
def test_the_demo_trains_and_prints_what_it_writes(framework, ampx_command, tmp_path, png_size, check_documented):
    for module in ("matplotlib", "sklearn"):
        pytest.importorskip(module, reason=f"needs {module}, of the extra demo")
    out = tmp_path / "out"
    cpu = default_registry().load(framework).device("cpu")
    dtypes = ["--dtype", "bfloat16"] if "bfloat16" in cpu.native | cpu.emulated else []
    done = ampx_command("demo", "--framework", framework, "--epochs", "1", *dtypes, "--json", "--out", str(out))
    report = json.loads(done.stdout)
    assert json.loads((out / "results.json").read_text()) == report
    assert png_size(out / "demo.png") == tuple(round(side * plot.DPI) for side in plot.SIZE)
    assert report["schema"] == "ampx.demo/1"
    check_documented(report)
    assert report["runs"][0]["label"] == "float32"
    for run in report["runs"]:
        assert len(run["losses"]) == len(run["scales"]) == 1347 // 32
        assert (report["overflow_at"] in run["skipped"]) == (run["dtype"] != "float32")
        assert 0 < run["accuracy"] <= 1
        if run["label"] == "float32, scaled":
            assert run["losses"] == report["runs"][0]["losses"]  # scales are powers of two
