"""What a rule is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import ast

    from .script import Script

# error: what is computed is wrong, or an error is raised. warning: it is wrong for some values, devices or steps.
Severity: TypeAlias = Literal["error", "warning"]


class Edit(NamedTuple):
    """A piece of a file's text, and what takes its place."""

    start: int
    end: int
    text: str


# Where it is, what is wrong there, and, where that is safe, what mends it.
Place: TypeAlias = "tuple[ast.AST, str] | tuple[ast.AST, str, tuple[Edit, ...]]"


@dataclass(frozen=True)
class Rule:
    """A kind of misuse.

    Attributes:
        code: `AMP101`, ….
        name: What it is called in words.
        severity: Whether it is always wrong.
        why: What goes wrong, in a sentence or two.
        advice: What to do.
        check: Yields the places in a file.
        default: Whether it is looked for without being asked for.
    """

    code: str
    name: str
    severity: Severity
    why: str
    advice: str
    check: Callable[[Script], Iterator[Place]]
    default: bool = True


@dataclass(frozen=True, order=True)
class Problem:
    """A place where a rule does not hold.

    Attributes:
        path: The file.
        line: The line, from 1.
        column: The column, from 1.
        code: The code of the rule.
        what: What is wrong here.
        end_line: The last line of the code that is meant.
        fix: What `--fix` does about it; empty where a human must.
    """

    path: Path
    line: int
    column: int
    code: str
    what: str
    end_line: int
    fix: tuple[Edit, ...] = ()
