"""The rule about deprecated names of torch.amp, and what to write in their place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from ampx.syntax.program import Reference, called_name

from .problem import Edit, Place
from .script import Script

_DEVICES: Final = {"torch.cuda.amp": "cuda", "torch.cpu.amp": "cpu"}
_NAMES: Final = ("autocast", "GradScaler", "custom_fwd", "custom_bwd")
_OLD: Final = {f"{module}.{name}": (device, name) for module, device in _DEVICES.items() for name in _NAMES}
# What is passed by position, which comes in another order in torch.amp.autocast.
_POSITIONS: Final = ("enabled", "dtype", "cache_enabled")


def old_names(script: Script) -> Iterator[Place]:
    """Names of torch.cuda.amp and torch.cpu.amp: where they are imported one by one, and where they are written out."""
    for statement in script.program.every(ast.ImportFrom):
        old = [f"`{statement.module}.{alias.name}`" for alias in statement.names if _full(statement, alias) in _OLD]
        guarded = isinstance(script.program.parent(statement), (ast.Try, ast.ExceptHandler))  # it knows of both names
        if old and not guarded:
            yield statement, _message(" and ".join(old)), _by_import(script, statement)
    for node, name in script.program.references(script.source.tree):
        if name in _OLD and isinstance(node, ast.Attribute):
            yield node, _message(f"`{name}`"), _written_out(script, node, name)


def _message(names: str) -> str:
    return f"{names}: deprecated since PyTorch 2.4; torch.amp has the same, with the device as an argument"


def _full(statement: ast.ImportFrom, alias: ast.alias) -> str:
    return f"{statement.module}.{alias.name}" if not statement.level else ""


def _by_import(script: Script, statement: ast.ImportFrom) -> tuple[Edit, ...]:
    """Return an import from torch.amp, with the device in all uses; nothing where one of them is not understood."""
    module = str(statement.module)
    start = script.source.text.index(module, script.source.span(statement)[0])
    uses = [_uses(script, alias.asname or alias.name, _full(statement, alias)) for alias in statement.names]
    if None in uses:
        return ()
    return (Edit(start, start + len(module), "torch.amp"), *(edit for edits in uses for edit in edits or ()))


def _uses(script: Script, bound: str, full: str) -> tuple[Edit, ...] | None:
    """Return what all uses of a name need; nothing where one is not understood, or there is none.

    A name that is not used here is for other files, whose calls have no device.
    """
    names = [name for name in script.program.every(ast.Name) if name.id == bound]
    arguments = [_arguments(script, name, full) if script.names(name) == {full} else None for name in names]
    return None if None in arguments or not names else tuple(edit for edits in arguments for edit in edits or ())


def _written_out(script: Script, node: ast.Attribute, name: str) -> tuple[Edit, ...]:
    """Return `torch.amp...` for a use through a module, with the device; nothing where that is not understood."""
    home = script.program.scope(node).find("torch")
    imported = set() if home is None else {definition.imported for definition in home.names["torch"]}
    arguments = _arguments(script, node, name)
    if imported != {"torch"} or arguments is None:
        return ()
    return (Edit(*script.source.span(node), f"torch.amp.{_OLD[name][1]}"), *arguments)


def _arguments(script: Script, node: Reference, full: str) -> tuple[Edit, ...] | None:
    """Return what a use needs beside the new name; None where it is not understood."""
    if full not in _OLD:
        return None
    device, name = _OLD[full]
    call = script.program.call_of(node)
    if call is None:
        return _not_called(script, node, device, name)
    text = script.source.text
    opening = text.index("(", script.source.span(node)[1]) + 1
    separator = "" if not (call.args or call.keywords) else "," if text[opening].isspace() else ", "
    if name.startswith("custom_"):
        return None if call.args else (Edit(opening, opening, f'device_type="{device}"{separator}'),)
    named = _by_name(script, call) if name == "autocast" else ()
    return None if named is None else (Edit(opening, opening, f'"{device}"{separator}'), *named)


def _not_called(script: Script, node: Reference, device: str, name: str) -> tuple[Edit, ...] | None:
    """Return what a decorator needs, or a class that is only named; None for anything else."""
    _, end = script.source.span(node)
    parent = script.program.parent(node)
    if name.startswith("custom_") and node in getattr(parent, "decorator_list", ()):
        return (Edit(end, end, f'(device_type="{device}")'),)
    named = script.program.in_annotation(node) or called_name(parent) == "isinstance"
    return () if name == "GradScaler" and named else None


def _by_name(script: Script, call: ast.Call) -> tuple[Edit, ...] | None:
    """Return the names of what a call of autocast passes by position; None where the text does not tell."""
    if any(isinstance(value, ast.Starred) for value in call.args) or "set_autocast" in script.source.text:
        return None  # the former's dtype is always the same
    starts = [script.source.span(value)[0] for value in call.args]
    return tuple(Edit(start, start, f"{position}=") for start, position in zip(starts, _POSITIONS, strict=False))
