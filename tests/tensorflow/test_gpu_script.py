"""`make gpu` checks TensorFlow too; here it runs what makes sense on a CPU."""

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
        timeout=280,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'backends'}", "TF_CPP_MIN_LOG_LEVEL": "3"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "keras" in json.loads(report.read_text())["machine"]["tensorflow"]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("tensorflow ")]
    assert [words[1] for words in lines].count("pass") == 3
    assert not {"FAIL", "ERROR"} & {words[1] for words in lines}
