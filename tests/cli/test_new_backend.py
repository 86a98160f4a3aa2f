"""`ampx new-backend`: what it writes, and what it refuses. The kit runs over the new package in tests/example."""

import ast
import errno
import inspect
import os
import re
from importlib import resources
from pathlib import Path

import pytest

import ampx
from ampx.cli.new_backend import write_package
from ampx.testing import Harness
from processes import run_python

FILES = [
    "README.md",
    "pyproject.toml",
    "src/ampx_my_lib/__init__.py",
    "src/ampx_my_lib/backend.py",
    "tests/test_conformance.py",
]


def files_of(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_it_writes_a_package_and_tells_what_to_do_next(ampx_command, tmp_path):
    text = ampx_command("new-backend", "my_lib").stdout
    folder = tmp_path / "ampx-my-lib"
    assert files_of(folder) == FILES
    assert all(name in text for name in FILES)
    assert "cd ampx-my-lib" in text
    assert "pip install -e '.[test]'" in text
    assert "pytest -x" in text
    for path in folder.rglob("*.*"):
        assert "$" not in path.read_text()
    assert 'my_lib = "ampx_my_lib"' in (folder / "pyproject.toml").read_text()


@pytest.mark.parametrize("installed", [True, False])
def test_it_depends_on_the_distribution_that_is_installed_and_guesses_none(installed, ampx_command, tmp_path):
    if installed:
        info = tmp_path / "some_lib-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-lib\nVersion: 1.0\n")
        (info / "top_level.txt").write_text("my_lib\n")
    ampx_command("new-backend", "my_lib")
    folder = tmp_path / "ampx-my-lib"
    (dependencies,) = re.findall(r"^dependencies = (.*)$", (folder / "pyproject.toml").read_text(), flags=re.M)
    unknown = '["ampx-precision"]  # and the distribution that my_lib comes from'
    assert dependencies == ('["ampx-precision", "some-lib"]' if installed else unknown)
    plugin = (folder / "src" / "ampx_my_lib" / "__init__.py").read_text()
    assert ('requires="some-lib"' in plugin) == installed


@pytest.mark.parametrize("installed", [True, False])
def test_it_says_whether_python_finds_the_framework(installed, ampx_command, tmp_path):
    if installed:
        (tmp_path / "my_lib.py").write_text("")
    text = ampx_command("new-backend", "my_lib").stdout
    assert ("There is no module my_lib in this Python" in text) == (not installed)


def test_its_stubs_say_how_dtypes_are_named(ampx_command, tmp_path):
    ampx_command("new-backend", "my_lib")
    for path in ("src/ampx_my_lib/backend.py", "tests/test_conformance.py"):
        text = (tmp_path / "ampx-my-lib" / path).read_text()
        assert "int64" in text
        assert "long" in text


def test_its_readme_holds_for_the_backend_that_was_written(ampx_command, tmp_path):
    """As soon as the verb that `init` asks is written; the others stay stubs."""
    ampx_command("new-backend", "mylib")
    folder = tmp_path / "ampx-mylib"
    module = folder / "src" / "ampx_mylib" / "backend.py"
    stub = re.search(r'(def device.*?"""\n)        raise .*?\n        \)\n', module.read_text(), flags=re.S)
    module.write_text(module.read_text().replace(stub[0], f'{stub[1]}        return ampx.Device("cpu")\n'))
    (code,) = re.findall(r"^```python\n(.*?)^```$", (folder / "README.md").read_text(), flags=re.M | re.S)
    (tmp_path / "mylib.py").write_text("")
    ampx_command.add_plugin("mylib", "ampx_mylib")
    path = [str(tmp_path), str(folder / "src"), os.environ.get("PYTHONPATH", "")]
    code += "\nprint(ampx.current().effective.loss_scale.dynamic)"
    done = run_python("-c", code, check=True, PYTHONPATH=os.pathsep.join(filter(None, path)))
    assert done.stdout == "True\n"


def test_it_writes_where_it_is_told(ampx_command, tmp_path):
    text = ampx_command("new-backend", "mylib", "--out", "some where/else").stdout
    assert (tmp_path / "some where" / "else" / "ampx-mylib" / "pyproject.toml").is_file()
    assert "cd 'some where/else/ampx-mylib'" in text


def test_every_verb_and_every_harness_method_that_is_required_has_a_stub(ampx_command, tmp_path):
    ampx_command("new-backend", "mylib")
    for path, contract, extra in (
        ("src/ampx_mylib/backend.py", ampx.GenericBackend, {"gradients", "zero_gradients"}),
        ("tests/test_conformance.py", Harness, set()),
    ):
        tree = ast.parse((tmp_path / "ampx-mylib" / path).read_text())
        (cls,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and "My" in node.name and node.body[1:]]
        methods = {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}
        assert set(methods) == contract.__abstractmethods__ | extra
        for name, method in methods.items():
            parameters = [argument.arg for argument in method.args.args]
            assert parameters == list(inspect.signature(getattr(contract, name)).parameters), name


def test_a_folder_that_is_there_is_left_alone(ampx_command, tmp_path):
    folder = tmp_path / "ampx-mylib"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    text = ampx_command("new-backend", "mylib", code=2).stderr
    assert "'ampx-mylib' is there already and is left as it is" in text
    assert "--out" in text
    assert files_of(folder) == ["mine.txt"]


@pytest.mark.parametrize(
    "name", ["Mylib", "my-lib", "my lib", "2lib", "_lib", "my__lib", "lib_", "class", "", "../lib"]
)
def test_a_name_that_is_no_module_is_refused(ampx_command, tmp_path, name):
    text = ampx_command("new-backend", name, code=2).stderr
    assert f"NAME {name!r} cannot be the name of a module" in text
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_a_plugin_has_is_refused(ampx_command, tmp_path):
    ampx_command.add_module("plug_taken", _PLUGIN)
    ampx_command.add_plugin("taken", "plug_taken")
    text = ampx_command("new-backend", "taken", code=2).stderr
    assert "NAME 'taken' is taken: plugin 'taken' registers that framework" in text
    assert not (tmp_path / "ampx-taken").exists()


def test_a_folder_that_cannot_be_made_is_told(ampx_command, tmp_path):
    (tmp_path / "file").write_text("")
    text = ampx_command("new-backend", "mylib", "--out", "file", code=2).stderr
    assert "file" in text
    text = ampx_command("new-backend", "mylib", "--out", "file/below", code=2).stderr
    assert "cannot be written: Not a directory" in text


def test_half_a_package_is_not_left(tmp_path, monkeypatch):
    def write(path, text, encoding):
        if path.name == "backend.py":
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_bytes(text.encode(encoding))

    monkeypatch.setattr(Path, "write_text", write)
    with pytest.raises(ampx.InvalidOptionError, match="cannot be written: No space left on device"):
        write_package("mylib", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_template_is_in_the_package():
    names = {path.name for path in (resources.files("ampx.cli") / "new_backend_template").iterdir()}
    from ampx.cli.new_backend import _FILES

    assert names == set(_FILES)


_PLUGIN = """
import ampx
from ampx.cli.new_backend import write_package

@ampx.hookimpl
def ampx_register_backends(register):
    register("taken", lambda: None, roots=("taken",), requires="taken")
"""
