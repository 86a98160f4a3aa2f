"""The tests marked `gpu` and the conformance kit on a GPU, as checks; and the plugin of pytest that tells their ends.

The plugin stands in this file, too, so that pytest can load it where ampx is not installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from _gpu_checks import Outcome, show

_ENDS = "AMPX_GPU_ENDS"  # the file that the plugin writes
_STATUS = {"passed": "pass", "failed": "FAIL", "skipped": "not here"}
# What the project's settings ask of pytest-timeout, coverage and warnings does not hold where only pytest is.
# A test that hangs ends the process, where pytest can do that (from 9.0 on), and leaves time to what comes behind.
_SETTINGS = """[pytest]
addopts = --import-mode=importlib
faulthandler_timeout = 180
faulthandler_exit_on_timeout = true
markers =
    gpu: needs a CUDA device
    nightly: left out where time is short
"""


def run_tests(
    root: pathlib.Path, framework: str, plugin: str, only: str, simulated: bool, deadline: float
) -> Iterator[Outcome]:
    """Run a framework's tests marked `gpu` in one process of pytest, and give how each ended."""
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    left = deadline - time.monotonic()
    if missing or left <= 0:
        reason = f"needs {' and '.join(missing)}" if missing else "no time was left"
        outcome = Outcome(framework, "tests marked gpu", "not here", reason, 0.0, [])
        show(outcome)
        yield outcome
        return
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        settings, ends = pathlib.Path(folder, "pytest.ini"), pathlib.Path(folder, "ends")
        settings.write_text(_SETTINGS, encoding="utf-8")
        ends.touch()
        if not importlib.metadata.entry_points(group="ampx", name=framework):
            # Processes that tests start look for the backend by themselves.
            installed = pathlib.Path(folder, "ampx_source_tree-0.dist-info")
            installed.mkdir()
            (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: ampx-source-tree\nVersion: 0\n")
            (installed / "entry_points.txt").write_text(f"[ampx]\n{framework} = {plugin}\n")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-c", str(settings), "--rootdir", str(root)]
        command += ["-p", "_gpu_tests", "-p", "no:cacheprovider", *(["-k", only] if only else [])]
        command += map(str, _files(root, framework))
        before = filter(None, [os.environ.get("PYTHONPATH")])
        paths = [root, root / "backends", pathlib.Path(__file__).parent, pathlib.Path(folder), *before]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            _ENDS: str(ends),
            **({"AMPX_SIMULATE_CUDA": "1"} if simulated else {}),
        }
        printed = pathlib.Path(folder, "printed")
        outcomes = []
        with (
            printed.open("w", encoding="utf-8") as output,
            ends.open(encoding="utf-8") as lines,
            subprocess.Popen(command, cwd=root, env=environment, stdout=output, stderr=subprocess.STDOUT) as process,
        ):
            running = True
            while running:
                try:
                    process.wait(1)
                    running = False
                except subprocess.TimeoutExpired:
                    if time.monotonic() > deadline:
                        process.kill()
                for line in lines:
                    outcomes.append(_outcome(framework, json.loads(line)))
                    yield outcomes[-1]
        text = printed.read_text(encoding="utf-8")
    failed = [outcome for outcome in outcomes if outcome.status == "FAIL"]
    counts = {status: sum(outcome.status == status for outcome in outcomes) for status in _STATUS.values()}
    line = ", ".join(f"{count} {status}" for status, count in counts.items())
    # Pytest's own codes: 0 all passed, 1 some failed, 5 none was there.
    broke = process.returncode not in (0, 1, 5) or (process.returncode == 1 and not failed)
    status = "ERROR" if broke else "FAIL" if failed else "pass" if counts["pass"] else "not here"
    line += f"; pytest ended with {process.returncode}" if broke else ""
    data = {"traceback": text[-20_000:]} if broke or failed else {}
    seconds = round(time.perf_counter() - start, 2)
    whole = Outcome(framework, "tests marked gpu", status, line, seconds, [], data)
    show(whole)
    yield whole


def _files(root: pathlib.Path, framework: str) -> list[pathlib.Path]:
    """Return the files with such tests; those that run these checks themselves are left out."""
    paths = [root / "tests" / "conformance" / f"test_{framework}.py", *(root / "tests" / framework).glob("test_*.py")]
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(paths)}
    return [path for path, text in texts.items() if "mark.gpu" in text and "import CHECKS" not in text]


def _outcome(framework: str, end: dict[str, Any]) -> Outcome:
    return Outcome(framework, end["test"], _STATUS[end["outcome"]], end["line"], end["seconds"], end["covers"])


# -- the plugin --------------------------------------------------------------------------------------------


def pytest_collectreport(report: Any) -> None:
    """Write which file was left out, because something that it imports is missing, or could not be read."""
    if not report.passed:
        _write(report, 0.0, [])


def pytest_runtest_logreport(report: Any) -> None:
    """Write how a test ended, and what it has on record, at once."""
    if report.when == "call" or not report.passed:
        covers = [value[1] for name, value in report.user_properties if name == "ampx.tested" and report.passed]
        _write(report, report.duration, covers)


def _write(report: Any, seconds: float, covers: list[str]) -> None:
    line = "" if report.passed else str(report.longrepr)[-200:].replace("\n", " ")
    end = {
        "test": report.nodeid,
        "outcome": report.outcome,
        "line": line,
        "seconds": round(seconds, 2),
        "covers": covers,
    }
    with pathlib.Path(os.environ[_ENDS]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(end) + "\n")
