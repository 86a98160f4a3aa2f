"""What is on file as tested is backed by tests that exist, passed and showed it; else the run fails."""

import json
import os
import subprocess
import sys

import pytest

CONFTEST = """
import pathlib
from ampx.testing.evidence import EvidencePlugin

def pytest_addoption(parser):
    parser.addoption("--regenerate", action="store_true")

def pytest_configure(config):
    folder = pathlib.Path(__file__).parent / "evidence"
    config.pluginmanager.register(EvidencePlugin(folder, config.getoption("--regenerate")))
    config.addinivalue_line("markers", "gpu: needs one")
"""
TESTS = """
import pytest

def test_declared(record_property):
    record_property("ampx.declared", ["mine", {"devices": ["cpu"]}])
    record_property("ampx.refused", ["mine", "cpu/float16/O3", "no."])

def test_scaling(record_property):
    record_property("ampx.tested", ["mine", "cpu/float32/O0/scaling"])

def test_state(record_property):
    record_property("ampx.tested", ["mine", "cpu/float32/O0/state"])

@pytest.mark.gpu
def test_on_gpu(record_property):
    record_property("ampx.tested", ["mine", "gpu/float32/O0/state"])
"""


class Project:
    """A folder with tests and a file of what they showed."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "conftest.py").write_text(CONFTEST)
        self.write(TESTS)

    def write(self, tests, name="test_a.py"):
        (self.folder / name).write_text(tests)

    def run(self, *arguments):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={self.folder}", *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        return done.returncode, done.stdout + done.stderr

    def on_file(self):
        return json.loads((self.folder / "evidence" / "mine.json").read_text())


@pytest.fixture
def project(tmp_path):
    found = Project(tmp_path)
    code, output = found.run("--regenerate")
    assert code == 0, output
    return found


def test_what_passed_is_on_file_and_a_second_run_agrees(project):
    assert project.on_file() == {
        "schema": "ampx.evidence/1",
        "framework": "mine",
        "declared": {"devices": ["cpu"]},
        "refused": {"cpu/float16/O3": "no."},
        "tested": {
            "cpu/float32/O0/scaling": ["test_a.py::test_scaling"],
            "cpu/float32/O0/state": ["test_a.py::test_state"],
        },
    }
    code, output = project.run()
    assert code == 0, output


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("def test_state(", "def test_other(", "cpu/float32/O0/state: test_a.py::test_state does not exist"),
        ("def test_state(", "def test_other(", "O0/state is not on file as shown by test_a.py::test_other"),
        ("O0/state", "O0/casting", "cpu/float32/O0/state: test_a.py::test_state no longer shows it"),
        (
            '    record_property("ampx.tested", ["mine", "cpu/float32/O0/state"])',
            '    pytest.skip("not here")',
            "cpu/float32/O0/state: test_a.py::test_state did not pass",
        ),
        ('"no."', '"never."', "cpu/float16/O3 is refused with another message: never."),
        ('["cpu"]}', '["cpu", "gpu"]}', "what the backend declares has changed"),
    ],
)
def test_a_stale_file_fails_the_run_and_says_why(project, old, new, problem):
    assert TESTS.count(old) >= 1
    project.write(TESTS.replace(old, new, 1))
    code, output = project.run()
    assert code == 1, output
    assert problem in output
    assert "pytest --regenerate" in output


def test_a_framework_of_which_nothing_is_shown_any_more_is_stale_too(project):
    project.write(
        TESTS.replace("(record_property):", "():\n    pytest.skip('not here')\n\ndef not_a_test(record_property):")
    )
    code, output = project.run()
    assert code == 1, output
    assert "test_a.py::test_state did not pass" in output


def test_a_test_that_fails_shows_nothing(project):
    project.write(TESTS.replace('"cpu/float32/O0/state"])', '"cpu/float32/O0/state"]); assert False', 1))
    code, _ = project.run("--regenerate")
    assert code == 1
    assert list(project.on_file()["tested"]) == ["cpu/float32/O0/scaling"]


@pytest.mark.parametrize("chosen", [["-k", "scaling"], ["test_a.py::test_scaling"], ["-m", "not gpu"]])
def test_what_was_not_run_is_not_judged(project, chosen):
    code, output = project.run(*chosen)
    assert code == 0, output


@pytest.mark.parametrize("chosen", [["-k", "state or declared"], ["test_a.py::test_state"]])
def test_regenerating_some_tests_keeps_what_the_others_showed(project, chosen):
    before = project.on_file()
    code, _ = project.run("--regenerate", *chosen)
    assert code == 0
    assert project.on_file() == before


def test_regenerating_one_file_keeps_what_others_showed(project):
    project.write(TESTS.replace("test_scaling", "test_scale"), "test_b.py")
    code, _ = project.run("--regenerate", "test_b.py")
    assert code == 0
    assert project.on_file()["tested"]["cpu/float32/O0/scaling"] == ["test_a.py::test_scaling", "test_b.py::test_scale"]
    (project.folder / "test_b.py").unlink()
    code, output = project.run()
    assert code == 1
    assert "test_b.py::test_state does not exist" in output
    project.run("--regenerate")
    assert project.on_file()["tested"]["cpu/float32/O0/scaling"] == ["test_a.py::test_scaling"]
