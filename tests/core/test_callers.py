"""A warning or refusal names the user's own line, wherever the libraries between it and ampx are installed."""

import importlib.util
import inspect
import sys

import pytest

import ampx
from ampx import callers

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
    assert module.call(callers.script_line) == f"{__file__}:{line}"


@pytest.mark.parametrize("name", ["helpers", "project.training"])
def test_modules_of_the_user_s_own_are_the_script(imported, name):
    module, file = imported(name, "project")
    assert module.call(callers.script_line) == f"{file}:2"


def test_a_warning_names_the_line_too(imported):
    module, file = imported("lib", "site-packages")
    with pytest.warns(ampx.PrecisionWarning, match="why") as caught:
        module.call(lambda: callers.warn("why", ampx.PrecisionWarning))
    assert (caught[0].filename, "lib" in str(file)) == (__file__, True)
