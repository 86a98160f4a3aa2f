"""Tables for people."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ampx.plugins import is_installed

from .capability_table import Declared
from .demo import SCALED, equals_float32, plain_run
from .demo_command import Outcome
from .frameworks import KNOWN
from .installation import DISTRIBUTION, REPAIR
from .new_backend import Written

# Facts with a column of their own; a backend's further details are listed below the table.
_COLUMNS = ("tf32", "fp8", "tensor_cores")
_STATES = {
    "ready": "[green]ready[/]",
    "no backend": "[yellow]no ampx backend installed[/]",
    "broken": "[red]broken[/]",
    "not installed": "[dim]not installed[/]",
}


def print_backends(console: Console, declared: list[Declared], broken: dict[str, str]) -> None:
    """Print the capability table of the backends that can be loaded, and why the others cannot."""
    table = make_table("Backends", "capability")
    columns = []
    for backend in declared:
        if backend.capabilities is not None:
            table.add_column(escape(backend.framework), overflow="fold")
            columns.append(
                {**backend.capabilities, "beyond these": list(backend.facts), "offers": list(backend.offers)}
            )
    if columns:
        for name in columns[0]:
            table.add_row(name.replace("_", " "), *(_declared(abilities[name]) for abilities in columns))
        console.print(table)
    for backend in declared:
        if backend.problem is not None:
            console.print(f"[yellow]{escape(backend.framework)} is unavailable:[/] {escape(backend.problem)}")
    _print_broken(console, broken)


def _declared(value: Any) -> str:
    if isinstance(value, bool):
        return "[green]yes[/]" if value else "[dim]no[/]"
    return escape(_value(value))


def print_doctor(console: Console, report: dict[str, Any]) -> None:
    """Print the report of `ampx doctor`."""
    _print_machine(console, report)
    for other in report["others"]:
        _print_other(console, other)
    console.print(_framework_table(report["frameworks"]))
    ready = [framework for framework in report["frameworks"] if framework["state"] == "ready"]
    if ready:
        console.print(_device_table(ready))
    for framework in ready:
        _print_details(console, framework)
    for framework in report["frameworks"]:
        _print_verdict(console, framework)
    _print_absent(console, report["frameworks"])
    plugins = report["plugins"]
    console.print(f"Plugins: {escape(', '.join(plugins['found'])) or 'none found'}")
    if plugins["disabled"]:
        console.print(f"Switched off by AMPX_DISABLE_PLUGINS: {escape(', '.join(plugins['disabled']))}")
    if plugins["error"]:
        console.print(f"[red]Looking for plugins failed:[/] {escape(plugins['error'])}")
        console.print("Switch plugins off with AMPX_DISABLE_PLUGINS=name,… to find the one that does it.")
    _print_broken(console, plugins["broken"])


def _print_absent(console: Console, frameworks: list[dict[str, Any]]) -> None:
    """Say what to install where nothing that was asked about is installed."""
    absent = [framework for framework in frameworks if framework["state"] == "not installed"]
    if len(absent) < len(frameworks):
        return
    first = absent[0]
    what = f"'{DISTRIBUTION}[{first['name']}]'" if first["name"] in KNOWN else f"'{first['requires']}'"
    install = escape(f"`pip install {what}`")
    if len(frameworks) == 1:
        console.print(f"{escape(first['name'])} is not installed in this Python. Install it with {install}.")
    else:
        console.print(f"No framework is installed in this Python. Install one, such as with {install}.")


def make_table(title: str, *headings: str) -> Table:
    """Return an empty table in the style of the command."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        min_width=min(len(title), 80),  # a title as wide as the table, or wider, is broken into lines
    )
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _print_other(console: Console, other: dict[str, str]) -> None:
    """Print that a distribution of another project lies where ours does."""
    summary = f" ({other['summary']})" if other["summary"] else ""
    console.print(
        f"[red]In the way:[/] {other['name']} {escape(other['version'])}{escape(summary)} in {escape(other['folder'])} "
        f"has nothing to do with {DISTRIBUTION}, and installs files of the same names. {REPAIR}.",
        soft_wrap=True,
    )


