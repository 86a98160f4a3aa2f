"""The table of `ampx compare`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ampx.numerics.report import (
    HEAD,
    METER_HEAD,
    WORST_HEAD,
    compared_rows,
    meter_rows,
    sweep_failures,
    swept_dtypes,
    worst_rows,
)

from .render import make_table
from .terminal import terminal


def wide_console() -> Console:
    """Return a console that does not squeeze a table which goes into a file."""
    narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
    return terminal.console(width=None if narrow else 140)


def print_comparison(console: Console, report: Mapping[str, Any]) -> None:
    """Print what `ampx compare` says: first what fails, or that nothing does."""
    for name, message in report["failed"].items():
        terminal.say(f"{name} failed: {message}")
    if not report["dtypes"]:
        terminal.say(report["verdict"])
    for facts in report["dtypes"].values():
        terminal.say(facts["verdict"])
        if facts["fault"] and facts["fault"]["advice"]:
            terminal.say("\n".join(["", *(f"    {line}" for line in facts["fault"]["advice"].splitlines())]))
    terminal.say("")
    script = " ".join([report["script"], *report["arguments"]])
    runs = "1 run" if report["repeats"] == 1 else f"{report['repeats']} runs"
    title = f"{script}: {report['framework']} on {report['device']}, {report['steps']} steps, {runs} each"
    table = _table(escape(title), HEAD, compared_rows(report), console.width)
    console.print(table, crop=False)
    if meters := meter_rows(report):
        title = "Updates that are rounded away, gradients that underflow to zero"
        console.print(_table(title, METER_HEAD, meters, console.width), crop=False)
    for name, facts in report["dtypes"].items():
        if facts["modules"] is not None:
            title = f"Largest relative errors in {name}"
            console.print(_table(title, WORST_HEAD, worst_rows(facts["modules"]), console.width), crop=False)
    if report["sweep"] is not None:
        _print_sweep(console, report["sweep"])
    for note in report["notes"]:
        terminal.say(f"note: {note}")


def _table(title: str, head: Sequence[str], rows: Iterable[Iterable[str]], columns: int) -> Table:
    """Return a table for so many columns of text, which breaks no word, and long names of modules behind a dot."""
    table = make_table(title, *head)
    broken = [[_lines(cell, 2 * columns // 5) for cell in row] for row in rows]
    for row in broken:
        table.add_row(*map(escape, row))
    texts = ["\n".join(column) for column in zip(head, *broken, strict=True)]
    widths = _widths(texts, columns - 2 * len(texts))
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width
    if sum(widths) > columns - 2 * len(texts):
        table.width = sum(widths) + 2 * len(texts)
    return table


def _widths(texts: Sequence[str], columns: int) -> list[int]:
    """Return how wide texts are beside each other: together so many columns, or as many as their longest words need."""
    widths = [max(map(len, text.split("\n"))) for text in texts]
    spare = [width - max(map(len, text.split())) for width, text in zip(widths, texts, strict=True)]
    while sum(widths) > columns and any(spare):
        widest = spare.index(max(spare))
        widths[widest], spare[widest] = widths[widest] - 1, spare[widest] - 1
    return widths


def _lines(text: str, columns: int) -> str:
    """Return a text in lines of so many columns, or of one part that is longer; they end with a dot or at a space."""
    lines = [""]
    for part in re.findall(r"[^. ]*[. ]*", text):
        if lines[-1] and len((lines[-1] + part).rstrip()) > columns:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _print_sweep(console: Console, sweep: Mapping[str, Any]) -> None:
    names = swept_dtypes(sweep)
    table = make_table(
        f"Over {escape(sweep['option'])}", "value", *(f"{name}, steps a second" for name in names), "ratio"
    )
    for point in sweep["points"]:
        runs = point["runs"]
        speeds = [runs[name]["steps_a_second"] if name in runs else None for name in names]
        ratios = [f"{run['speed']['ratio']:.2f}×" for run in runs.values() if run["speed"] is not None]
        table.add_row(escape(point["value"]), *("–" if s is None else f"{s:.4g}" for s in speeds), ", ".join(ratios))
    console.print(table)
    for sentence in sweep_failures(sweep):
        console.print(escape(sentence), soft_wrap=True)
