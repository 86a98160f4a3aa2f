"""The table of `ampx compare`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
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
    for verdict in [facts["verdict"] for facts in report["dtypes"].values()] or [report["verdict"]]:
        terminal.say(verdict)
    terminal.say("")
    script = " ".join([report["script"], *report["arguments"]])
    runs = "1 run" if report["repeats"] == 1 else f"{report['repeats']} runs"
    title = f"{script}: {report['framework']} on {report['device']}, {report['steps']} steps, {runs} each"
    table = _table(escape(title), HEAD, compared_rows(report))
    for column in table.columns[:3]:  # dtype and speed are what one looks for
        column.no_wrap = True
    console.print(table)
    if meters := meter_rows(report):
        console.print(_table("Updates that are rounded away, gradients that underflow to zero", METER_HEAD, meters))
    for name, facts in report["dtypes"].items():
        if facts["modules"] is not None:
            title = f"Largest relative errors in {name}"
            console.print(_table(title, WORST_HEAD, worst_rows(facts["modules"])))
    if report["sweep"] is not None:
        _print_sweep(console, report["sweep"])
    for note in report["notes"]:
        terminal.say(f"note: {note}")


def _table(title: str, head: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    table = make_table(title, *head)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


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