def _print_machine(console: Console, report: dict[str, Any]) -> None:
    machine = report["machine"]
    console.print(f"[bold]ampx {report['ampx']}[/] on Python {machine['python']}, {escape(machine['platform'])}")
    instructions = machine["cpu"]["instructions"]
    if instructions is None:
        meaning = "the system does not tell its instructions"
    else:
        flags = ", ".join(f"{flag} ({dtype})" for flag, dtype in instructions.items())
        meaning = f"low-precision instructions: {flags or 'none'}"
    console.print(f"CPU: {escape(machine['cpu']['name'])}; {meaning}")
    for gpu in machine["gpus"]:
        cores = ", ".join(gpu["tensor_cores"]) or "none"
        console.print(
            f"GPU: {escape(gpu['name'])}, {gpu['memory']}, compute capability {gpu['compute_capability']}, "
            f"driver {gpu['driver']}; Tensor Cores: {cores}",
        )
    if not machine["gpus"]:
        console.print("GPU: no NVIDIA driver shows one")


def _framework_table(frameworks: list[dict[str, Any]]) -> Table:
    table = make_table("Frameworks", "framework", "version", "state", "mixed precision", "with")
    for framework in frameworks:
        own, *companions = framework["versions"].items() or [("", framework["version"])]
        table.add_row(
            framework["name"],
            str(own[1] or framework["version"] or "–"),
            _STATES[framework["state"]],
            {"native": "[green]native[/]", "emulated": "[yellow]emulated[/]", "none": "[dim]no[/]"}[
                framework["mixed_precision"]
            ],
            ", ".join(f"{name} {version}" for name, version in companions),
        )
    return table


def _device_table(frameworks: list[dict[str, Any]]) -> Table:
    table = make_table("Devices", "framework", "device", "float16", "bfloat16", "TF32", "FP8", "Tensor Cores")
    for framework in frameworks:
        for device in framework["devices"]:
            table.add_row(
                framework["name"],
                device["name"],
                _how("float16", device),
                _how("bfloat16", device),
                *(escape(_value(device["details"].get(name))) for name in _COLUMNS),
            )
        for kind in framework["absent_devices"]:
            table.add_row(framework["name"], kind, *["[dim]absent[/]"] * 2, *["[dim]–[/]"] * len(_COLUMNS))
    return table


def _print_details(console: Console, framework: dict[str, Any]) -> None:
    for device in framework["devices"]:
        rest = {name: value for name, value in device["details"].items() if name not in _COLUMNS}
        if rest:
            facts = "; ".join(f"{name.replace('_', ' ')}: {_value(value)}" for name, value in rest.items())
            console.print(escape(f"{framework['name']} on {device['name']}: {facts}"))


def _how(dtype: str, device: dict[str, Any]) -> str:
    if dtype in device["native"]:
        return "[green]native[/]"
    return "[yellow]emulated[/]" if dtype in device["emulated"] else "[dim]no[/]"


def _value(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_value, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_value(item)}" for name, item in value.items()) or "none"
    return str(value)


def _print_verdict(console: Console, framework: dict[str, Any]) -> None:
    if framework["state"] == "broken":
        console.print(f"[red]{framework['name']} is broken:[/] {escape(framework['problem'])}")
        console.print(f"See it by itself with: python -c 'import {framework['module']}'")
    if framework["known_failure"]:
        console.print(f"[yellow]{framework['name']}:[/] {escape(framework['known_failure'])}.", soft_wrap=True)
    for name, reason in framework["unusable_offers"].items():
        console.print(
            f"[yellow]{framework['name']}:[/] what its backend offers as {name!r} cannot be loaded: "
            f"{escape(reason.rstrip('.'))}.",
            soft_wrap=True,
        )
    chosen = framework["init"]
    if chosen:
        what = chosen["dtype"] or "float32: mixed precision stays off"
        level = "" if chosen["level"] == "O1" else f", level={chosen['level']!r}"
        scale = f"{'dynamic loss scale from' if chosen['dynamic'] else 'static loss scale'} {chosen['init_scale']:g}"
        console.print(
            f"[bold]ampx.init(framework={framework['name']!r}{level})[/] chooses {what} on {chosen['device']}"
            f"{f', {scale}' if chosen['dtype'] else ''}. Why: {escape(chosen['reason'].rstrip('.'))}.",
        )


