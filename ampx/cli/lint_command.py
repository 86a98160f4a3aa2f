"""What `ampx lint` does and prints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import typer

from ampx.errors import InvalidOptionError
from ampx.lint import fixes, output
from ampx.lint.engine import Findings, lint, selected
from ampx.lint.rules import BY_CODE
from ampx.syntax.files import find

from .terminal import terminal

STDIN: Final = Path("-")
_SHOWN_AS: Final = Path("<stdin>")


def run(
    paths: Sequence[Path],
    *,
    select: str = "",
    ignore: str = "",
    exclude: str = "",
    style: str = "text",
    explain: str | None = None,
    fix: bool = False,
    echo: Callable[[str], None],
) -> int:
    """Print what is wrong in the files; return 0 if that is nothing, 1 if it is something, 2 if one is unreadable."""
    if explain is not None:
        return _explain(explain, echo)
    if style not in output.FORMATS:
        raise InvalidOptionError(
            f"--output-format {style!r} is unknown; accepted: {', '.join(output.FORMATS)}. Pass one."
        )
    rules = selected(select.split(","), ignore.split(","), fix)
    files = _without(find(path for path in paths or [Path()] if path != STDIN), exclude.split(","))
    texts = {_SHOWN_AS: sys.stdin.buffer.read()} if STDIN in paths else {}
    findings = lint(files, rules, texts)
    for text in fixes.fix(findings, texts).values() if fix else ():  # it goes where its reader waits for it
        sys.stdout.buffer.write(text)
        sys.stdout.flush()
        echo = partial(typer.echo, err=True)
    _print(findings, style, echo)
    return 2 if findings.unreadable else int(bool(findings.problems))


def _print(findings: Findings, style: str, echo: Callable[[str], None]) -> None:
    if printed := output.FORMATS[style](findings):
        echo(printed)
    if style == "text" and not terminal.quiet:
        echo(output.summary(findings))


def _without(files: Iterable[Path], patterns: Sequence[str]) -> list[Path]:
    """Return the files that no pattern matches, neither they nor a folder around them."""
    chosen = [pattern.strip() for pattern in patterns if pattern.strip()]
    return [
        file for file in files if not any(part.match(pattern) for part in (file, *file.parents) for pattern in chosen)
    ]


def _explain(code: str, echo: Callable[[str], None]) -> int:
    rule = BY_CODE.get(code.upper())
    if rule is None:
        raise InvalidOptionError(f"{code!r} is no rule; accepted: {', '.join(BY_CODE)}. Pass one.")
    echo(output.explained(rule))
    return 0
