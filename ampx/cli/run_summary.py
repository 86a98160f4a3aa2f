"""The summary that `ampx run` prints on stderr when the script has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

from ampx.running.recorder import FORWARD, OptimizerRecord

_NAMES = {FORWARD: "forward and the rest of the loop"}
TOP = 10


def summary_lines(report: dict[str, Any], failed: bool = False) -> Iterator[str]:
    """Return the lines of the summary.

    Args:
        report: As `--report out.json` holds it.
        failed: The script ended by an error, under which nothing is said that is not known.
    """
    children: list[dict[str, Any]] = report["processes"]
    shown = report if report["framework"] is not None or not children else children[0]
    if shown["framework"] is not None:
        yield f"ampx run: {headline(shown)}"
    elif not failed and report["notes"]:
        yield "ampx run: nothing was automated, as the notes say"
    elif not failed:
        yield "ampx run: nothing to automate: the script made no optimizer of a framework that ampx knows"
    rank, size = report["rank"], report["world_size"]
    if size > 1:
        yield f"  {'process':<11} {rank} of {size}; the others tell by their exit codes and reports"
    yield from (f"  {line}" for line in _optimizers(report["optimizers"]))
    if children:
        yield f"  {'processes':<11} {len(children)} that the script started by multiprocessing trained:"
        for child in children[:TOP]:
            other = "" if headline(child) == headline(shown) else f" {headline(child)}"
            yield f"  {'':<11} {child['process']}{other}"
            yield from (f"  {'':<11}   {line}" for line in _optimizers(child["optimizers"]))
        if len(children) > TOP:
            yield f"  {'':<11} and {len(children) - TOP} more"
    yield from _details(shown)
    notes = [*report["notes"], *(note for child in children for note in child["notes"])]
    for note in dict.fromkeys(notes):
        yield f"  {'note':<11} {note}"


def headline(report: dict[str, Any]) -> str:
    """Return what ran in what, as one line."""
    if report["dtype"] is None:
        return f"{report['framework']} as the script has it, with {report['by_itself']}"
    return (
        f"{report['framework']} in {report['dtype']} on {report['device']}, level {report['level']}: {report['reason']}"
    )


def names_of(optimizers: Sequence[dict[str, Any]]) -> list[str]:
    """Return a name for each optimizer: its class, and where that is not enough the line that made it, or a number."""
    kinds = [one["kind"] for one in optimizers]
    names = []
    for position, one in enumerate(optimizers):
        kind, place = one["kind"], one["place"]
        if kinds.count(kind) > 1:
            same = [other for other in optimizers if (other["kind"], other["place"]) == (kind, place)]
            number = "" if place and len(same) == 1 else f" {1 + kinds[:position].count(kind)}"
            kind = f"{kind}{number}" + (f" ({PurePath(place).name})" if place else "")
        names.append(kind)
    return names


def _optimizers(optimizers: Sequence[dict[str, Any]]) -> Iterator[str]:
    for name, one in zip(names_of(optimizers), optimizers, strict=True):
        record = OptimizerRecord(**{key: value for key, value in one.items() if key != "group"})
        steps = f"{_count(record.steps, 'step')}, {len(record.skipped)} skipped"
        yield f"{name:<11} {steps}; loss scale {record.trace()}"


def _details(report: dict[str, Any]) -> Iterator[str]:
    if report["seconds"]:
        times = sorted(report["seconds"].items(), key=lambda item: item[0] != FORWARD)
        spent = ", ".join(f"{_NAMES.get(name, name)} {seconds:.2f} s" for name, seconds in times)
        yield f"  {'time':<11} {spent} (on the host)"
    if report["ops"] and report["sampled_steps"]:
        yield f"  {'operations':<11} of the first {_count(report['sampled_steps'], 'step')}, the most frequent:"
        for one in report["ops"][:TOP]:
            yield f"  {'':<11} {one['op']:<32} {one['dtype']:<9} {one['count']:>6} ×"
    if report["lines"]:
        yield f"  {'by hand':<11} {report['lines'][0]}"
        yield from (f"  {'':<11} {line}" for line in report["lines"][1:])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
