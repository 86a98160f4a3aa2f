"""The picture of `ampx demo --all`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .plot import DPI, draw_losses, draw_scale, set_powers

HEIGHT, WIDTH = 6.2, 3.7  # inches; the width is one framework's


def draw_all(reports: Sequence[dict[str, Any]], target: Path) -> None:
    """Draw a column for each framework: the loss curves above, the loss scale below, on common axes.

    Args:
        reports: The reports of `demo.report`, one for each framework.
        target: The PNG to write.
    """
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
