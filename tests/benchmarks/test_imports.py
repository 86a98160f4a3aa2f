"""Every benchmark can be imported where nothing is installed but what its tox environment names."""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ampx.cli.frameworks import KNOWN

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HERE = [framework for framework, roots in KNOWN.items() if importlib.util.find_spec(roots[0])]
IMPORT_ALL = """
import importlib, json, sys
absent, modules = json.loads(sys.argv[1])

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
sys.path.insert(0, sys.argv[2])
missing = {}
for module in modules:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing[module] = error.name.partition(".")[0]
print(json.dumps(missing))
"""


OWNERS = "import importlib.metadata as m, json; print(json.dumps(dict(m.packages_distributions())))"


def needed(framework):
    """Return the requirements of the tox environment that runs the benchmarks of a framework."""
    environment = PROJECT["tool"]["tox"]["env"][f"bench-{framework}"]
    extras = [line for extra in environment["extras"] for line in PROJECT["project"]["optional-dependencies"][extra]]
    return [Requirement(line) for line in (*PROJECT["project"]["dependencies"], *extras, *environment.get("deps", ()))]


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def brought(requirements):
    """Return the installed distributions that requirements bring, and the required ones that are not installed."""
    installed, lacking, waiting = set(), set(), list(requirements)
    while waiting:
        requirement = waiting.pop()
        key = (normal(requirement.name), frozenset(requirement.extras))
        if key in installed:
            continue
        try:
            lines = importlib.metadata.requires(requirement.name) or ()
        except importlib.metadata.PackageNotFoundError:
            lacking.add(key[0])
            continue
        installed.add(key)
        for each in map(Requirement, lines):
            asked = ("", *requirement.extras)
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in asked):
                waiting.append(each)
    return {name for name, _ in installed}, lacking


@pytest.mark.nightly  # there `make test-all` runs the benchmarks themselves, too
@pytest.mark.parametrize("framework", HERE)
def test_benchmarks_import_nothing_that_their_environment_lacks(framework):
    ours, lacking = brought(each for each in needed(framework) if each.marker is None or each.marker.evaluate())
    # In a process of its own: setuptools, once imported, shows the distributions that it carries along.
    asked = subprocess.run([sys.executable, "-c", OWNERS], capture_output=True, text=True, check=True)
    owners = json.loads(asked.stdout)
    absent = [module for module, names in owners.items() if not {*map(normal, names)} & {*ours, "ampx-precision"}]
    assert "pytest" in absent
    modules = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    # The kit is on the path of tests, and not on that of benchmarks.
    paths = [path for path in os.environ["PYTHONPATH"].split(os.pathsep) if path != str(ROOT / "tests" / "kit")]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, json.dumps([absent, modules]), str(ROOT / "benchmarks")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    others = {root for name, roots in KNOWN.items() if name != framework for root in roots}
    # Peers that the environment of the tests does without; `make test-all` runs all parts beside them.
    others |= {name.replace("-", "_") for name in lacking}
    missing = json.loads(done.stdout.splitlines()[-1])
    assert {module: name for module, name in missing.items() if name not in others} == {}
