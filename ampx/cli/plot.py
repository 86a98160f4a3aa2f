"""The picture of `ampx demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZE = (12.0, 5.2)  # inches
DPI = 125
# Legible to colour-blind readers, and in print by the line style.
_STYLES = {"float32": ("#4d4d4d", "-"), "float16": ("#0072b2", "-"), "bfloat16": ("#d55e00", "--")}


def draw(found: dict[str, Any], target: Path) -> None:
    """Draw the loss curves of all runs and the loss scale with its skipped steps.

    Args:
        found: The report of `demo.report`.
        target: The PNG to write.

    Sync: none.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, no global state
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw_losses(left, found)
    _draw_scales(right, found)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"ampx demo: handwritten digits, {found['framework']} on {found['runs'][0]['device']}", fontsize=14)
    figure.savefig(target, format="png")


def _draw_losses(axes: Any, found: dict[str, Any]) -> None:
    window = max(1, len(found["runs"][0]["losses"]) // 40)
    named: set[str] = set()
    for run in found["runs"]:
        colour, line = _STYLES[run["dtype"]]
        label = None if run["dtype"] in named else run["dtype"]
        named.add(run["dtype"])
        axes.plot(_smooth(run["losses"], window), color=colour, linestyle=line, linewidth=1.6, label=label)
    axes.set_yscale("log")
    axes.set_ylabel("training loss")
    axes.set_title(f"Loss, mean of {window} steps" if window > 1 else "Loss")
    axes.legend(frameon=False)


def _draw_scales(axes: Any, found: dict[str, Any]) -> None:
    runs = [run for run in found["runs"] if run["dtype"] != "float32"] or found["runs"]
    first_seed = runs[0]["seed"]
    for run in (run for run in runs if run["seed"] == first_seed):
        colour, line = _STYLES[run["dtype"]]
        axes.step(
            range(len(run["scales"])),
            run["scales"],
            where="post",
            color=colour,
            linestyle=line,
            linewidth=1.8,
            label=run["dtype"],
        )
        skipped = run["skipped"]
        axes.plot(skipped, [run["scales"][step] for step in skipped], "x", color="#cc0000", markersize=9, mew=2.2)
    axes.plot([], [], "x", color="#cc0000", markersize=9, mew=2.2, label="skipped step")
    axes.set_yscale("log", base=2)
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom / 2, top * 2)
    if found["overflow_at"] is not None:
        axes.axvline(found["overflow_at"], color="#cc0000", linewidth=0.8, linestyle=":")
        axes.annotate(
            "overflow\ninjected",
            (found["overflow_at"], 0.5),
            xycoords=("data", "axes fraction"),
            xytext=(6, 0),
            textcoords="offset points",
            color="#cc0000",
            va="center",
        )
    axes.set_ylabel("loss scale")
    axes.set_title("Loss scale")
    axes.legend(frameon=False, loc="center right")


def _smooth(values: list[float], window: int) -> list[float]:
    """Give the mean of each value and the up to `window - 1` before it."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [
        (sums[end] - sums[max(0, end - window)]) / (end - max(0, end - window)) for end in range(1, len(values) + 1)
    ]
