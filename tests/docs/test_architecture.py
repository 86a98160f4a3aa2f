"""The map of the manual is true: what it names exists, and no module is missing from it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
BACKENDS = ("torch", "tensorflow", "paddle", "mxnet", "jax", "apex", "fluid")
MODULES = [
    *sorted((ROOT / "ampx").glob("*.py")),
    *(path for name in BACKENDS for path in sorted((ROOT / "backends" / f"ampx_{name}").rglob("*.py"))),
]


def definitions(path):
    """Return the functions, classes and methods of a module, with dots."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
            names |= {f"{node.name}.{item.name}" for item in getattr(node, "body", ()) if hasattr(item, "name")}
    return names


def test_every_path_that_it_names_exists():
    named = set(re.findall(r"`((?:ampx|backends)/[\w/.]*)`", PAGE))
    assert len(named) > 40
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_every_hop_is_a_function_or_class_of_the_module_before_it():
    hops = re.findall(r"`((?:ampx|backends)/[\w/]+\.py)`\s+`([\w.]+)`", PAGE)
    assert len(hops) > 20
    assert [hop for hop in hops if hop[1] not in definitions(ROOT / hop[0])] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_module_says_what_it_holds_in_its_first_line(path):
    if not ast.get_docstring(ast.parse(path.read_text())):
        assert path.name == "__init__.py", "say in the first line what the module holds"
        assert not path.read_text().strip(), "say in the first line what the package holds"


def test_the_page_can_be_read_at_one_sitting():
    assert len(PAGE.split()) <= 2500
