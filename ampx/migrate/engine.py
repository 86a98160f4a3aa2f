"""Rewrite one file's text."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import libcst as cst

from . import fluid_amp, imports
from .apex_amp import ROOTS as APEX_ROOTS
from .apex_amp import ApexAmp
from .mxnet_amp import ROOTS as MXNET_ROOTS
from .mxnet_amp import MXNetAmp
from .paddle_amp import ROOTS as PADDLE_ROOTS
from .paddle_amp import PaddleAmp
from .plan import Plan
from .report import FileReport, Finding, NeedsHumanError
from .source import Source
from .tensorflow_amp import TensorFlowAmp
from .torch_amp import ROOTS as TORCH_ROOTS
from .torch_amp import TorchAmp

# What every file that uses one of the old names contains; others are not even parsed.
_HINT: Final = re.compile(
    rb"\bamp\b|autocast|auto_cast|mixed_precision|LossScaleOptimizer|\bapex\b|GradScaler|AmpScaler|amp_guard"
)


@dataclass(frozen=True)
class Dialect:
    """One old API.

    Attributes:
        name: What users call it.
        framework: The framework of its session.
        roots: Full names that imports of it start with.
        rewrite: Plans the edits.
        in_place: Whether `import ampx` takes the place of its import.
        calls_ampx: Whether what it writes calls `ampx`.
    """

    name: str
    framework: str
    roots: tuple[str, ...]
    rewrite: Callable[[Plan], None]
    in_place: bool = False
    calls_ampx: bool = True


DIALECTS: Final = (
    Dialect("apex.amp", "torch", APEX_ROOTS, lambda plan: ApexAmp(plan).rewrite(), in_place=True),
    Dialect("mxnet.amp", "mxnet", MXNET_ROOTS, lambda plan: MXNetAmp(plan).rewrite(), in_place=True),
    Dialect("paddle.amp", "paddle", PADDLE_ROOTS, lambda plan: PaddleAmp(plan).rewrite()),
    Dialect("paddle.fluid", "paddle", (), fluid_amp.rewrite, calls_ampx=False),
    Dialect("TensorFlow", "tensorflow", (), lambda plan: TensorFlowAmp(plan).rewrite()),
    Dialect("torch.amp", "torch", TORCH_ROOTS, lambda plan: TorchAmp(plan).rewrite()),
)


def migrate(path: Path, data: bytes) -> FileReport:
    """Give what a file would become. Never raises for what is in it."""
    if not _HINT.search(data):
        return FileReport(path, "unchanged", before=data, after=data)
    try:
        _compile(path, data)
        module = cst.parse_module(data)
    except (cst.ParserSyntaxError, SyntaxError, ValueError, LookupError, RecursionError, MemoryError) as error:
        return _unreadable(path, data, error)
    report = FileReport(path, "unchanged", before=data, after=data, encoding=module.encoding)
    try:
        made, report.findings = _rewrite(module)
    except NeedsHumanError as error:
        report.status, report.findings = "blocked", [error.finding]
        return report
    except Exception as error:  # a file that the analysis cannot cope with must not keep the others from theirs
        what = f"it cannot be analysed: {type(error).__name__}: {error}"
        report.status, report.findings = "error", [Finding(1, "todo", what, "It was left as it is; report this.")]
        return report
    if made is None:
        return report
    after = _encode(made, data)
    problem = _broken(path, after)
    if problem is not None:
        report.status = "blocked"
        report.findings = [
            Finding(1, "todo", f"the rewritten file would not be valid: {problem}", "Rewrite it by hand.")
        ]
        return report
    report.status, report.after = "changed", after
    return report


def _rewrite(module: cst.Module) -> tuple[cst.Module | None, list[Finding]]:
    """Give the new tree, or None where there is nothing to change, and what to tell."""
    source = Source(module)
    plans: list[tuple[Dialect, Plan]] = []
    for dialect in DIALECTS:
        plan = Plan(source)
        dialect.rewrite(plan)
        plans.append((dialect, plan))
    findings = sorted({one for _, plan in plans for one in plan.findings}, key=lambda one: (one.line, one.what))
    active = [(dialect, plan) for dialect, plan in plans if plan.changes]
    for index, (dialect, plan) in enumerate(active):
        for other, _ in active[:index]:
            if other.framework == dialect.framework:
                raise NeedsHumanError(
                    plan.first_line,
                    f"the file uses both {other.name} and {dialect.name}",
                    "Remove one of the two, and migrate again.",
                )
    if not active:
        return None, findings
    if "ampx" in source.names_used():
        raise NeedsHumanError(
            active[0][1].first_line, "the file uses the name `ampx` already", "Rename it, or finish by hand."
        )
    made = module
    for dialect, plan in active:
        if len(active) > 1:  # the next dialect's plan is about the tree that the former left
            plan = Plan(Source(made))
            dialect.rewrite(plan)
        before = plan.source
        edited = plan.apply()
        roots = dialect.roots
        made = imports.fix(before, edited, roots, dialect.in_place, plan.imports) if dialect.calls_ampx else edited
    return made, findings


def _encode(module: cst.Module, before: bytes) -> bytes:
    """Give the bytes, with the byte order mark that was there."""
    text = module.bytes
    mark = b"\xef\xbb\xbf"
    return mark + text if before.startswith(mark) and not text.startswith(mark) else text


def _broken(path: Path, data: bytes) -> str | None:
    """Tell what is wrong with a rewritten file; None if it can be read back."""
    try:
        cst.parse_module(data)
        _compile(path, data)
    except (cst.ParserSyntaxError, SyntaxError, ValueError) as error:
        return str(error).splitlines()[0]
    return None


def _compile(path: Path, data: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old escapes and comparisons, which are the script's own affair
        compile(data, str(path), "exec", dont_inherit=True)


def _unreadable(path: Path, data: bytes, error: Exception) -> FileReport:
    line = int(getattr(error, "raw_line", None) or getattr(error, "lineno", None) or 1)
    old = re.search(rb"^\s*(print\s+[^(\s=]|exec\s+['\"]|except\s+\w+\s*,\s*\w+\s*:)", data, flags=re.M)
    if old is not None:
        line = data.count(b"\n", 0, old.start(1)) + 1
        what, advice = "this is Python 2", "Convert it to Python 3 first, for instance with 2to3."
    else:
        reason = getattr(error, "message", None) or getattr(error, "msg", None) or str(error).splitlines()[0]
        what, advice = f"it cannot be parsed: {reason}", "Mend it first; it was left as it is."
    finding = Finding(line, "todo", what, advice)
    return FileReport(path, "error", [finding], data, data)
