"""A second name of a module gives the module itself."""

import pickle
import runpy
import sys
from importlib import import_module

import pytest

from ampx.rooms import Aliases


@pytest.fixture
def old_name(tmp_path, monkeypatch):
    """Return a function that lets `old_home` stand for the package `new_home`, as well as what is listed."""
    before = set(sys.modules)
    package = tmp_path / "new_home" / "deep"
    package.mkdir(parents=True)
    (tmp_path / "new_home" / "__init__.py").write_text("from .deep.parts import Part\n")
    (package / "__init__.py").write_text("from .thing import thing\n")
    (package / "parts.py").write_text("class Part: ...\n")
    (package / "program.py").write_text("RAN = __name__ == '__main__'\n")
    (package / "thing.py").write_text("def thing(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    yield lambda **names: sys.meta_path.insert(0, Aliases({"old_home": "new_home", **names}))
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_other_name_gives_the_same_modules(old_name):
    old_name()
    assert not {"old_home", "new_home"} & set(sys.modules), "nothing is imported before it is asked for"
    parts = import_module("old_home.deep.parts")
    old_home, new_home = import_module("old_home"), import_module("new_home")
    assert old_home is new_home
    assert parts is old_home.deep.parts is import_module("new_home.deep.parts")
    assert new_home.__spec__.name == new_home.__name__ == "new_home"


def test_pickles_and_programs_that_name_it_go_on_to_work(old_name):
    old_name()
    assert pickle.loads(b"cold_home.deep.parts\nPart\n.").__module__ == "new_home.deep.parts"
    assert runpy.run_module("old_home.deep.program", run_name="__main__", alter_sys=True)["RAN"]


def test_a_module_that_is_listed_does_not_hide_what_its_package_has_by_its_name(old_name):
    old_name(**{"old_home.deep.thing": "new_home.deep.thing", "old_home.deep.Part": "new_home.deep.parts:Part"})
    thing = import_module("old_home.deep.thing")
    new_home = import_module("new_home")
    assert thing is import_module("new_home.deep.thing")
    assert callable(new_home.deep.thing)
    assert sys.modules["old_home.deep.Part"] is new_home.Part


def test_what_is_not_there_is_not_there_by_the_other_name_either(old_name):
    old_name()
    with pytest.raises(ModuleNotFoundError, match=r"old_home\.nothing"):
        import_module("old_home.nothing")
