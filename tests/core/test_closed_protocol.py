"""Stage, factors and result of a member are written by its verbs alone: no line outside of the protocol does."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTOCOL = "ampx/protocol.py"
CLOSED = {"stage", "factors", "result"}
CHANGING = {"clear", "pop", "popitem", "setdefault", "update", "__setitem__", "__delitem__", "__ior__"}


def is_closed(node):
    """Whether an expression is `….stage`, `….factors`, `….result`, an item of it, or its place in a `__dict__`."""
    while isinstance(node, (ast.Subscript, ast.Starred)):
        key = getattr(getattr(node, "slice", None), "value", None)
        if isinstance(node, ast.Subscript) and key in CLOSED:
            inner = node.value
            by_name = isinstance(inner, ast.Attribute) and inner.attr == "__dict__"
            by_vars = isinstance(inner, ast.Call) and getattr(inner.func, "id", None) == "vars"
            if by_name or by_vars:
                return True
        node = node.value
    return isinstance(node, ast.Attribute) and node.attr in CLOSED


def targets(node):
    if isinstance(node, (ast.Assign, ast.Delete)):
        return node.targets
    if isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.AsyncFor, ast.comprehension)):
        return [node.target]
    if isinstance(node, ast.withitem):
        return [node.optional_vars]
    return []


def parts(target):
    """The single places that a target writes to: those of a tuple one by one."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return [part for element in target.elts for part in parts(element)]
    return [target]


def writes(source):
    """The lines of a source that write to a closed attribute."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        places = [part for target in targets(node) if target is not None for part in parts(target)]
        lines += [place.lineno for place in places if is_closed(place)]
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            by_name = name in ("setattr", "__setattr__", "delattr", "__delattr__")
            if by_name and any(getattr(argument, "value", None) in CLOSED for argument in node.args):
                lines.append(node.lineno)
            if name in CHANGING and isinstance(node.func, ast.Attribute) and is_closed(node.func.value):
                lines.append(node.lineno)
    return sorted(lines)


@pytest.mark.parametrize(
    "source",
    [
        'member.stage = "idle"',
        "self.ampx_member.factors = {}",
        "member.stage, member.mixes = 'unscaled', True",
        "[*member.factors] = ()",
        "member.result: object = None",
        "member.stage += 'd'",
        "del member.factors",
        "member.factors[0] = 1.0",
        "del member.factors[0]",
        "member.factors.clear()",
        "one.ampx_member.factors.update({0: 1.0})",
        "setattr(member, 'stage', 'idle')",
        "object.__setattr__(member, 'result', None)",
        "vars(member)['stage'] = 'idle'",
        "member.__dict__['factors'] = {}",
        "for member.stage in stages: pass",
        "with opened() as member.result: pass",
        "[0 for member.stage in stages]",
    ],
)
def test_the_search_finds_every_way_to_write(source):
    assert writes(source)


@pytest.mark.parametrize(
    "source",
    [
        "stage = member.stage",
        "member.note_unscaled()",
        "factors = {**member.factors, 0: 1.0}",
        "if member.stage == 'idle': pass",
        "member.factors.get(0)",
        "member.held.clear()",
        "pool.result()",
        "state['result'] = 1",
    ],
)
def test_the_search_finds_no_more(source):
    assert not writes(source)


def test_nobody_but_the_protocol_writes_stage_factors_or_result():
    culprits = {}
    for folder in ("ampx", "backends"):
        for path in (ROOT / folder).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            lines = writes(path.read_text())
            if lines and name != PROTOCOL:
                culprits[name] = lines
    assert writes((ROOT / PROTOCOL).read_text()), "the protocol itself does"
    assert not culprits, "call a verb of Member instead"
