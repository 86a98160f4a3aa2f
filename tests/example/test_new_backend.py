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

pytest.importorskip("autograd", reason="autograd is not installed: the new package is written for it")

EXAMPLE = Path(__file__).parents[2] / "docs" / "example_backend"
BACKEND, TESTS = Path("src/ampx_autograd/backend.py"), Path("tests/test_conformance.py")


def run(*command, cwd, check=True, **environment):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        # The example itself may be installed; the new package takes its name.
        env={**os.environ, "AMPX_DISABLE_PLUGINS": "autograd", "COLUMNS": "200", "NO_COLOR": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture
def package(tmp_path):
    run("-m", "ampx.cli", "new-backend", "autograd", "--out", tmp_path, cwd=tmp_path)
    return tmp_path / "ampx-autograd"


def next_task(package):
    """Run the kit until it stops; give the verb that it asks for with the message, None once it passes."""
    done = run(
        *("-m", "pytest", "-x", "-p", "no:cacheprovider"), cwd=package, check=False, PYTHONPATH=str(package / "src")
    )
    if done.returncode == 0:
        return None, done.stdout
    told = re.findall(r"^E\s+NotImplementedError: (\w+\.\w+): (.+)$", done.stdout, flags=re.M)
    assert len(told) == 1, done.stdout
    return told[0]


def methods(text):
    """Give the methods of the classes of a module, by class and name."""
    return {
        f"{cls.name}.{item.name}": item
        for cls in ast.parse(text).body
        if isinstance(cls, ast.ClassDef)
        for item in cls.body
        if isinstance(item, ast.FunctionDef)
    }


def write_method(package, task):
    """Write a method as the example has it, in the place of a stub or at the end of the class."""
    cls = task.partition(".")[0]
    path = BACKEND if cls.endswith("Backend") else TESTS
    ours, theirs = (package / path).read_text(), (EXAMPLE / path).read_text()
    lines, written = ours.splitlines(), methods(theirs)[task]
    stub = methods(ours).get(task)
    place = slice(stub.lineno - 1, stub.end_lineno) if stub else slice(end_of(ours, cls), end_of(ours, cls))
    lines[place] = ["", *theirs.splitlines()[written.lineno - 1 : written.end_lineno]][bool(stub) :]
    (package / path).write_text("\n".join(lines) + "\n")


def end_of(text, cls):
    return next(node.end_lineno for node in ast.parse(text).body if getattr(node, "name", None) == cls)


def write_surroundings(package):
    """Take over what the example has around the stubs: the optimizer, imports, helpers, what is declared and cast."""
    for path in (BACKEND.with_name("optimizer.py"), "pyproject.toml"):
        (package / path).write_text((EXAMPLE / path).read_text())
    for path in (BACKEND, TESTS):
        ours, theirs = (package / path).read_text(), (EXAMPLE / path).read_text()
        head = theirs[: theirs.index("class Autograd")]
        (package / path).write_text(head + ours[ours.index("class Autograd") :])
    ours, theirs = (package / BACKEND).read_text(), (EXAMPLE / BACKEND).read_text()
    declared = re.compile(r"^    capabilities = .*?^    \)\n", flags=re.M | re.S)
    helpers = theirs[theirs.index("\n\ndef map_floating") :]
    (package / BACKEND).write_text(declared.sub(declared.search(theirs)[0], ours) + helpers)
    for verb in ("cast", "autocast"):
        write_method(package, f"AutogradBackend.{verb}")


def answer_all(package):
    """Write what the kit asks for until it asks no more; give the names in order, and pytest's last word."""
    asked = []
    while True:
        task, told = next_task(package)
        if task is None:
            return asked, told
        assert task not in asked, f"{task} was asked for again"
        asked.append(task)
        write_method(package, task)


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
    assert metadata.get_all("Requires-Dist")[:2] == ["ampx", "autograd"]


def test_the_new_package_is_found_once_it_is_installed(package, tmp_path):
    target = tmp_path / "site"
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", target, package)
    run(*install, cwd=tmp_path)
    program = "import ampx, ampx_autograd; print(ampx.backends()['autograd'], ampx_autograd.__file__)"
    listed = run("-c", program, cwd=tmp_path, PYTHONPATH=str(target), AMPX_DISABLE_PLUGINS="")
    assert listed.stdout.split() == ["registered", str(target / "ampx_autograd" / "__init__.py")]


def test_the_kit_asks_for_the_first_thing_to_write(package):
    task, told = next_task(package)
    assert (task, told) == ("AutogradHarness.parameter", "make a trainable float32 vector.")


@pytest.mark.slow
def test_the_kit_asks_for_one_verb_after_the_other_until_it_passes(package):
    write_surroundings(package)
    asked, told = answer_all(package)
    assert asked == [
        *("AutogradBackend.activate", "AutogradBackend.deactivate"),
        *("AutogradHarness.parameter", "AutogradHarness.optimizer", "AutogradHarness.loss", "AutogradHarness.backward"),
        *("AutogradHarness.numbers", "AutogradBackend.device", "AutogradBackend.is_optimizer"),
        *("AutogradBackend.inspect_loss", "AutogradBackend.scale", "AutogradBackend.unscale", "AutogradBackend.apply"),
        *("AutogradHarness.optimizer_state", "AutogradHarness.dtype_of", "AutogradHarness.tensor"),
    ]
    assert int(re.search(r"(\d+) passed", told)[1]) > 90
