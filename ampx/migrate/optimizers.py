"""Uses that may keep an optimizer: an object that keeps the raw one would step it past ampx."""

from __future__ import annotations

import ast
import re
from typing import Final

from ampx.syntax.program import Program, Reference, called_name

# A scheduler changes the parameter groups, which the raw and the wrapped optimizer share.
_SCHEDULER: Final = re.compile(r"lr|schedul|anneal|warm_?up|cosine|cyclic", flags=re.I)


def keeps(program: Program, use: Reference) -> bool:
    """Return whether what gets an optimizer may keep it: an object that is made, but for a scheduler; a container."""
    parent = program.parent(use)
    if isinstance(parent, (ast.Dict, ast.List, ast.Tuple, ast.Set, ast.Assign, ast.Return, ast.Yield)):
        return True
    name = called_name(program.receiving_call(use))
    return name[:1].isupper() and not _SCHEDULER.search(name)


def asks_for_type(program: Program, use: Reference) -> bool:
    """Return whether a script asks for the exact class of an optimizer, which is another one when it is wrapped."""
    parent = program.parent(use)
    if isinstance(parent, ast.Attribute):
        return parent.attr == "__class__"
    return isinstance(parent, ast.Call) and use in parent.args and called_name(parent) == "type"
