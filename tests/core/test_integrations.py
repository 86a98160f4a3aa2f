"""The files by which other tools take ampx in say what is true of it, and what they run works."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ampx

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
UNSCALED = """
import torch
scaler = torch.amp.GradScaler("cuda")
scaler.scale(loss).backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
"""


def read_yaml(name):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: it reads the file")
    return yaml.safe_load((ROOT / name).read_text())


def run(*command, **options):
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "300", **options.pop("env", {})}
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, env=environment, **options
    )


@pytest.fixture
def linted(tmp_path):
    """Return a folder with a file in which `ampx lint` finds something, and what that is."""
    (tmp_path / "train.py").write_text(UNSCALED)
    report = json.loads(run(sys.executable, "-m", "ampx", "lint", "--format", "json", ".", cwd=tmp_path).stdout)
    assert {problem["code"] for problem in report["problems"]} >= {"AMP101"}
    return tmp_path, report["problems"]


def test_the_matcher_of_vs_code_reads_every_line_that_lint_prints_of_a_problem(linted):
    folder, problems = linted
    (task,) = json.loads((ROOT / "integrations" / "vscode-tasks.json").read_text())["tasks"]
    command = task["command"].split()
    assert command[0] == "ampx"
    printed = run(sys.executable, "-m", *command, cwd=folder).stdout.splitlines()
    pattern = task["problemMatcher"]["pattern"]
    matches = [match for line in printed if (match := re.match(pattern["regexp"], line))]
    read = [[match[pattern[name]] for name in ("file", "line", "column", "code")] for match in matches]
    assert read == [[item["path"], str(item["line"]), str(item["column"]), item["code"]] for item in problems]
    assert all(match[pattern["message"]] for match in matches)


def test_the_action_shows_what_lint_finds_beside_the_lines(linted, tmp_path_factory):
    """Its commands run in bash as GitHub runs them, but that ampx is here already: nothing is installed."""
    folder, problems = linted
    action = read_yaml("action.yml")
    (step,) = action["runs"]["steps"]
    temporary = tmp_path_factory.mktemp("runner")
    shims = {
        "python3": "exit 0",
        "ampx-lint/bin/python": 'test "$*" = "-m pip install --quiet $SOURCE"',
        "ampx-lint/bin/ampx": f'exec "{sys.executable}" -m ampx "$@"',
    }
    for name, line in shims.items():
        path = temporary / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{line}\n")
        path.chmod(0o755)
    environment = {name: _filled(value, action["inputs"]) for name, value in step["env"].items()}
    environment |= {"RUNNER_TEMP": str(temporary), "PATH": f"{temporary}{os.pathsep}{os.environ['PATH']}"}
    done = run("bash", "-e", "-o", "pipefail", "-c", step["run"], cwd=folder, env=environment)
    assert done.returncode == 1, done.stderr
    shown = re.findall(r"^::(\w+) file=train.py,line=(\d+),", done.stdout, flags=re.M)
    assert shown == [(item["severity"], str(item["line"])) for item in problems]


def _filled(value, inputs):
    """Return a value of the action's file as GitHub fills it in where a workflow passes nothing."""
    value = value.replace("${{ github.action_path }}", str(ROOT))
    return re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda match: inputs[match[1]]["default"], value)


def test_the_image_holds_what_the_wheel_is_built_from_and_runs_doctor(tmp_path, monkeypatch):
    backend = pytest.importorskip("hatchling.build", reason="hatchling is not installed: it builds the distribution")
    text = (ROOT / "Dockerfile").read_text()
    for sources, target in re.findall(r"^COPY (.+) /src/(\S*)$", text, flags=re.M):
        for source in map((ROOT).joinpath, sources.split()):
            copied = tmp_path / target / ("" if target else source.name)
            ignored = shutil.ignore_patterns("__pycache__")
            (shutil.copytree if source.is_dir() else shutil.copy)(
                source, copied, **({"ignore": ignored} if source.is_dir() else {})
            )
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile(tmp_path / backend.build_wheel(str(tmp_path))) as wheel:
        packages = {name.partition("/")[0] for name in wheel.namelist()}
    assert {"ampx", *PROJECT["entry-points"]["ampx"].values()} <= packages
    extra = re.search(r"^ARG EXTRA=(\w+)$", text, flags=re.M)[1]
    assert extra in PROJECT["optional-dependencies"]
    assert (tmp_path / "constraints" / f"{extra}.txt").is_file()
    command = [
        word for name in ("ENTRYPOINT", "CMD") for word in json.loads(re.search(rf"^{name} (.+)$", text, flags=re.M)[1])
    ]
    assert command == ["ampx", "doctor"]


def test_the_conda_recipe_needs_and_offers_what_the_project_does():
    recipe = read_yaml("integrations/conda/recipe.yaml")
    assert recipe["context"]["version"] == ampx.__version__
    assert recipe["package"]["name"] == PROJECT["name"]
    needs = [requirement.partition(";")[0].replace(">=", " >=") for requirement in PROJECT["dependencies"]]
    assert recipe["requirements"]["run"] == [f"python {PROJECT['requires-python']}", *sorted(needs)]
    scripts = [f"{name} = {target}" for name, target in PROJECT["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == scripts
    assert recipe["about"]["license"] == PROJECT["license"]
    assert recipe["about"]["summary"] == PROJECT["description"]
    for script in recipe["tests"][1]["script"]:
        assert run(sys.executable, "-m", *script.split()).returncode == 0, script


def test_the_citation_has_what_the_format_asks_for_and_the_version_of_the_package():
    citation = read_yaml("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == ampx.__version__
    assert citation["license"] == PROJECT["license"]


# What can unpickle, or open a connection, and where ampx may: between a command and its own process, the kit's own
# copies, and the name of this machine in TensorBoard's file.
REFUSED = {"pickle", "marshal", "shelve", "socket", "ssl", "http", "urllib", "ftplib", "smtplib", "requests", "httpx"}
ALLOWED = {
    "ampx/numerics/child.py": {"pickle"},
    "ampx/numerics/trial.py": {"pickle"},
    "ampx/testing/kit/fuzz.py": {"pickle"},
    "ampx/loggers/targets.py": {"socket"},
}


def test_ampx_unpickles_nothing_of_its_users_and_opens_no_connection():
    """As SECURITY.md promises."""
    importing = {}
    for path in [*(ROOT / "ampx").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]:
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module.partition(".")[0])
        if names & REFUSED:
            importing[path.relative_to(ROOT).as_posix()] = names & REFUSED
    assert importing == ALLOWED
    uses = re.findall(r"\bsocket\.\w+", (ROOT / "ampx" / "loggers" / "targets.py").read_text())
    assert uses == ["socket.gethostname"]
