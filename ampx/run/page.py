"""The page of a report: one HTML file that opens offline, with its pictures inside and every name escaped."""

from __future__ import annotations

import html
import io
import math
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

ALARM: Final = "#b30000"
MOST_ROWS: Final = 60  # of a heat map
_LONGEST: Final = 48  # label
# Legible to colour-blind readers, and in print by the line style.
STYLES: Final[Mapping[str, tuple[str, str]]] = {
    "float32": ("#4d4d4d", "-"),
    "float16": ("#0072b2", "-"),
    "bfloat16": ("#d55e00", "--"),
    "float64": ("#999999", "-"),
}
_OTHERS: Final = (("#009e73", "-"), ("#cc79a7", "--"), ("#56b4e9", "-"), ("#e69f00", "--"))
_STYLE: Final = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222;
  overflow-wrap: anywhere }  /* the path of a script has no spaces */
table { border-collapse: collapse } td, th { padding: .2rem .8rem .2rem 0; text-align: left }
td.number { text-align: right; font-variant-numeric: tabular-nums }
pre { background: #f4f4f4; padding: .8rem; overflow-x: auto } svg { max-width: 100%; height: auto }
p.verdict { font-size: 1.15em; font-weight: 600 } footer { color: #666; font-size: .85em; margin-top: 2rem }
"""


def document(title: str, parts: Iterable[str], origin: Mapping[str, Any] | None = None) -> str:
    """Return the whole page.

    Args:
        title: What heads it; escaped here.
        parts: HTML, of the functions below.
        origin: What `origin` returned, for the last lines.
    """
    foot = "" if origin is None else f"<footer>{html.escape(_origin_line(origin))}</footer>\n"
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>{html.escape(title)}</h1>\n{body}\n{foot}</body></html>\n"
    )


def origin(versions: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return versions, machine and date, for the end of a report."""
    import platform

    import ampx
    from ampx.cli.machine import describe_cpu, describe_gpus

    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "platform": platform.platform(),
        "cpu": describe_cpu()["name"],
        "gpus": [gpu["name"] for gpu in describe_gpus()],
        "versions": {"python": platform.python_version(), "ampx": ampx.__version__, **(versions or {})},
    }


def framework_versions(framework: str | None) -> dict[str, str]:
    """Return the versions of the packages of a framework, as they are installed."""
    from importlib import metadata

    from ampx.plugins import default_registry

    versions: dict[str, str] = {}
    for root in default_registry().registration(framework).roots if framework else ():
        with suppress(metadata.PackageNotFoundError):
            versions[root] = metadata.version(root)
    return versions


def _origin_line(origin: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
    machine = ", ".join([origin["cpu"], *origin["gpus"], origin["platform"]])
    return f"{origin['date']} · {machine} · {versions}"


def paragraph(text: str, verdict: bool = False) -> str:
    """Return a paragraph; with `verdict` in larger letters."""
    return f'<p class="verdict">{html.escape(text)}</p>' if verdict else f"<p>{html.escape(text)}</p>"


def heading(text: str) -> str:
    """Return a heading of the second order."""
    return f"<h2>{html.escape(text)}</h2>"


def code(lines: Sequence[str]) -> str:
    """Return lines of code, or of a file."""
    return f"<pre>{html.escape(chr(10).join(lines))}</pre>"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table; numbers stand to the right."""
    titles = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><tr>{titles}</tr>{body}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f'<td class="number">{value if isinstance(value, int) else f"{value:.4g}"}</td>'
    return f"<td>{html.escape(str(value))}</td>"


# -- pictures --------------------------------------------------------------------------------------


def new_figure(height: float) -> tuple[Any, Any]:
    """Return a figure as wide as the page, and its axes."""
    from matplotlib.figure import Figure  # no display, no global state

    figure = Figure(figsize=(9.0, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def svg(figure: Any) -> str:
    """Return a figure as a part of a page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def style_of(name: str, position: int = 0) -> tuple[str, str]:
    """Return colour and line style of a curve: the dtype's own, or others in turn."""
    return STYLES.get(name) or _OTHERS[position % len(_OTHERS)]


def draw_losses(axes: Any, losses: Mapping[str, Sequence[float | str | None]]) -> None:
    """Draw loss curves on each other, by name; a step without a loss, or with none that is finite, leaves a gap."""
    for position, (name, values) in enumerate(losses.items()):
        colour, line = style_of(name, position)
        heights = [value if isinstance(value, float) else math.nan for value in values]
        axes.plot(range(1, len(heights) + 1), heights, color=colour, linestyle=line, linewidth=1.4, label=name)
    finite = [value for values in losses.values() for value in values if isinstance(value, float)]
    if finite and min(finite) > 0 and max(finite) > 20 * min(finite):
        axes.set_yscale("log")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend(frameon=False)


def heat_map(
    rows: Sequence[str],
    columns: Sequence[Any],
    values: Sequence[Sequence[float | None]],
    title: str,
    limits: tuple[float | None, float | None] = (None, None),
    missing: str = "white",
) -> str:
    """Return a picture of layers by steps, dark where a number is large; the rows with the largest where all are many.

    Args:
        rows: Names of the layers.
        columns: Steps.
        values: A number for each row and column; None where there is none that is finite.
        title: What is drawn.
        limits: The numbers of the lightest and of the darkest colour; None for the least and the largest there is.
        missing: Colour where there is no number.
    """
    if not rows or not columns:
        return ""
    from matplotlib import colormaps

    numbers = [
        [value if isinstance(value, (int, float)) and math.isfinite(value) else math.nan for value in row]
        for row in values
    ]
    order = sorted(
        range(len(rows)), key=lambda row: -max((n for n in numbers[row] if not math.isnan(n)), default=-math.inf)
    )
    shown = sorted(order[:MOST_ROWS])
    figure, axes = new_figure(1.2 + 0.16 * max(5, len(shown)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of numbers that are all NaN
        image = axes.imshow(
            [numbers[row] for row in shown],
            aspect="auto",
            cmap=colormaps["magma_r"].with_extremes(bad=missing),
            interpolation="nearest",
            vmin=limits[0],
            vmax=limits[1],
        )
    axes.set_yticks(range(len(shown)), [_plain_label(rows[row]) for row in shown], fontsize=7)
    axes.set_xticks(range(len(columns)), [str(column) for column in columns])
    axes.set_xlabel("step")
    hidden = len(rows) - len(shown)
    axes.set_title(title + (f" ({hidden} rows with smaller numbers are left out)" if hidden else ""), fontsize=9)
    figure.colorbar(image, ax=axes)
    return svg(figure)


def _plain_label(name: str) -> str:
    """Return a name that matplotlib draws as it is: a dollar begins a formula."""
    name = name.replace("$", r"\$")
    return name if len(name) <= _LONGEST else f"…{name[-_LONGEST:]}"
