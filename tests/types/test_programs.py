"""What mypy and pyright say of scripts that use ampx: an error in each line that says so, and in no other.

Run in the environment `types`, which has none of the frameworks: what the scripts use of them stands in `stubs`.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = {path.stem.removeprefix("with_"): path for path in sorted((ROOT / "tests/types/programs").glob("*.py"))}
STUBS = {path.name: path for path in sorted((ROOT / "tests/types/stubs").iterdir()) if path.is_dir()}


def mypy(programs, path, folder):
    """Return path and line of each error; those in ampx are not shown to who installs it."""
    command = (sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", folder, *programs)
    environment = {**os.environ, "MYPYPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stderr == ""
    errors = re.findall(r"^(.+?):(\d+): error", done.stdout, flags=re.M)
    return {(Path(folder, file).resolve(), int(line)) for file, line in errors}


def pyright(programs, path, folder):
    """Return path and line of each error."""
    settings = {"include": list(map(str, programs)), "extraPaths": list(map(str, path)), "typeCheckingMode": "standard"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = (sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "-p", folder)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    answer = json.loads(done.stdout)
    assert answer["summary"]["filesAnalyzed"] == len(programs)
    return {
        (Path(item["file"]).resolve(), item["range"]["start"]["line"] + 1)
        for item in answer["generalDiagnostics"]
        if item["severity"] == "error"
    }


def marked(programs):
    return {
        (path, number)
        for path in programs
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "  # error: " in line
    }


@pytest.mark.parametrize("installed", ["torch", "all"])
@pytest.mark.parametrize("checker", [mypy, pyright], ids=lambda checker: checker.__name__)
def test_a_checker_reports_the_errors_of_a_script_and_nothing_else(checker, installed, tmp_path):
    """With one framework installed, and with all: which ones are there makes no difference."""
    module = {"mypy": "mypy", "pyright": "basedpyright"}[checker.__name__]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"needs {module}, of the environment `types`")
    assert set(PROGRAMS) == set(STUBS)
    chosen = list(PROGRAMS) if installed == "all" else [installed]
    programs = [PROGRAMS[name] for name in chosen]
    errors = checker(programs, [ROOT, *(STUBS[name] for name in chosen)], tmp_path)
    assert {error for error in errors if error[0] in programs} == marked(programs)


def test_every_script_has_errors_to_be_found():
    assert all(marked([path]) for path in PROGRAMS.values())
