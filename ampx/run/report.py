"""What `ampx run` reports: the summary on stderr when the script has ended, and the page of `--report out.html`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ampx.rooms import METER_EVERY
from ampx.run.page import (
    ALARM,
    by_optimizer,
    code,
    document,
    draw_losses,
    heading,
    heat_map,
    new_figure,
    paragraph,
    style_of,
    svg,
    table,
)
from ampx.run.recorder import FORWARD, names_of

_NAMES = {FORWARD: "forward and the rest of the loop"}
TOP = 10
VISIBLE = 0.005  # less than half a percent is shown as none
_PROCESS = ("process", "computed", "steps", "skipped")


def summary_lines(report: dict[str, Any], failed: bool = False) -> Iterator[str]:
    """Return the lines of the summary."""
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
    yield from _processes(children, shown)
    yield from _details(shown)
    notes = [*report["notes"], *(note for child in children for note in child["notes"])]
    for note in dict.fromkeys(notes):
        yield f"  {'note':<11} {note}"


def _processes(children: Sequence[dict[str, Any]], shown: dict[str, Any]) -> Iterator[str]:
    if children:
        yield f"  {'processes':<11} {len(children)} that the script started by multiprocessing trained:"
    for child in children[:TOP]:
        other = "" if headline(child) == headline(shown) else f" {headline(child)}"
        yield f"  {'':<11} {child['process']}{other}"
        yield from (f"  {'':<11}   {line}" for line in _optimizers(child["optimizers"]))
    if len(children) > TOP:
        yield f"  {'':<11} and {len(children) - TOP} more"


def headline(report: dict[str, Any]) -> str:
    """Return what ran in what, as one line."""
    if report["dtype"] is None:
        return f"{report['framework']} as the script has it, with {report['by_itself']}"
    line = (
        f"{report['framework']} in {report['dtype']} on {report['device']}, level {report['level']}: {report['reason']}"
    )
    if report["scaled"]:
        line += f"; multiplied by the loss scale, unlike in plain Python: what {', '.join(report['scaled'])} read"
    return line


def _optimizers(optimizers: Sequence[dict[str, Any]]) -> Iterator[str]:
    for name, optimizer in zip(names_of(optimizers), optimizers, strict=True):
        steps = f"{_count(optimizer['steps'], 'step')}, {len(optimizer['skipped'])} skipped"
        yield f"{name:<11} {steps}; loss scale {scale_trace(optimizer)}"


def scale_trace(optimizer: Mapping[str, Any]) -> str:
    """Return the way of the loss scale in one line, at most eight stations long."""
    stations = [f"{optimizer['initial_scale']:g}", *(f"{scale:g} (step {step})" for step, scale in optimizer["scales"])]
    if len(stations) > 8:
        stations = [*stations[:4], f"… {len(stations) - 7} more …", *stations[-3:]]
    return " → ".join(stations)


def _details(report: dict[str, Any]) -> Iterator[str]:
    if report["seconds"]:
        times = sorted(report["seconds"].items(), key=lambda item: item[0] != FORWARD)
        spent = ", ".join(f"{_NAMES.get(name, name)} {seconds:.2f} s" for name, seconds in times)
        yield f"  {'time':<11} {spent} (on the host)"
    if report["ops"] and report["sampled_steps"]:
        yield f"  {'operations':<11} of the first {_count(report['sampled_steps'], 'step')}, the most frequent:"
        for operation in report["ops"][:TOP]:
            yield f"  {'':<11} {operation['op']:<32} {operation['dtype']:<9} {operation['count']:>6} ×"
    for meter in report["meters"]:
        yield f"  {'meter':<11} {meter_line(meter)}"
    if report["lines"]:
        yield f"  {'by hand':<11} {report['lines'][0]}"
        yield from (f"  {'':<11} {line}" for line in report["lines"][1:])


def meter_line(meter: Mapping[str, Any]) -> str:
    """Return what the meter saw last, as one line."""
    last = meter["last"]
    room = "" if last["headroom"] is None else f", {last['headroom']:.0f} bits to overflow"
    return (
        f"{meter['optimizer']}, step {last['step']}: {last['lost']:.1%} of the updates rounded to nothing, "
        f"{last['flushed']:.1%} of the gradients flush to zero in {meter['dtype']}{room}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def page(report: dict[str, Any]) -> str:
    """Return the page of `ampx run`."""
    headed = f"{headline(report)}." if report["framework"] else "The script made no optimizer that ampx knows."
    parts = [paragraph(headed, verdict=True), table((), _facts(report)), *map(paragraph, report["notes"])]
    pictures = {
        "Loss": _draw_losses(report),
        "Loss scale": _draw_scales(report),
        "Time": _draw_time(report),
        "Operations": _draw_ops(report),
    }
    for title, drawn in pictures.items():
        if drawn is not None:
            parts += [heading(title), drawn]
    for meter in report["meters"]:
        parts += meter_parts(meter)
    if report["framework"] and not report["meters"]:
        parts.append(paragraph(_unmetered(max((each["steps"] for each in report["optimizers"]), default=0))))
    if report["lines"]:
        parts += [heading("The same by hand"), code(report["lines"])]
    if report["processes"]:
        trained = [
            (child["process"], headline(child), child["steps"], child["skipped"]) for child in report["processes"]
        ]
        parts += [heading("Processes that the script started"), table(_PROCESS, trained)]
    script = " ".join([report["script"], *report["arguments"]])
    return document(f"ampx run: {script}", parts, report["origin"])


def _unmetered(steps: int) -> str:
    """Say why a run of so many steps of one optimizer metered no update."""
    if steps < METER_EVERY:
        return f"No update was metered: every {METER_EVERY}th step is, and this run made {_count(steps, 'step')}."
    return (
        f"No update was metered in {steps} steps. Every {METER_EVERY}th step is, unless it is skipped; in functions of "
        f"TensorFlow (tf.function, fit) not of float32 parameters, since the smallest steps would take more than 1 % "
        f"longer for it. In an edited script amp.meter_every = {METER_EVERY} before wrap_optimizer asks for them, too."
    )


def meter_parts(meter: Mapping[str, Any], title: str = "Updates and gradients") -> list[str]:
    """Return what a page says of the meter of one optimizer: a sentence, curves, and parameters by steps."""
    parts = [heading(title), paragraph(f"{meter_line(meter)}.")]
    if len(meter["steps"]) > 1 and any([*meter["lost"], *meter["flushed"]]):
        figure, axes = new_figure(2.4)
        for name, label, line in (("lost", "updates lost", "-"), ("flushed", "gradients flushed", "--")):
            axes.plot(meter["steps"], [100 * share for share in meter[name]], line, marker=".", label=label)
        axes.set_ylim(-2, 102)
        axes.set_xlabel("step")
        axes.set_ylabel("percent")
        axes.legend(frameon=False)
        parts.append(svg(figure))
    return [*parts, lost_map(meter)]


def lost_map(meter: Mapping[str, Any]) -> str:
    """Return which parameters stood still when, as a picture; nothing where none did."""
    shares = meter["map"]["lost"]
    if not any(share and share >= VISIBLE for row in shares for share in row):
        return ""
    title = f"{meter['optimizer']}, {meter['dtype']}: share of the updates that rounded to nothing"
    return heat_map(meter["map"]["parameters"], meter["steps"], shares, title, powers=False)


def _facts(report: dict[str, Any]) -> list[tuple[Any, ...]]:
    losses = [loss for _, loss in report["losses"]]
    seen = f"{float(losses[0]):.4g}, at the end {float(losses[-1]):.4g}" if losses else "not reported"
    optimizers = zip(names_of(report["optimizers"]), report["optimizers"], strict=True)
    return [
        ("steps", f"{report['steps']}, of which {report['skipped']} skipped"),
        *((("loss", f"at the start {seen}"),) if report["framework"] else ()),
        *((f"loss scale of {name}", scale_trace(optimizer)) for name, optimizer in optimizers),
    ]


def _draw_time(report: dict[str, Any]) -> str | None:
    seconds = report["seconds"]
    if not seconds:
        return None
    figure, axes = new_figure(1.6)
    left = 0.0
    for name, colour in zip(seconds, ("#009e73", "#0072b2", "#d55e00", "#cc79a7"), strict=False):
        axes.barh([0], [seconds[name]], left=left, color=colour, label=f"{name}: {seconds[name]:.2f} s")
        left += seconds[name]
    axes.set_yticks([])
    axes.set_xlabel("seconds on the host")
    axes.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return svg(figure)


def _draw_losses(report: dict[str, Any]) -> str | None:
    if not any(isinstance(loss, float) for _, loss in report["losses"]):
        return None
    figure, axes = new_figure(2.6)
    steps, losses = zip(*report["losses"], strict=True)
    curves = by_optimizer(steps, losses, report["losses_of"])
    whole = report["dtype"] or "not automated"
    draw_losses(axes, {name or whole: points for name, points in curves.items()})
    return svg(figure)


def _draw_scales(report: dict[str, Any]) -> str | None:
    named = zip(names_of(report["optimizers"]), report["optimizers"], strict=True)
    moving = {name: optimizer for name, optimizer in named if optimizer["scales"] or optimizer["skipped"]}
    if not moving:
        return None
    figure, axes = new_figure(3.0)
    for name, optimizer in moving.items():
        steps = [0, *(step for step, _ in optimizer["scales"]), optimizer["steps"]]
        scales = [optimizer["initial_scale"], *(scale for _, scale in optimizer["scales"])]
        axes.step(steps, [*scales, scales[-1]], where="post", label=name)
        for step in optimizer["skipped"]:
            axes.axvline(step, color=ALARM, linewidth=0.8, linestyle=":")
    axes.set_yscale("log", base=2)
    axes.set_xlabel("step; a dotted line is a skipped one")
    axes.legend(frameon=False)
    return svg(figure)


def _draw_ops(report: dict[str, Any]) -> str | None:
    names = list(dict.fromkeys(operation["op"] for operation in report["ops"]))[:10]
    if not names:
        return None
    figure, axes = new_figure(0.8 + 0.35 * len(names))
    left = dict.fromkeys(names, 0)
    labelled: set[str] = set()
    for operation in report["ops"]:
        if operation["op"] not in left:
            continue
        label = None if operation["dtype"] in labelled else operation["dtype"]
        labelled.add(operation["dtype"])
        colour = style_of(operation["dtype"])[0]
        axes.barh(
            [names.index(operation["op"])], [operation["count"]], left=left[operation["op"]], color=colour, label=label
        )
        left[operation["op"]] += operation["count"]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(f"times in the first {report['sampled_steps']} steps")
    axes.legend(frameon=False)
    return svg(figure)
