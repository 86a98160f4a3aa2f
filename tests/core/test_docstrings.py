"""Docstrings and names are in the field's words."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("ampx", "backends", "docs/example_backend/src", "benchmarks")
SAY_NOTHING = {"one", "found", "told", "made", "given", "known"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.mark.parametrize("folder", FOLDERS)
def test_they_say_what_is_returned_and_sync_only_where_a_call_syncs(folder):
    wrong = []
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if text and (text.startswith(("Give ", "Tell ")) or "Sync: none." in text):
                wrong.append((path.relative_to(ROOT).as_posix(), getattr(node, "name", "module"), text[:60]))
    assert wrong == []


def variables(source):
    """The names that code binds: variables and arguments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


@pytest.mark.parametrize("folder", [*FOLDERS, "docs/example_backend/tests", "tests"])
def test_a_variable_says_what_it_holds(folder):
    assert SAY_NOTHING & set(variables("lambda one: [found for found in (told := one)]")) == {"one", "found", "told"}
    wrong = {
        path.relative_to(ROOT).as_posix(): names
        for path in (ROOT / folder).rglob("*.py")
        if (names := SAY_NOTHING & set(variables(path.read_text())))
    }
    assert wrong == {}
