"""A warning or refusal names the user's own line, wherever the libraries between it and ampx are installed."""

import functools
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import types

import pytest

import ampx
from ampx import callers

HERE = min(__file__, os.path.relpath(__file__), key=len)
LIBRARY = "def call(function):\n    return function()\n"


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Return a function that writes a module into a folder and imports it."""

    def load(name, folder, *neighbours):
        target = tmp_path / folder
        for neighbour in neighbours:
            (target / neighbour).mkdir(parents=True)
        file = target.joinpath(*name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(LIBRARY)
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module, file

    return load


@pytest.mark.parametrize(
    ("name", "folder", "neighbours"),
    [
        ("lib.inner", "venv/lib/python3.11/site-packages", ()),
        ("lib", "usr/lib/python3/dist-packages", ()),
        ("lib.inner.deep", "home/me/.local/lib/python3.11/site-packages", ()),
        ("lib.inner", "any/name", ("lib-1.0.dist-info",)),
        ("alpha.inner", "sources/alpha", ()),
    ],
    ids=["environment", "system", "user", "pip --target", "a source tree of a framework"],
)
def test_the_line_is_the_script_s_and_not_a_library_s(imported, make_framework, name, folder, neighbours):
    make_framework("alpha")
    module, _ = imported(name, folder, *neighbours)
    line = inspect.currentframe().f_lineno + 1
    assert module.call(callers.script_line) == f"{HERE}:{line}"


@pytest.mark.parametrize("name", ["helpers", "project.training"])
def test_modules_of_the_user_s_own_are_the_script(imported, name):
    module, file = imported(name, "project")
    assert module.call(callers.script_line) == f"{file}:2"


@pytest.mark.parametrize(
    ("file", "seen"),
    [
        ("project/train.py", "project/train.py"),
        ("train.py", "train.py"),
        ("../other/train.py", "../other/train.py"),
        ("/train.py", "/train.py"),
        ("<stdin>", "<stdin>"),
    ],
)
def test_a_file_is_seen_from_where_python_was_started_where_that_is_shorter(file, seen, tmp_path, monkeypatch):
    folder = tmp_path / "home"
    (folder / "elsewhere").mkdir(parents=True)
    path = file if file[0] in "/<" else os.path.normpath(folder / file)
    code = f"import os\nfrom ampx import callers\nos.chdir('elsewhere')\nprint(callers.line_of({path!r}, 12))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{seen}:12\n"


def test_a_warning_names_the_line_too(imported):
    module, file = imported("lib", "site-packages")
    with pytest.warns(ampx.PrecisionWarning, match="why") as caught:
        module.call(lambda: callers.warn("why", ampx.PrecisionWarning))
    assert (caught[0].filename, "lib" in str(file)) == (__file__, True)


def test_the_innermost_line_of_the_script_is_found_in_a_traceback(imported):
    module, _ = imported("lib", "site-packages")

    def fails():
        raise LookupError

    with pytest.raises(LookupError) as caught:
        module.call(lambda: module.call(fails))
    assert callers.script_line_of(caught.value.__traceback__) == f"{HERE}:{fails.__code__.co_firstlineno + 1}"
    assert callers.script_line_of(None) == ""


class Callable:
    def __call__(self):
        pass

    def method(self):
        pass


def test_functions_of_the_script_are_told_from_those_of_libraries_however_they_are_wrapped(imported):
    module, _ = imported("lib", "site-packages")
    own, theirs = Callable().method, module.call
    rewritten = types.FunctionType(own.__code__.replace(co_filename="/tmp/__autograph_generated_file1.py"), globals())
    traced = types.SimpleNamespace(python_function=own)
    decorated = functools.wraps(own)(types.FunctionType(theirs.__code__, theirs.__globals__))
    decorating = functools.wraps(theirs)(lambda: None)
    assert all(
        callers.is_script_function(function)
        for function in (own, functools.partial(own), decorated, Callable(), rewritten, traced)
    )
    assert not any(
        callers.is_script_function(function)
        for function in (theirs, functools.partial(theirs), decorating, len, ampx.init, object())
    )


@pytest.mark.parametrize(
    ("file", "module", "is_own"),
    [
        ("<stdin>", "__main__", True),
        ("<string>", "__main__", False),
        ("/any/train.py", "__main__", True),
        ("/any/ampx_alpha.py", "ampx_alpha.step", False),
        (json.__file__, "json", False),
    ],
)
def test_code_is_the_script_s_by_its_file_and_module(file, module, is_own):
    assert callers.is_script_code(file, module) is is_own


def test_an_import_is_the_script_s_unless_a_library_is_between(imported):
    module, _ = imported("lib", "site-packages")
    assert callers.imported_by_script()
    assert not module.call(callers.imported_by_script)
    assert module.call(lambda: callers.imported_by_script())  # the script's own line is nearer
    importer, _ = imported("importer", "site-packages")
    assert importer.call(functools.partial(callers.imported_by_script, ("importer",)))
