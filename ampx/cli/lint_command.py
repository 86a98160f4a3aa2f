"""What `ampx lint` does and prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ampx.errors import InvalidOptionError
from ampx.lint import output
from ampx.lint.engine import lint, selected
from ampx.lint.rules import BY_CODE
from ampx.syntax.files import find


def run(
    paths: Sequence[Path], *, select: str, ignore: str, style: str, explain: str | None, echo: Callable[[str], None]
) -> int:
    """Print what is wrong in the files; return 0 if that is nothing, 1 if it is something, 2 if one is unreadable."""
    if explain is not None:
        return _explain(explain, echo)
    if not paths:
        raise InvalidOptionError("no file was passed; accepted: files and folders. Pass `.` for this folder.")
    if style not in output.FORMATS:
        raise InvalidOptionError(f"--format {style!r} is unknown; accepted: {', '.join(output.FORMATS)}. Pass one.")
    rules = selected(select.split(","), ignore.split(","))
    findings = lint(list(find(paths)), rules)
    printed = output.FORMATS[style](findings)
    if printed:
        echo(printed)
    return 2 if findings.unreadable else int(bool(findings.problems))


def _explain(code: str, echo: Callable[[str], None]) -> int:
    rule = BY_CODE.get(code.upper())
    if rule is None:
        raise InvalidOptionError(f"{code!r} is no rule; accepted: {', '.join(BY_CODE)}. Pass one.")
    echo(output.explained(rule))
    return 0
