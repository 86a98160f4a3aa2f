"""The page "Write a backend" shows the whole example and copies nothing of it; the example's tests are the kit."""

import ast
import re
from pathlib import Path

import ampx
from ampx.backend import CONTRACTS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "writing-a-backend.md").read_text()
EXAMPLE = DOCS / "example_backend"
INCLUDE = re.compile(r"^```\{literalinclude\} (\S+)\n(.*?)^```$", flags=re.M | re.S)


def shown():
    """Return the line numbers that the page shows, by file."""
    lines = {}
    for name, options in INCLUDE.findall(PAGE):
        path = DOCS / name
        marks = dict(re.findall(r"^:([\w-]+): (.*)$", options, flags=re.M))
        lines.setdefault(path, set()).update(range(*lines_of(path, marks)))
    return lines


def lines_of(path, options):
    """Return the first line and the line after the last of what one directive includes, from 0."""
    lines = path.read_text().splitlines()
    markers = {name: text.removeprefix(text[0]).removesuffix(text[0]) for name, text in options.items()}  # unquoted
    if "pyobject" in options:
        node = ast.parse(path.read_text())
        for part in options["pyobject"].split("."):
            (node,) = [child for child in node.body if getattr(child, "name", None) == part]
        return min(statement.lineno for statement in [node, *node.decorator_list]) - 1, node.end_lineno
    first = 0
    for name in ("start-at", "start-after"):
        if name in markers:
            first = next(row for row, line in enumerate(lines) if markers[name] in line) + (name == "start-after")
    if "end-before" in markers:
        return first, next(row for row, line in enumerate(lines) if row > first and markers["end-before"] in line)
    return first, len(lines)


def test_the_page_shows_the_whole_example():
    included = shown()
    for path in [EXAMPLE / "pyproject.toml", *sorted(EXAMPLE.rglob("src/**/*.py")), *EXAMPLE.rglob("tests/*.py")]:
        lines = path.read_text().splitlines()
        hidden = [line for row, line in enumerate(lines) if line.strip() and row not in included.get(path, ())]
        assert hidden == [], f"{path.name} has lines that the reader never sees"


def test_the_page_counts_the_lines_of_the_small_contract():
    tree = ast.parse((EXAMPLE / "src" / "ampx_autograd" / "backend.py").read_text())
    (backend,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    verbs = [node for node in backend.body if isinstance(node, ast.FunctionDef)]
    small = [verb for verb in verbs if verb.name in ampx.GenericBackend.__abstractmethods__]
    assert small == verbs[: len(small)], "the others come behind, so that the small contract is the head of the file"
    assert f"{len(small)} short methods, {small[-1].end_lineno} lines here" in PAGE


def test_the_page_has_a_line_of_offers_for_each_contract():
    assert set(re.findall(r'`"(\w+)": "ampx_autograd\.\w+:\w+"`', PAGE)) == set(CONTRACTS)
    for name in CONTRACTS:
        assert f": the {name}\n" in PAGE or f": {name}\n" in PAGE


def test_the_page_copies_nothing():
    assert re.findall(r"^```python|^ *def \w+", PAGE, flags=re.M) == []


def test_the_tests_of_the_example_are_the_kit_and_nothing_else():
    (path,) = EXAMPLE.rglob("test_*.py")
    tree = ast.parse(path.read_text())
    tests = [node for node in ast.walk(tree) if getattr(node, "name", "").lower().startswith("test")]
    assert [(node.name, [base.id for base in node.bases]) for node in tests] == [
        ("TestBackend", ["BackendSuite"]),
        ("TestFuzz", ["FuzzSuite"]),
        ("TestPlugin", ["PluginSuite"]),
    ]
