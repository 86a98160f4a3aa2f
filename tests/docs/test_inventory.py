"""`objects.inv` of the built manual has every public name, so that the manuals of others can link to it."""

import dataclasses
import inspect
from pathlib import Path

import pytest

import ampx
import ampx.testing

Inventory = pytest.importorskip("sphinx.util.inventory", reason="needs sphinx: run `make docs`").InventoryFile
BUILT = Path(__file__).parents[2] / "docs" / "_build" / "html" / "objects.inv"


@pytest.fixture(scope="module")
def kinds():
    """Return the kind of every Python object in the inventory, by name."""
    items = Inventory.loads(BUILT.read_bytes(), uri="").data
    return {name: kind.removeprefix("py:") for kind, names in items.items() if kind.startswith("py:") for name in names}


def kind_of(value):
    if inspect.isclass(value):
        return "exception" if issubclass(value, BaseException) else "class"
    return "function" if inspect.isfunction(value) else "data"


def test_every_public_name_is_listed_as_what_it_is(kinds):
    public = {f"ampx.{name}": kind_of(getattr(ampx, name)) for name in dir(ampx) if name != "debug"}
    assert len(public) > 90
    assert {name: kinds.get(name) for name in public} == public


def test_every_field_and_every_verb_is_listed(kinds):
    missing = []
    for name in dir(ampx):
        value = getattr(ampx, name)
        if dataclasses.is_dataclass(value):
            inherited = {field for base in value.__mro__[1:] if base is not object for field in base.__annotations__}
            missing += [
                f"ampx.{name}.{field.name}" for field in dataclasses.fields(value) if field.name not in inherited
            ]
    for verbs in (ampx.Backend, ampx.GenericBackend, ampx.testing.Harness):
        home = "ampx.testing" if verbs is ampx.testing.Harness else "ampx"
        names = [name for name, verb in vars(verbs).items() if inspect.isfunction(verb) and not name.startswith("_")]
        missing += [f"{home}.{verbs.__name__}.{name}" for name in names]
    assert len(missing) > 100
    assert [name for name in missing if name not in kinds] == []


def test_what_the_kit_and_the_debugger_offer_is_listed(kinds):
    others = ("debug.nonfinite_parameters", "testing.BackendSuite", "testing.PluginSuite", "testing.FuzzSuite")
    assert [name for name in others if f"ampx.{name}" not in kinds] == []
