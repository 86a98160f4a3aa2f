"""What `ampx new-backend` writes: a sound package whose tests tell, one after the other, what is to be written."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from processes import run_python

pytest.importorskip("autograd", reason="autograd is not installed: the new package is written for it")

EXAMPLE = Path(__file__).parents[2] / "docs" / "example_backend"
MINI = Path(__file__).with_name("mini_answers.py")
TOY = Path(__file__).parents[1] / "kit" / "toy" / "framework.py"
CAPABILITIES = re.compile(r"^    capabilities = .*?^    \)\n", flags=re.M | re.S)


# The example itself may be installed; the new package takes its name.
HERE = {"AMPX_DISABLE_PLUGINS": "autograd", "COLUMNS": "200", "NO_COLOR": "1"}


def run(*command, cwd, check=True, **environment):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, **HERE, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


class Author:
    """Somebody who has the answers: modules that hold the finished classes, for the backend and for the harness.

    Attributes:
        folder: The package that `ampx new-backend` wrote.
        backend: Its module of verbs, relative to the folder.
        tests: Its module of tests.
    """

    def __init__(self, parent, framework, backend, tests):
        run("-m", "ampx.cli", "new-backend", framework, "--out", parent, cwd=parent)
        self.folder = parent / f"ampx-{framework}"
        self.backend = self.folder / "src" / f"ampx_{framework}" / "backend.py"
        self.tests = self.folder / "tests" / "test_conformance.py"
        self.answers = {self.backend: backend.read_text(), self.tests: tests.read_text()}

    def write_surroundings(self, *verbs):
        """Write what is around the stubs: imports, helpers, what is declared, and verbs that are stubs no more."""
        for path, answer in self.answers.items():
            text = path.read_text()
            path.write_text(answer[: answer.index("\nclass ") + 1] + text[text.index("\nclass ") + 1 :])
        declared = CAPABILITIES.search(self.answers[self.backend])[0]
        self.backend.write_text(CAPABILITIES.sub(declared, self.backend.read_text()))
        for verb in verbs:
            self.write_method(verb)

    def next_task(self):
        """Run the kit until it stops; give the method that it asks for with the message, None once it passes."""
        paths = [str(self.backend.parents[1]), str(self.folder.parent)]
        command = ("-m", "pytest", "-x", "-p", "no:cacheprovider")
        done = run_python(*command, cwd=self.folder, **HERE, PYTHONPATH=os.pathsep.join(paths))
        if done.returncode == 0:
            return None, done.stdout
        tasks = re.findall(r"^E\s+NotImplementedError: (\w+\.\w+): (.+)$", done.stdout, flags=re.M)
        assert len(tasks) == 1, done.stdout
        return tasks[0]

    def write_method(self, task):
        """Write a method in the place of its stub, or at the end of the class."""
        cls = task.partition(".")[0]
        path = self.backend if cls.endswith("Backend") else self.tests
        text, answer = path.read_text(), self.answers[path]
        lines, written, stub = text.splitlines(), methods(answer)[task], methods(text).get(task)
        method = answer.splitlines()[written.lineno - 1 : written.end_lineno]
        if stub:
            lines[stub.lineno - 1 : stub.end_lineno] = method
        else:
            end = next(node.end_lineno for node in ast.parse(text).body if getattr(node, "name", None) == cls)
            lines[end:end] = ["", *method]
        path.write_text("\n".join(lines) + "\n")

    def answer_all(self):
        """Write what the kit asks for until it asks no more; give the names in order, and how many tests pass."""
        asked = []
        while True:
            task, text = self.next_task()
            if task is None:
                return asked, int(re.search(r"(\d+) passed", text)[1])
            assert task not in asked, f"{task} was asked for again"
            asked.append(task)
            self.write_method(task)


def methods(text):
    """Return the methods of the classes of a module, by class and name."""
    return {
        f"{cls.name}.{item.name}": item
        for cls in ast.parse(text).body
        if isinstance(cls, ast.ClassDef)
        for item in cls.body
        if isinstance(item, ast.FunctionDef)
    }


@pytest.fixture
def author(tmp_path):
    backend, tests = EXAMPLE / "src/ampx_autograd/backend.py", EXAMPLE / "tests/test_conformance.py"
    return Author(tmp_path, "autograd", backend, tests)


@pytest.fixture
def package(author):
    return author.folder


def test_the_new_package_passes_the_packaging_checks(package, tmp_path):
    run("-m", "build", "--no-isolation", package, "--outdir", tmp_path / "dist", cwd=tmp_path)
    files = sorted(path.name for path in (tmp_path / "dist").iterdir())
    assert files == ["ampx_autograd-0.1.0-py3-none-any.whl", "ampx_autograd-0.1.0.tar.gz"]
    checked = run("-m", "twine", "check", "--strict", *(tmp_path / "dist").iterdir(), cwd=tmp_path)
    assert checked.stdout.count("PASSED") == 2
    with zipfile.ZipFile(tmp_path / "dist" / files[0]) as wheel:
        assert {name for name in wheel.namelist() if ".dist-info/" not in name} == {
            "ampx_autograd/__init__.py",
            "ampx_autograd/backend.py",
        }
        metadata = message_from_bytes(wheel.read("ampx_autograd-0.1.0.dist-info/METADATA"))
    assert metadata["Name"] == "ampx-autograd"
    assert metadata.get_all("Requires-Dist")[:2] == ["ampx-precision", "autograd"]


def test_the_new_package_is_found_once_it_is_installed(package, tmp_path):
    target = tmp_path / "site"
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", target, package)
    run(*install, cwd=tmp_path)
    program = "import ampx, ampx_autograd; print(ampx.backends()['autograd'], ampx_autograd.__file__)"
    listed = run("-c", program, cwd=tmp_path, PYTHONPATH=str(target), AMPX_DISABLE_PLUGINS="")
    assert listed.stdout.split() == ["registered", str(target / "ampx_autograd" / "__init__.py")]


def test_the_kit_asks_for_the_first_thing_to_write(author):
    assert author.next_task() == ("AutogradHarness.parameter", "make a trainable float32 vector.")


@pytest.mark.slow
def test_the_kit_asks_for_one_thing_after_the_other_until_the_example_stands(author):
    for path in ("pyproject.toml", "src/ampx_autograd/optimizer.py"):
        (author.folder / path).write_text((EXAMPLE / path).read_text())
    author.write_surroundings("AutogradBackend.cast", "AutogradBackend.autocast")
    example = (EXAMPLE / "src/ampx_autograd/backend.py").read_text()
    with author.backend.open("a") as file:
        file.write(example[example.index("\n\ndef map_floating") :])
    asked, passed = author.answer_all()
    assert asked == [
        *("AutogradBackend.activate", "AutogradBackend.deactivate"),
        *("AutogradHarness.parameter", "AutogradHarness.optimizer", "AutogradHarness.loss", "AutogradHarness.backward"),
        *("AutogradHarness.numbers", "AutogradBackend.device", "AutogradBackend.is_optimizer"),
        *("AutogradBackend.inspect_loss", "AutogradBackend.scale", "AutogradBackend.unscale", "AutogradBackend.apply"),
        *("AutogradHarness.optimizer_state", "AutogradHarness.dtype_of", "AutogradHarness.tensor"),
    ]
    assert passed > 90


@pytest.mark.slow
def test_gradients_that_hang_on_parameters_are_asked_for_too(tmp_path):
    (tmp_path / "mini.py").write_text(TOY.read_text())
    author = Author(tmp_path, "mini", MINI, MINI)
    author.write_surroundings(*(name for name in methods(MINI.read_text()) if not name.endswith("gradients")))
    asked, passed = author.answer_all()
    assert asked == ["MiniHarness.gradients", "MiniBackend.gradients", "MiniBackend.zero_gradients"]
    assert passed > 90
