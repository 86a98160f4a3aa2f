"""What `ampx compare`, `diagnose` and `tune` write: JSON, a page, or a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from ampx.formats import FORMATS
from ampx.run import page
from ampx.run.report import VISIBLE, lost_map

from .tolerance import percent

# By dtype, the loss of each step, and the optimizer that made the step.
Losses: TypeAlias = Mapping[str, Sequence[Any]]
Names: TypeAlias = Mapping[str, Sequence[str | None]]
KINDS = (".json", ".html", ".png")


def write(target: Path, report: Mapping[str, Any]) -> None:
    """Write a report in the format of its name; JSON goes beside a page and a picture."""
    if target.suffix == ".html":
        target.write_text(to_page(report), encoding="utf-8")
    elif target.suffix == ".png":
        draw(report).savefig(target, format="png", dpi=125)
    target.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def to_page(report: Mapping[str, Any]) -> str:
    """Return the page of a report, whichever command made it."""
    command = report["schema"].partition("/")[0].replace(".", " ")
    script = " ".join([report["script"], *report["arguments"]])
    parts = {"ampx compare": _compared, "ampx diagnose": _diagnosed, "ampx tune": _tuned}[command](report)
    return page.document(f"{command}: {script}", parts, report["origin"])


# -- compare ---------------------------------------------------------------------------------------

HEAD = ("dtype", "steps/s", "speed", "memory", "skipped", "scale", "last loss", "differs at")


def compared_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of `ampx compare`, below `HEAD`."""
    rows: list[tuple[str, ...]] = []
    for name, facts in {"float32": report["float32"], **report["dtypes"]}.items():
        speed, ratio = facts.get("speed"), facts.get("memory_ratio")
        spread = "" if speed is None else f"{speed['ratio']:.2f}×"
        if speed is not None and len(speed["pairs"]) > 1:
            spread += f" ({speed['least']:.2f}–{speed['largest']:.2f})"
        losses = [loss for loss in facts["losses"] if loss is not None]
        parts_at = facts.get("parts_at")
        rows.append(
            (
                name,
                _short(facts["steps_a_second"]),
                spread or "–",
                _memory(facts["peak_memory"]) + ("" if ratio is None else f" ({ratio:.2f}×)"),
                f"{len(facts['skipped'])} of {facts['steps']}",
                _short(facts["scale"]),
                _short(losses[-1]) if losses else "not known",
                "–" if name == "float32" else "never" if parts_at is None else f"step {parts_at}",
            )
        )
    return rows


METER_HEAD = ("dtype", "updates lost", "gradients flushed", "headroom", "most updates lost in")


def meter_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of the meters, below `METER_HEAD`: the last look at each optimizer in each dtype."""
    rows: list[tuple[str, ...]] = []
    for name, facts in {"float32": report["float32"], **report["dtypes"]}.items():
        kinds = [meter["optimizer"] for meter in facts["meters"]]
        for position, meter in enumerate(facts["meters"]):
            kind, last = meter["optimizer"], meter["last"]
            number = f" {1 + kinds[:position].count(kind)}" if kinds.count(kind) > 1 else ""
            shares = {
                entry["name"]: entry["unchanged"] / entry["moved"] for entry in last["parameters"] if entry["moved"]
            }
            worst = max(shares, key=lambda parameter: shares[parameter], default=None)
            rows.append(
                (
                    name if len(kinds) == 1 else f"{name}, {kind}{number}",
                    f"{last['lost']:.2%}",
                    f"{last['flushed']:.2%}",
                    "–" if last["headroom"] is None else f"{last['headroom']:.1f} bits",
                    "–" if worst is None or shares[worst] < VISIBLE else f"{worst}: {shares[worst]:.0%}",
                )
            )
    return rows


WORST_HEAD = ("module", "output", "gradient")


def worst_rows(modules: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of the largest relative errors, below `WORST_HEAD`; "" for one that is not among them."""
    outputs, gradients = (
        {entry["module"]: entry["error"] for entry in modules[worst]} for worst in ("worst_outputs", "worst_gradients")
    )
    return [
        (name or "the model", *(_error(errors.get(name, "")) for errors in (outputs, gradients)))
        for name in outputs | gradients
    ]


def _error(error: float | str) -> str:
    return error if isinstance(error, str) else f"{error:.2g}"


def _short(value: float | str | None) -> str:
    return "–" if value is None else value if isinstance(value, str) else f"{value:.5g}"


def _memory(size: int | None) -> str:
    return "–" if size is None else f"{size / 2**20:.0f} MiB"


