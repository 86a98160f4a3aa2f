"""What `ampx lint --fix` writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ampx.syntax.files import replace
from ampx.syntax.source import Source

from .engine import Findings
from .problem import Edit


def fix(findings: Findings, texts: Mapping[Path, bytes]) -> dict[Path, bytes]:
    """Fix what can be fixed, and take it out of the problems; return what became of `texts`, which are no files.

    A file that cannot be written is one of the unreadable, and its problems stay.
    """
    after = dict(texts)
    for path, before in findings.data.items():
        problems = [problem for problem in findings.problems if problem.path == path and problem.fix]
        mended = applied(Source(path, before), (problem.fix for problem in problems))
        try:
            if path in texts:
                after[path] = mended
            else:
                replace(path, before, mended)
        except OSError as error:
            findings.unreadable[path] = f"cannot be written: {error.strerror or error}"
            continue
        findings.fixed += len(problems)
        findings.problems = [problem for problem in findings.problems if problem not in problems]
    return after


def applied(source: Source, fixes: Iterable[tuple[Edit, ...]]) -> bytes:
    """Return a file with the edits of some fixes made."""
    text = source.text
    edits = sorted(dict.fromkeys(edit for fix in fixes for edit in fix), key=lambda edit: edit.start)
    for start, end, new in reversed(edits):  # of two at one place the first stays in front
        text = text[:start] + new + text[end:]
    return source.with_text(text).data
