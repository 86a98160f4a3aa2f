"""What was found, as text, JSON, commands of GitHub's workflows, or SARIF."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import ampx

from .engine import Findings
from .problem import Problem, Rule
from .rules import BY_CODE

SCHEMA: Final = "ampx.lint/1"


def text(findings: Findings) -> str:
    """Return a line for each problem, and for each file that was not read."""
    lines = [f"{problem.path}:{problem.line}:{problem.column}: {_message(problem)}" for problem in findings.problems]
    return "\n".join([*lines, *(f"{path}: {reason}" for path, reason in findings.unreadable.items())])


def summary(findings: Findings) -> str:
    """Return what sums the lines up, and what to do next."""
    count, files = len(findings.problems), findings.files
    unread = len(findings.unreadable)
    missing = f"; {unread} {_plural(unread, 'file')} could not be read" if unread else ""
    fixed = f", {findings.fixed} fixed" if findings.fixed else ""
    lines = [
        f"{count} {_plural(count, 'problem')} in {files - unread} {_plural(files - unread, 'file')}{fixed}{missing}."
    ]
    if fixable := sum(bool(problem.fix) for problem in findings.problems):
        lines.append(f"`ampx lint --fix` fixes {fixable} of them.")
    if count:
        lines.append(f"`ampx lint --explain {findings.problems[0].code}` says why, and what to do.")
    return "\n".join(lines)


def as_json(findings: Findings) -> str:
    """Return everything, under the schema `ampx.lint/1`."""
    return json.dumps(
        {
            "schema": SCHEMA,
            "files": findings.files,
            "fixed": findings.fixed,
            "problems": [
                {
                    **vars(problem),
                    "path": problem.path.as_posix(),
                    "severity": BY_CODE[problem.code].severity,
                    "fix": bool(problem.fix),
                }
                for problem in findings.problems
            ],
            "unreadable": {path.as_posix(): reason for path, reason in findings.unreadable.items()},
        },
        indent=2,
    )


def github(findings: Findings) -> str:
    """Return workflow commands, which GitHub shows beside the lines of a pull request."""
    lines = [
        f"::{BY_CODE[problem.code].severity} file={_property(problem.path.as_posix())},line={problem.line},"
        f"endLine={problem.end_line},col={problem.column},title={problem.code}::{_escaped(_message(problem))}"
        for problem in findings.problems
    ]
    lines += [
        f"::error file={_property(path.as_posix())}::{_escaped(reason)}" for path, reason in findings.unreadable.items()
    ]
    return "\n".join(lines)


def sarif(findings: Findings) -> str:
    """Return SARIF 2.1.0."""
    results = [
        {
            "ruleId": problem.code,
            "level": BY_CODE[problem.code].severity,
            "message": {"text": problem.what},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": problem.path.as_posix()},
                        "region": {
                            "startLine": problem.line,
                            "startColumn": problem.column,
                            "endLine": problem.end_line,
                        },
                    }
                }
            ],
        }
        for problem in findings.problems
    ]
    driver = {"name": "ampx lint", "version": ampx.__version__, "rules": [_sarif_rule(rule) for rule in findings.rules]}
    notes = [
        {"level": "error", "message": {"text": f"{path}: {reason}"}} for path, reason in findings.unreadable.items()
    ]
    run: dict[str, Any] = {
        "tool": {"driver": driver},
        "results": results,
        "invocations": [{"executionSuccessful": not notes, "toolExecutionNotifications": notes}],
    }
    document = {
        "$schema": "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json",
        "version": "2.1.0",
        "runs": [run],
    }
    return json.dumps(document, indent=2)


def _sarif_rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.code,
        "name": rule.name,
        "shortDescription": {"text": rule.name},
        "fullDescription": {"text": rule.why},
        "help": {"text": rule.advice},
        "defaultConfiguration": {"level": rule.severity},
    }


FORMATS: Final[Mapping[str, Callable[[Findings], str]]] = {
    "text": text,
    "json": as_json,
    "github": github,
    "sarif": sarif,
}


def explained(rule: Rule) -> str:
    """Return what `--explain` prints of a rule."""
    return f"{rule.code}: {rule.name} ({rule.severity})\n\n{rule.why}\n\n{rule.advice}"


def _message(problem: Problem) -> str:
    return f"{problem.code} {problem.what}."


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"


def _escaped(value: str) -> str:
    return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: str) -> str:
    return _escaped(value).replace(":", "%3A").replace(",", "%2C")
