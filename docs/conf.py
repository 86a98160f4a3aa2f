"""Sphinx configuration."""

import re
from pathlib import Path

from docutils import nodes
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.nodes import make_refnode

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
autodoc_typehints_description_target = "documented_params"
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
toc_object_entries = False  # functions have headings

# The build must not need a network, so names of other projects cannot be resolved. Ours must be.
nitpick_ignore_regex = [
    (r"py:.*", r"(abc|collections|contextlib|os|pathlib|types|typing|pluggy|pytest|hypothesis)(\..*)?"),
    # What backends pass on, and what only commands read.
    (r"py:.*", r"ampx\.(protocol\.(Member|ScaleGroup)|policy\.PolicyFile)"),
]

# Names in signatures that a table of the reference explains.
TYPES = {"Framework", "DtypeName", "DtypeObject", "OptLevel", "ScaleOption", "LossT", "Function", "Step", "Listener"}

# Where the pages went that are no more: a line each in redirects.txt, the old page and the new address.
redirects = {
    old: f"/{new}" for old, new in map(str.split, (ROOT / "docs/redirects.txt").read_text("utf-8").splitlines())
}

html_theme = "furo"
html_title = f"ampx {release}"
html_static_path = ["_static"]
html_css_files = ["ampx.css"]
html_search_scorer = str(ROOT / "docs" / "search.js")


def _docstring_to_rst(app, what, name, obj, options, lines):
    """Write docstrings, whose code is in single backticks as in Markdown, as napoleon reads them."""
    lines[:] = [_linked(line).replace("Sync: ", "*Waits for the device* – ") for line in lines]


def _type_beside_name(app, what, name, obj, options, lines):
    """Move the type of an attribute, which napoleon writes below its description, into its signature."""
    attribute = r"(?m)^(\.\. attribute:: .*\n)((?:\n|   (?!:type:).*\n)*)   (:type: .*\n)"
    lines[:] = re.sub(attribute, r"\1   \3\2", "\n".join(lines)).split("\n")


def _linked(line):
    """Return a line in which names of ampx are links, and other code is code."""

    def link(match):
        code = match[1]
        public = code.removeprefix("ampx.").partition(".")[0]
        if public in dir(ampx) and code.replace(".", "").isidentifier() and code != "loss_scale":
            return f":py:obj:`{code} <ampx.{code.removeprefix('ampx.')}>`"
        return f"``{code}``"

    return re.sub(r"(?<![`:])`([^`]+)`(?!`)", link, line)


def _resolve_type(app, env, node, contnode):
    """Resolve a type of a signature: to the public name that it has, or to the table of types."""
    name = node["reftarget"].rpartition(".")[2]
    contnode = nodes.literal(name, name)
    if name in dir(ampx):
        domain = env.get_domain("py")
        return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", f"ampx.{name}", node, contnode)
    if name in TYPES:
        return make_refnode(app.builder, node["refdoc"], "reference/api", "types", contnode)
    return None


def _mark_options(app, doctree, docname):
    """Mark the options among the code, for the style sheet."""
    for code in doctree.findall(nodes.literal):
        if code.astext().startswith("-"):
            code["classes"].append("option")


def setup(app):
    """Register what is written about docstrings."""
    for module in ("ampx.api", "ampx.session"):  # the overloads are for type checkers: a reader wants one signature
        analyzer = ModuleAnalyzer.for_module(module)
        analyzer.analyze()
        analyzer.overloads.clear()
    app.connect("autodoc-process-docstring", _docstring_to_rst, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", _type_beside_name, priority=600)  # after it
    app.connect("missing-reference", _resolve_type)
    app.connect("doctree-resolved", _mark_options)
