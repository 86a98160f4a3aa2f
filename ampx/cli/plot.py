"""The pictures of `ampx demo`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .demo import SCALED

SIZE = (12.0, 5.2)  # inches
DPI = 125
_ALARM = "#b30000"
# Legible to colour-blind readers, and in print by the line style.
_STYLES = {
    "float32": ("#4d4d4d", "-"),
    "float16": ("#0072b2", "-"),
    "bfloat16": ("#d55e00", "--"),
    SCALED: ("#009e73", "--"),
}


def draw(results: dict[str, Any], target: Path) -> None:
    """Draw the loss curves of all runs and the loss scale with its skipped steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, no global state
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    halves: Any = figure.subfigures(1, 2)
    left, right = halves
    losses = left.subplots()
    draw_losses(losses, results)
    panels = _draw_scales(right, results)
    for axes in (losses, *panels):
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    losses.set_xlabel("step")
    panels[-1].set_xlabel("step")
    figure.suptitle(
        f"ampx demo: handwritten digits, {results['framework']} on {results['runs'][0]['device']}", fontsize=14
    )
    figure.savefig(target, format="png")


def draw_losses(axes: Any, results: dict[str, Any]) -> None:
    """Draw the smoothed loss curve of every run."""
    window = max(1, len(results["runs"][0]["losses"]) // 40)
    named: set[str] = set()
    for run in results["runs"]:
        colour, line = _STYLES[run["label"]]
        label = None if run["label"] in named else run["label"]
        named.add(run["label"])
        axes.plot(_smooth(run["losses"], window), color=colour, linestyle=line, linewidth=1.6, label=label)
    axes.set_yscale("log")
    axes.set_ylabel("training loss")
    axes.set_title(f"Loss, mean of {window} steps" if window > 1 else "Loss")
    axes.legend(frameon=False)


def _draw_scales(figure: Any, results: dict[str, Any]) -> list[Any]:
    """Draw the runs of the first seed, a panel for scales that move and a low one for those that stay."""
    groups = _groups(results["runs"])
    heights = [3, 1] if len(groups) == 2 else [1]
    panels = list(figure.subplots(len(groups), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])
    for axes, group in zip(panels, groups, strict=True):
        for run in group:
            draw_scale(axes, run)
        set_powers(axes, [scale for run in group for scale in run["scales"]])
        axes.legend(frameon=False, loc="upper left")
        axes.set_ylabel("loss scale" if axes is panels[0] else "")
    panels[0].set_title("Loss scale")
    if results["overflow_at"] is not None:
        _mark_overflow(panels, results["overflow_at"])
    return panels


def _groups(runs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the runs of the first seed in low precision, or all of it: those whose scale moves, and the others."""
    runs = [run for run in runs if run["seed"] == runs[0]["seed"]]
    runs = [run for run in runs if run["label"] != "float32"] or runs
    moving = [run for run in runs if len(set(run["scales"])) > 1]
    return [group for group in (moving, [run for run in runs if run not in moving]) if group]


def _mark_overflow(panels: Sequence[Any], step: int) -> None:
    for axes in panels:
        axes.axvline(step, color=_ALARM, linewidth=0.9, linestyle=":", zorder=0)
    panels[0].annotate(
        "overflow injected",
        (step, 0.03),
        xycoords=("data", "axes fraction"),
        xytext=(6, 0),
        textcoords="offset points",
        color=_ALARM,
    )


def draw_scale(axes: Any, run: dict[str, Any]) -> None:
    """Draw the loss scale of one run, and mark its skipped steps."""
    colour, line = _STYLES[run["label"]]
    steps = range(len(run["scales"]))
    static = len(set(run["scales"])) == 1 and run["label"] != SCALED
    label = run["label"] + (" (static)" if static else "")
    axes.step(steps, run["scales"], where="post", color=colour, linestyle=line, linewidth=1.8, label=label)
    if run["skipped"]:
        heights = [run["scales"][step] for step in run["skipped"]]
        axes.plot(
            run["skipped"],
            heights,
            "x",
            color=_ALARM,
            markersize=9,
            markeredgewidth=2.2,
            label="skipped step",
            zorder=3,
        )


def set_powers(axes: Any, scales: list[float]) -> None:
    """Label every power of two that occurs, and leave room above for the legend."""
    low, high = math.floor(math.log2(min(scales))), math.ceil(math.log2(max(scales)))
    axes.set_yscale("log", base=2)
    axes.set_yticks([2.0**power for power in range(low, high + 1, max(1, (high - low) // 8))])
    axes.minorticks_off()
    axes.set_ylim(2.0 ** (low - 0.6), 2.0 ** (high + max(1.0, (high - low) * 0.5)))


def _smooth(values: list[float], window: int) -> list[float]:
    """Return the mean of each value and the up to `window - 1` before it."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [
        (sums[end] - sums[max(0, end - window)]) / (end - max(0, end - window)) for end in range(1, len(values) + 1)
    ]


HEIGHT, WIDTH = 6.2, 3.7  # inches; the width is one framework's


def draw_all(reports: Sequence[dict[str, Any]], target: Path) -> None:
    """Draw a column for each framework: the loss curves above, the loss scale below, on common axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, no global state
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH * len(reports) + 1.0, HEIGHT), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(2, len(reports), sharex="col", sharey="row", squeeze=False, height_ratios=[3, 2])
    every_scale = [scale for report in reports for run in report["runs"] for scale in run["scales"]]
    for (above, below), report in zip(panels.T, reports, strict=True):
        draw_losses(above, report)
        above.set_title(f"{report['framework']} on {report['runs'][0]['device']}")
        for run in report["runs"]:
            if run["seed"] == report["runs"][0]["seed"] and run["label"] != "float32":
                draw_scale(below, run)
        set_powers(below, every_scale)
        below.set_xlabel("step")
        lines, labels = below.get_legend_handles_labels()
        once = dict(zip(labels, lines, strict=True))  # skipped steps of all runs look the same
        below.legend(once.values(), once.keys(), frameon=False, loc="center left", fontsize="small")
        for axes in (above, below):
            axes.grid(alpha=0.25, linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[:, 1:].ravel():
        axes.set_ylabel("")
    panels[1, 0].set_ylabel("loss scale")
    figure.suptitle("ampx demo: handwritten digits in every framework", fontsize=14)
    figure.savefig(target, format="png")
