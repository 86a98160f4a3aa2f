"""The tables of `ampx demo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from .demo import SCALED, equals_float32, plain_run
from .demo_all import Outcome
from .render import make_table

_RATIO = (
    "Ratio: steps per second as measured, against float32 of the same seed. Mixed precision pays on large layers; "
    "on a network as small as this one its casts can cost more than they save."
)
_STATES = {
    "failed": "[red]failed:[/]",
    "absent": "[dim]not installed:[/]",
    "no backend": "[yellow]no ampx backend:[/]",
    "no demo": "[yellow]no demo:[/]",
}


def print_demo(console: Console, found: dict[str, Any], notes: Sequence[str]) -> None:
    """Print the table of one framework."""
    headings = ("run", "accuracy", "loss", "seconds", "steps/s", "ratio", "skipped", "scale")
    table = make_table("Handwritten digits", *headings)
    for column in table.columns[1:]:
        column.justify = "right"
    runs = found["runs"]
    for run in runs:
        table.add_row(
            _name(run, runs),
            f"{run['accuracy']:.2%}",
            f"{run['final_loss']:.4f}",
            f"{run['seconds']:.2f}",
            *_speed(run, runs),
            *_scale(run),
        )
    console.print(table)
    console.print(_RATIO)
    _print_scaled(console, found["framework"], runs)
    for note in dict.fromkeys(notes):
        console.print(f"[yellow]Note:[/] {escape(note)}")


def print_all(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print one table of all frameworks, and below it what is missing and why."""
    headings = ("framework", "run", "accuracy", "to float32", "ratio", "skipped", "scale")
    table = make_table("Handwritten digits, framework by framework", *headings)
    for column in table.columns[:2]:
        column.no_wrap = True
    for column in table.columns[2:]:
        column.justify = "right"
    shown = [(one, one.report) for one in outcomes if one.report is not None]
    for one, report in shown:
        for position, run in enumerate(report["runs"]):
            table.add_row(
                escape(f"{one.framework}, {run['device']}") if position == 0 else "",
                _name(run, report["runs"]),
                f"{run['accuracy']:.2%}",
                _difference(run, report["runs"]),
                _speed(run, report["runs"])[1],
                *_scale(run),
                end_section=position == len(report["runs"]) - 1,
            )
    if shown:
        console.print(table)
        console.print(f"To float32: the difference in accuracy, in percentage points. {_RATIO}")
    for one, report in shown:
        _print_scaled(console, one.framework, report["runs"])
    for one in outcomes:
        if one.state == "earlier":
            console.print(f"[yellow]{escape(one.framework)} was not trained now:[/] {escape(one.detail)}")
        elif one.state != "ran":
            console.print(f"{escape(one.framework)} {_STATES[one.state]} {escape(one.detail)}", soft_wrap=True)
    for note in dict.fromkeys(note for one in outcomes for note in one.notes):
        console.print(f"[yellow]Note:[/] {escape(note)}")


def _name(run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    several = len({one["seed"] for one in runs}) > 1
    return escape(run["label"] + (f", seed {run['seed']}" if several else ""))


def _difference(run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    plain = plain_run(run, runs)
    if plain is None or plain is run:
        return "–"
    if run["label"] == SCALED and equals_float32(run, runs):
        return "equal"
    return f"{100 * (run['accuracy'] - plain['accuracy']):+.2f}"


def _speed(run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    plain = plain_run(run, runs)
    ratio = "–" if plain is None else f"{run['steps_per_second'] / plain['steps_per_second']:.2f}"
    return f"{run['steps_per_second']:.0f}", ratio


def _scale(run: Mapping[str, Any]) -> tuple[str, str]:
    return str(len(run["skipped"])), f"{run['final_scale']:g}"


def _print_scaled(console: Console, framework: str, runs: Sequence[Mapping[str, Any]]) -> None:
    """Say whether runs that only scale equal float32, as they must."""
    for run in runs:
        if run["label"] != SCALED:
            continue
        name, count = escape(f"{framework}, {_name(run, runs)}"), len(run["losses"])
        if equals_float32(run, runs):
            console.print(f"[green]{name}:[/] all {count} losses and the accuracy equal those of float32, bit for bit.")
        else:
            console.print(f"[red]{name}:[/] the losses differ from those of float32; they must not.")