def _compared(report: Mapping[str, Any]) -> list[str]:
    parts = [page.paragraph(f"{name} failed: {message}") for name, message in report["failed"].items()]
    if not report["dtypes"]:
        parts.append(page.paragraph(report["verdict"], verdict=True))
    for facts in report["dtypes"].values():
        parts += [page.paragraph(line, verdict=True) for line in facts["verdict"].splitlines()]
        parts += _lines_of_code(facts["fault"]["advice"]) if facts["fault"] else []
    parts += _loss_parts("Loss", *_losses(report))
    parts += [page.table(HEAD, compared_rows(report)), *map(page.paragraph, report["notes"])]
    if meters := meter_rows(report):
        parts += [page.heading("Updates and gradients"), page.table(METER_HEAD, meters)]
    parts += [lost_map(meter) for facts in report["dtypes"].values() for meter in facts["meters"]]
    if report["sweep"] is not None:
        parts += [page.heading(f"Over {report['sweep']['option']}"), page.svg(_draw_sweep(report, _empty_figure()))]
        parts += map(page.paragraph, sweep_failures(report["sweep"]))
    for name, facts in report["dtypes"].items():
        modules = facts["modules"]
        if modules is None:
            continue
        parts.append(page.heading(f"Modules in {name}: relative error to float32"))
        parts.append(page.table(WORST_HEAD, worst_rows(modules)))
        parts.append(_heat_map(modules["map"]))
    return parts


def _loss_parts(title: str, losses: Losses, names: Names) -> list[str]:
    """Return a heading and curves of losses by step, for each optimizer; nothing where no loss is a number."""
    if not any(isinstance(loss, float) for curve in losses.values() for loss in curve):
        return []
    parts = [page.heading(title)]
    for optimizer, curves in _by_optimizer(losses, names).items():
        figure, axes = page.new_figure(3.2)
        page.draw_losses(axes, curves)
        axes.set_title(optimizer)
        parts.append(page.svg(figure))
    return parts


def _by_optimizer(losses: Losses, names: Names) -> dict[str, dict[str, Any]]:
    """Return the curves of step and loss in each dtype, by optimizer; of "" where only one has losses."""
    curves: dict[str, dict[str, Any]] = {}
    for dtype, values in losses.items():
        for optimizer, points in page.by_optimizer(count(1), values, names[dtype]).items():
            curves.setdefault(optimizer, {})[dtype] = points
    return curves


def _heat_map(errors: Mapping[str, Any]) -> str:
    if not any(error for row in errors["errors"] for error in row):
        return page.paragraph("Every module computed what it computes in float32.")
    names = [name or "the model" for name in errors["modules"]]
    title = "relative error of the output; red: not finite, or not run"
    return page.heat_map(names, errors["steps"], errors["errors"], title, missing=page.ALARM)


def _losses(report: Mapping[str, Any]) -> tuple[Losses, Names]:
    runs = {"float32": report["float32"], **report["dtypes"]}
    losses, names = ({dtype: facts[key] for dtype, facts in runs.items()} for key in ("losses", "losses_of"))
    return losses, names


def draw(report: Mapping[str, Any]) -> Any:
    """Draw the picture of `ampx compare`: losses on each other, and speed; over the sweep where there is one."""
    from matplotlib.figure import Figure  # no display, no global state

    figure = Figure(figsize=(12.0, 4.6), layout="constrained")
    halves: Any = figure.subfigures(1, 2)
    left, right = halves
    losses, names = _losses(report)
    curves = _by_optimizer(losses, names) or {"": dict.fromkeys(losses, ())}
    places = left.subplots(len(curves), squeeze=False)[:, 0]
    for axes, (optimizer, points) in zip(places, curves.items(), strict=True):
        page.draw_losses(axes, points)
        axes.set_title(f"Loss of {optimizer}" if optimizer else "Loss")
    if report["sweep"] is not None:
        _draw_sweep(report, right)
    else:
        _draw_speed(right.subplots(), report)
    figure.suptitle(f"{report['script']}: {report['framework']} on {report['device']}")
    return figure


def _draw_speed(axes: Any, report: Mapping[str, Any]) -> None:
    speeds = {name: facts["speed"] for name, facts in report["dtypes"].items() if facts["speed"] is not None}
    names = ["float32", *speeds]
    ratios = [1.0, *(speed["ratio"] for speed in speeds.values())]
    least = [0.0, *(speed["ratio"] - speed["least"] for speed in speeds.values())]
    largest = [0.0, *(speed["largest"] - speed["ratio"] for speed in speeds.values())]
    colours = [page.style_of(name)[0] for name in names]
    axes.barh(names, ratios, color=colours, xerr=[least, largest], capsize=4)
    axes.axvline(1.0, color="#222", linewidth=0.8, linestyle=":")
    axes.invert_yaxis()
    axes.set_xlabel("speed, as a multiple of float32's; the bar: all pairs of runs")
    axes.set_title("Speed")
    axes.spines[["top", "right"]].set_visible(False)