def _print_broken(console: Console, broken: dict[str, str]) -> None:
    for name, problem in broken.items():
        console.print(f"[red]Plugin {escape(name)} is broken:[/] {escape(problem)}")


def print_new_backend(console: Console, name: str, folder: Path, written: Sequence[Written]) -> None:
    """Print what `ampx new-backend` wrote for a framework, and what to do next."""
    files = Table.grid(padding=(0, 2))
    for file in written:
        files.add_row(f"  {escape(file.path.relative_to(folder).as_posix())}", f"[dim]{escape(file.purpose)}[/]")
    console.print(f"[green]Written:[/] {escape(str(folder))}", soft_wrap=True)
    console.print(files)
    if not is_installed(name):
        console.print(
            f"[yellow]There is no module {escape(name)} in this Python:[/] the package imports it. Install the "
            f"framework; if Python imports it by another name, delete the folder and pass that name.",
            soft_wrap=True,
        )
    console.print(
        f"\nNext:\n  cd {escape(shlex.quote(str(folder)))}\n  pip install -e '.\\[test]'\n  pytest -x\n"
        "pytest runs the conformance kit and stops with what is to be written next. Write it, and run pytest -x again.",
        soft_wrap=True,
    )


_RATIO = (
    "Ratio: steps per second as measured, against float32 of the same seed. Mixed precision pays on large layers; "
    "on a network as small as this one its casts can cost more than they save."
)
_OUTCOMES = {
    "failed": "[red]failed:[/]",
    "absent": "[dim]not installed:[/]",
    "no backend": "[yellow]no ampx backend:[/]",
    "no demo": "[yellow]no demo:[/]",
}


def print_demo(console: Console, results: dict[str, Any], notes: Sequence[str]) -> None:
    """Print the table of one framework."""
    headings = ("run", "accuracy", "loss", "seconds", "steps/s", "ratio", "skipped", "scale")
    table = make_table("Handwritten digits", *headings)
    for column in table.columns[1:]:
        column.justify = "right"
    runs = results["runs"]
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
    _print_scaled(console, results["framework"], runs)
    _print_notes(console, notes)


def print_all(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print one table of all frameworks, and below it what is missing and why."""
    headings = ("framework", "run", "accuracy", "to float32", "ratio", "skipped", "scale")
    table = make_table("Handwritten digits, framework by framework", *headings)
    for column in table.columns[:2]:
        column.no_wrap = True
    for column in table.columns[2:]:
        column.justify = "right"
    shown = [(outcome, outcome.report) for outcome in outcomes if outcome.report is not None]
    for outcome, report in shown:
        for position, run in enumerate(report["runs"]):
            table.add_row(
                escape(f"{outcome.framework}, {run['device']}") if position == 0 else "",
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
    for outcome, report in shown:
        _print_scaled(console, outcome.framework, report["runs"])
    _print_untrained(console, outcomes)
    _print_notes(console, (note for outcome in outcomes for note in outcome.notes))


def _print_notes(console: Console, notes: Iterable[str]) -> None:
    for note in dict.fromkeys(notes):
        console.print(f"[yellow]Note:[/] {escape(note)}")


def _print_untrained(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print which frameworks were not trained now, and why."""
    for outcome in outcomes:
        if outcome.state == "earlier":
            console.print(f"[yellow]{escape(outcome.framework)} was not trained now:[/] {escape(outcome.detail)}")
        elif outcome.state != "ran":
            console.print(
                f"{escape(outcome.framework)} {_OUTCOMES[outcome.state]} {escape(outcome.detail)}", soft_wrap=True
            )


def _name(run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    several = len({other["seed"] for other in runs}) > 1
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
