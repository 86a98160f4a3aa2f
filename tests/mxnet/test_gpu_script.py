"""`make gpu` checks MXNet too; here it runs what makes sense on a CPU."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def test_the_checks_run_on_a_cpu(tmp_path):
    report = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", "--quick", "--out", str(report)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'backends'}"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mxnet" in json.dumps(json.loads(report.read_text()))
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("mxnet ")]
    assert [words[1] for words in lines].count("pass") == 5
    assert not {"FAIL", "ERROR"} & {words[1] for words in lines}