def swept_dtypes(sweep: Mapping[str, Any]) -> list[str]:
    """Return the dtypes that ran with at least one value of a sweep."""
    return list(dict.fromkeys(name for point in sweep["points"] for name in point["runs"]))


def sweep_failures(sweep: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each value of a sweep with which a run failed."""
    return [
        f"With {sweep['option']} {point['value']} {name} failed: {message}"
        for point in sweep["points"]
        for name, message in point["failed"].items()
    ]


def _empty_figure() -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(9.0, 3.6), layout="constrained")


def _draw_sweep(report: Mapping[str, Any], figure: Any) -> Any:
    speed, memory = figure.subplots(1, 2)
    points = report["sweep"]["points"]
    for name in swept_dtypes(report["sweep"]):
        colour, line = page.style_of(name)
        runs = [point["runs"].get(name, {}) for point in points]
        style = {"color": colour, "linestyle": line, "marker": "o", "label": name}
        places = range(len(points))
        speed.plot(places, [run.get("steps_a_second") or math.nan for run in runs], **style)
        memory.plot(places, [(run.get("peak_memory") or math.nan) / 2**20 for run in runs], **style)
    for axes, title in ((speed, "steps a second"), (memory, "peak memory, MiB")):
        axes.set_title(title)
        axes.set_xlabel(report["sweep"]["option"])
        axes.set_xticks(range(len(points)), [point["value"] for point in points])  # also of a run that failed
        heights = [height for curve in axes.get_lines() for height in curve.get_ydata() if math.isfinite(height)]
        axes.set_ylim(0, 1.1 * max(heights, default=1.0))
        axes.spines[["top", "right"]].set_visible(False)
    speed.legend(frameon=False)
    return figure


# -- diagnose and tune -----------------------------------------------------------------------------


def _diagnosed(report: Mapping[str, Any]) -> list[str]:
    diagnosis = report["diagnosis"]
    parts = [
        page.paragraph(report["verdict"], verdict=True),
        *_loss_parts("Loss", *({report["dtype"]: report[key]} for key in ("losses", "losses_of"))),
    ]
    if report["modules"]:
        parts += [page.heading(f"What the modules of step {report['looked_at']} need, and what the dtype holds")]
        parts += [page.svg(_draw_ranges(report))]
    parts += [] if diagnosis is None else _what_to_do(diagnosis)
    if report["mistakes"]:
        parts += [page.heading("Mistakes in the script"), *map(page.paragraph, report["mistakes"])]
    parts += map(page.paragraph, report["notes"])
    if report["map"] is not None:
        title = "Before it failed" if diagnosis is not None else "Steps that were looked at"
        parts += [page.heading(title), _range_map(report["map"])]
    if report["modules"]:
        rows = [
            (entry["module"] or "the model", entry["kind"], entry["direction"], entry["dtype"], _range(entry["value"]))
            for entry in report["modules"]
        ]
        parts += [page.heading(f"Modules in step {report['looked_at']}")]
        parts.append(page.table(("module", "class", "pass", "dtype", "value"), rows))
    if report["risks"]:
        parts += [page.heading("Risks"), *(page.paragraph(risk["text"]) for risk in report["risks"])]
    return parts


def _what_to_do(diagnosis: Mapping[str, Any]) -> list[str]:
    """Return what was tried, the bracket, and the lines of code."""
    tried = diagnosis["experiments"]
    parts = [page.heading("What was tried")] if tried else []
    parts += [page.paragraph(f"{'Cure' if entry['cures'] else 'No cure'}: {entry['text']}.") for entry in tried]
    shown = {name: _place(place) for name, place in _bracket(diagnosis) if place is not None}
    if shown:
        parts.append(page.table(("", *shown), list(zip(_PLACE, *shown.values(), strict=True))))
    if diagnosis["chain"]:
        head = ("on the way, from what agrees", "operation", "value", "in float32", "off by")
        parts.append(page.table(head, [_link(link) for link in diagnosis["chain"]]))
    return [*parts, *_lines_of_code(diagnosis["advice"])]


def _lines_of_code(advice: str) -> list[str]:
    return [page.heading("What to do"), page.code(advice.splitlines())] if advice else []


def _bracket(diagnosis: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the values between which it fails, by what they are called; in the words of what is printed."""
    before, place = diagnosis["last_finite"], diagnosis["first_nonfinite"]
    if diagnosis["kind"] == "error":
        return [("raises", place)]
    wrong = place is not None and not place["value"]["nonfinite"]
    last, first = ("last right", "first wrong") if wrong else ("last finite", "first non-finite")
    return [(last, before), (first, place)]


def _range_map(largest: Mapping[str, Any]) -> str:
    names = [name or "the model" for name in largest["modules"]]
    title = "largest magnitude of the output; red: not finite, or not run"
    return page.heat_map(names, largest["steps"], largest["largest"], title, missing=page.ALARM)


def _draw_ranges(report: Mapping[str, Any]) -> Any:
    """Draw the magnitudes of every module's output, or gradient, in float32, between the limits of the dtype."""
    form, diagnosis = FORMATS[report["dtype"]], report["diagnosis"] or {}
    place = diagnosis.get("first_nonfinite") or {}
    failing = place.get("module")
    ranges = _magnitudes(report["modules"], "backward") if place.get("direction") == "backward" else {}
    what = "gradients" if ranges else "outputs"
    ranges = ranges or _magnitudes(report["modules"], "forward")
    shown = sorted(ranges, key=lambda name: (name != failing, -ranges[name][1]))[: page.MOST_ROWS]
    names = [name for name in ranges if name in shown]
    figure, axes = page.new_figure(1.2 + 0.17 * max(5, len(names)))
    for row, name in enumerate(names):
        colour = page.ALARM if name == failing else page.style_of("float32")[0]
        axes.plot(ranges[name], (row, row), color=colour, linewidth=5, solid_capstyle="projecting")
    for limit in (form.smallest, form.largest):
        axes.axvline(limit, color="#222", linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), [page.plain_label(name or "the model") for name in names], fontsize=7)
    axes.invert_yaxis()
    axes.set_title(
        f"magnitudes of {what} in float32, other than zero;\n"
        f"dotted: the smallest and the largest number of {report['dtype']}; red: where it first fails",
        fontsize=9,
    )
    return figure


