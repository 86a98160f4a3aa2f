"""A name that `ampx run` provides for the script: who looks for it changes nothing, and libraries do not see it."""

import importlib
import importlib.util
import pickle
import sys
from types import ModuleType

import pytest

from ampx.callers import is_search
from ampx.run import ImportAlias
from ampx.run.imports import ImportWatch

OLD, PART = "old_framework", "old_framework.part"
# A library looks in all the ways that libraries do.
LIBRARY = f"""
import importlib.util

def look():
    if importlib.util.find_spec("{OLD}") is not None:
        return "found"
    for name in ("{OLD}", "{PART}"):
        try:
            __import__(name)
        except ImportError as error:
            assert str(error) == f"No module named '{OLD}'"
        else:
            return "imported"
    return "absent"
"""


class Thing:
    """What a file names that was pickled in other days."""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library that is installed."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "probing_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("probing_library")
    del sys.modules["probing_library"]


@pytest.fixture
def provided(monkeypatch):
    """The names, provided inside the test; gives what was asked of the provider."""
    calls = []

    def install(name):
        calls.append(name)
        for module in (OLD, PART):
            sys.modules[module] = ModuleType(module)
        sys.modules[OLD].part, sys.modules[OLD].Thing = sys.modules[PART], Thing

    def uninstall():
        calls.append("gone")
        del sys.modules[OLD], sys.modules[PART]

    with ImportAlias([OLD], install, uninstall).installed():
        yield calls
    assert OLD not in sys.modules
    assert calls in ([], [OLD, "gone"])


def test_looking_for_a_name_changes_nothing(provided):
    before = dict(sys.modules)
    assert importlib.util.find_spec(OLD).name == OLD
    assert importlib.util.find_spec(OLD) is not None
    assert dict(sys.modules) == before
    assert provided == []
    module = importlib.import_module(OLD)
    assert provided == [OLD]
    assert module is sys.modules[OLD]
    assert importlib.import_module(PART) is module.part


def test_a_library_sees_what_plain_python_shows_it(provided, library):
    assert library.look() == "absent"
    assert provided == []
    importlib.import_module(OLD)  # the script's own import
    assert provided == [OLD]


@pytest.mark.usefixtures("provided")
def test_what_the_script_has_others_import_is_the_scripts_import():
    assert pickle.loads(f"c{OLD}\nThing\n.".encode()) is Thing
    assert OLD in sys.modules


def test_code_that_the_script_generates_is_the_scripts(provided):
    exec(f"import {OLD}", {})
    assert provided == [OLD]


def test_a_framework_is_not_imported_for_who_only_looks_for_a_name_that_it_provides(library, tmp_path, monkeypatch):
    (tmp_path / "whole_framework.py").write_text(f"import sys\nsys.modules['{OLD}'] = sys\n")
    monkeypatch.syspath_prepend(tmp_path)
    watch = ImportWatch({}, lambda name: None, {OLD: "whole_framework", "lost": "no_such_framework"})
    with watch.installed():
        assert library.look() == "absent"
        assert importlib.util.find_spec(OLD) is not None
        assert importlib.util.find_spec("lost") is None
        assert "whole_framework" not in sys.modules
        try:
            assert importlib.import_module(OLD) is sys
        finally:
            sys.modules.pop("whole_framework", None)
            sys.modules.pop(OLD, None)
        with pytest.raises(ModuleNotFoundError, match="No module named 'lost'"):
            importlib.import_module("lost")


def test_a_finder_can_tell_a_search_from_an_import(monkeypatch):
    seen = []

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == OLD:
                seen.append(is_search())

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    assert importlib.util.find_spec(OLD) is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(OLD)
    with pytest.raises(ModuleNotFoundError):
        __import__(OLD)
    assert seen == [True, False, False]


def test_a_module_whose_import_began_before_the_watch_is_reported_when_it_is_complete(tmp_path, monkeypatch):
    """As that of Accelerate, which imports PyTorch, whose automation then looks for Accelerate."""
    (tmp_path / "begun_before.py").write_text("import watching_sets_in\ncomplete = True\n")
    (tmp_path / "watching_sets_in.py").write_text("import builtins\nbuiltins.sets_in()\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    watch = ImportWatch(
        {"begun_before": "it"}, lambda name: seen.append(hasattr(sys.modules["begun_before"], "complete"))
    )
    monkeypatch.setattr("builtins.sets_in", watch.look, raising=False)
    module = importlib.import_module("begun_before")
    watch.look()
    assert seen == [True]
    assert type(module.__spec__) is importlib.machinery.ModuleSpec
    assert not hasattr(module.__spec__, "ended")
