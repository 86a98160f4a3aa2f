"""Sphinx configuration."""

import ampx

project = "ampx"
author = "The ampx authors"
project_copyright = author
release = version = ampx.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
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

html_theme = "furo"
html_title = f"ampx {release}"
