"""What tests showed goes on file, and the files are compared with what the tests of this run showed."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from ampx.cli.evidence import ASPECTS, COMBINATIONS
from ampx.testing.evidence import EvidencePlugin

ROOT = pathlib.Path(__file__).parents[1]


def pytest_addoption(parser):
    parser.addoption(
        "--regenerate",
        action="store_true",
        help="write tests/states and docs/evidence anew from what the tests of this run show",
    )


def pytest_configure(config):
    plugin = EvidencePlugin(ROOT / "docs" / "evidence", config.getoption("--regenerate"))
    config.pluginmanager.register(plugin, "ampx evidence")


@pytest.fixture
def covers(record_property):
    """Put on record what a test shows, at its end; `where` is device/dtype/level as `ampx.init` takes them."""

    def record(aspect, framework, where):
        assert aspect in ASPECTS
        assert tuple(where.split("/")[1:]) in COMBINATIONS
        record_property("ampx.tested", [framework, f"{where}/{aspect}"])

    return record


@pytest.fixture
def gpu_script_on_cpu(tmp_path):
    """Run what `make gpu` runs of one framework on a CPU; give its report, and how each of its checks ended."""

    def run(framework):
        report = tmp_path / "gpu.json"
        done = subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", "--quick", "--out", str(report)],
            capture_output=True,
            text=True,
            timeout=280,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'backends'}",
                "TF_CPP_MIN_LOG_LEVEL": "3",
            },
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [line.split() for line in done.stdout.splitlines() if line.startswith(f"{framework} ")]
        return json.loads(report.read_text()), [words[1] for words in lines]

    return run