def _magnitudes(modules: Sequence[Mapping[str, Any]], direction: str) -> dict[str, tuple[float, float]]:
    """Return by module the smallest and the largest magnitude in one direction, in float32 where that is known."""
    ranges: dict[str, tuple[float, float]] = {}
    for entry in modules:
        stats, name = entry["float32"] or entry["value"], entry["module"]
        if entry["direction"] == direction and stats["largest"]:
            least, most = ranges.get(name, (math.inf, 0.0))
            ranges[name] = min(least, stats["smallest"]), max(most, stats["largest"])
    return ranges


_PLACE = ("pass", "module", "operation", "dtype", "value", "inputs", "line")


def _place(place: Mapping[str, Any]) -> tuple[str, ...]:
    names = place["direction"], place["module"] or "the model", place["operation"], place["dtype"]
    return (*names, _range(place["value"]), _range(place["inputs"]), place["place"])


def _link(link: Mapping[str, Any]) -> tuple[str, ...]:
    place, error = link["place"], link["error"]
    exact = "–" if link["float32"] is None else _range(link["float32"])
    off = "not finite" if isinstance(error, str) else percent(error)
    return place["module"] or "the model", place["operation"], _range(place["value"]), exact, off


def _range(stats: Mapping[str, Any]) -> str:
    broken, elements = stats["nonfinite"], stats["elements"]
    finite = f"{stats['smallest']:.3g} to {stats['largest']:.3g}" if elements > broken else ""
    return "; ".join(filter(None, [f"{broken} of {elements} not finite" if broken else "", finite])) or "–"


def exclusion_lines(exclusions: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of what stays in float32 as conversion tools take them, one line a tool and module."""
    return [
        *(f"node of ONNX to keep in float32, for ModelOpt's AutoCast: {entry['regex']}" for entry in exclusions),
        *(f"layer precision of TensorRT 10 and before: {entry['wildcard']}:fp32" for entry in exclusions),
    ]


def _tuned(report: Mapping[str, Any]) -> list[str]:
    parts = [page.paragraph(report["verdict"], verdict=True), *map(page.paragraph, report["notes"])]
    rows = [(choice["entry"], choice["reason"]) for choice in report["policy"]["deny"]]
    if rows:
        parts += [page.heading("What stays in float32"), page.table(("entry", "why"), rows)]
    parts += [page.heading("The policy file"), page.code(report["file"].splitlines())]
    if report["exclusions"]:
        parts += [page.heading("For conversion tools"), page.code(exclusion_lines(report["exclusions"]))]
    parts += _loss_parts("Loss, before anything was kept in float32", report["losses"], report["losses_of"])
    if report["map"] is not None:
        parts += [page.heading("Modules: relative error to float32"), _heat_map(report["map"])]
    return parts
