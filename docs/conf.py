"""Sphinx configuration."""

import ast
from pathlib import Path

import ampx

ROOT = Path(__file__).parents[1]

project = "ampx"
author = "The ampx authors"
project_copyright = author
release = version = ampx.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_reredirects"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "example_backend", "reference/benchmarks/*"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_mock_imports = ["torch"]  # the manual is built without any framework
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Sync"]

# The build must not need a network, so names of other projects cannot be resolved. Ours must be.
nitpick_ignore_regex = [
    (r"py:.*", r"(collections|contextlib|pathlib|types|typing|pluggy|pytest|hypothesis|torch)(\..*)?"),
]

# Where the pages went that are no more: a line each in redirects.txt, the old page and the new address.
redirects = {
    old: f"/{new}" for old, new in map(str.split, (ROOT / "docs/redirects.txt").read_text("utf-8").splitlines())
}

html_theme = "furo"
html_title = f"ampx {release}"


def _module_tables(app, docname, source):
    """Fill the page of modules from their docstrings, so that there is no second list to keep."""
    if docname != "reference/modules":
        return
    lines = []
    for package in (ROOT / "ampx", *sorted((ROOT / "backends").iterdir())):
        paths = [path for path in sorted(package.rglob("*.py")) if "_template" not in str(path)]
        rows = [(path.relative_to(ROOT), first_line(path)) for path in paths]
        table = [f"| `{path}` | {line} |" for path, line in rows if line]
        if table:
            lines += ["", f"## {package.name}", "", "| module | what it holds |", "| --- | --- |", *table]
    source[0] += "\n".join(lines) + "\n"


def first_line(path):
    """Return the first paragraph of a module's docstring on one line, as a cell of a table."""
    documentation = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return documentation.split("\n\n")[0].replace("\n", " ").replace("|", "/")


def setup(app):
    """Register what is generated."""
    app.connect("source-read", _module_tables)
