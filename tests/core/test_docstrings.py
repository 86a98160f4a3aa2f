"""Docstrings are in the field's words."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("ampx", "backends", "docs/example_backend/src", "benchmarks")
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
