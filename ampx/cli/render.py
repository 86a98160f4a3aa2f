"""Tables for people."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .capability_table import HEADINGS, Declared, cells

# Facts with a column of their own; a backend's further details are listed below the table.
_COLUMNS = ("tf32", "fp8", "tensor_cores")
_STATES = {
    "ready": "[green]ready[/]",
    "no backend": "[yellow]no ampx backend installed[/]",
    "broken": "[red]broken[/]",
    "not installed": "[dim]not installed[/]",
}


def print_backends(console: Console, declared: list[Declared], broken: dict[str, str]) -> None:
    """Print the capability table."""
    table = _table("Backends", *HEADINGS)
    for one in declared:
        if one.capabilities is None:
            table.add_row(escape(one.framework), "[yellow]unavailable[/]", *["[dim]–[/]"] * (len(HEADINGS) - 2))
        else:
            table.add_row(*map(escape, cells(one)))
    console.print(table)
    for one in declared:
        if one.problem is not None:
            console.print(
                f"[yellow]{escape(one.framework)} is unavailable:[/] {escape(one.problem)} (needs {one.requires})",
                highlight=False,
            )
    _print_broken(console, broken)


def print_doctor(console: Console, report: dict[str, Any]) -> None:
    """Print the report of `ampx doctor`."""
    _print_machine(console, report)
    console.print(_framework_table(report["frameworks"]))
    ready = [one for one in report["frameworks"] if one["state"] == "ready"]
    if ready:
        console.print(_device_table(ready))
    for one in report["frameworks"]:
        _print_verdict(console, one)
    plugins = report["plugins"]
    console.print(f"Plugins: {escape(', '.join(plugins['found'])) or 'none found'}")
    if plugins["error"]:
        console.print(f"[red]Looking for plugins failed:[/] {escape(plugins['error'])}")
        console.print("Switch plugins off with AMPX_DISABLE_PLUGINS=name,… to find the one that does it.")
    _print_broken(console, plugins["broken"])


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _print_machine(console: Console, report: dict[str, Any]) -> None:
    machine = report["machine"]
    console.print(
        f"[bold]ampx {report['ampx']}[/] on Python {machine['python']}, {escape(machine['platform'])}", highlight=False
    )
    instructions = machine["cpu"]["instructions"]
    if instructions is None:
        meaning = "the system does not tell its instructions"
    else:
        found = ", ".join(f"{flag} ({dtype})" for flag, dtype in instructions.items())
        meaning = f"low-precision instructions: {found or 'none'}"
    console.print(f"CPU: {escape(machine['cpu']['name'])}; {meaning}", highlight=False)
    for gpu in machine["gpus"]:
        cores = ", ".join(gpu["tensor_cores"]) or "none"
        console.print(
            f"GPU: {escape(gpu['name'])}, {gpu['memory']}, compute capability {gpu['compute_capability']}, "
            f"driver {gpu['driver']}; Tensor Cores: {cores}",
            highlight=False,
        )
    if not machine["gpus"]:
        console.print("GPU: no NVIDIA driver shows one")


def _framework_table(frameworks: list[dict[str, Any]]) -> Table:
    table = _table("Frameworks", "framework", "version", "state", "mixed precision", "with")
    for one in frameworks:
        own, *companions = one["versions"].items() or [("", one["version"])]
        table.add_row(
            one["name"],
            str(own[1] or one["version"] or "–"),
            _STATES[one["state"]],
            {"native": "[green]native[/]", "emulated": "[yellow]emulated[/]", "none": "[dim]no[/]"}[
                one["mixed_precision"]
            ],
            ", ".join(f"{name} {version}" for name, version in companions),
        )
    return table


def _device_table(frameworks: list[dict[str, Any]]) -> Table:
    table = _table("Devices", "framework", "device", "float16", "bfloat16", "TF32", "FP8", "Tensor Cores", "details")
    for one in frameworks:
        for device in one["devices"]:
            details = device["details"]
            rest = ", ".join(
                f"{name.replace('_', ' ')}: {_value(value)}" for name, value in details.items() if name not in _COLUMNS
            )
            table.add_row(
                one["name"],
                device["name"],
                _how("float16", device),
                _how("bfloat16", device),
                *(escape(_value(details.get(name))) for name in _COLUMNS),
                escape(rest),
            )
        for kind in one["absent_devices"]:
            table.add_row(one["name"], kind, "[dim]absent[/]", *["[dim]–[/]"] * 4, "")
    return table


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
        return ", ".join(f"{name}: {_value(one)}" for name, one in value.items()) or "none"
    return str(value)


def _print_verdict(console: Console, one: dict[str, Any]) -> None:
    if one["state"] == "broken":
        console.print(f"[red]{one['name']} is broken:[/] {escape(one['problem'])}", highlight=False)
        console.print(f"See it by itself with: python -c 'import {one['module']}'", highlight=False)
    chosen = one["init"]
    if chosen:
        what = chosen["dtype"] or "float32: mixed precision stays off"
        scale = f", loss scale {'dynamic' if chosen['dynamic'] else 'static'} from {chosen['init_scale']:g}"
        console.print(
            f"[bold]ampx.init(framework={one['name']!r})[/] chooses {what} on {chosen['device']}"
            f"{scale if chosen['dtype'] else ''}. Why: {escape(chosen['reason'])}.",
            highlight=False,
        )


def _print_broken(console: Console, broken: dict[str, str]) -> None:
    for name, problem in broken.items():
        console.print(f"[red]Plugin {escape(name)} is broken:[/] {escape(problem)}", highlight=False)
