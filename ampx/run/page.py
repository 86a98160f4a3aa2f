"""The page of a report: one HTML file that opens offline, with its pictures inside and every name escaped."""

from __future__ import annotations

import html
import io
import math
import platform
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from itertools import chain, repeat
from typing import Any, Final, TypeVar

import ampx
from ampx.plugins import default_registry
from ampx.run.machine import describe_cpu, describe_gpus

Loss = TypeVar("Loss")
ALARM: Final = "#b30000"
MOST_ROWS: Final = 60  # of a heat map
_LONGEST: Final = 48  # label
_FEW_POINTS: Final = 50  # of a curve, which are marked
_FEW_COLUMNS: Final = 8  # of a heat map, whose numbers have room
# Legible to colour-blind readers, and in print by the line style.
STYLES: Final[Mapping[str, tuple[str, str]]] = {
    "float32": ("#4d4d4d", "-"),
    "float16": ("#0072b2", "-"),
    "bfloat16": ("#d55e00", "--"),
    "float64": ("#999999", "-"),
}
_OTHERS: Final = (("#009e73", "-"), ("#cc79a7", "--"), ("#56b4e9", "-"), ("#e69f00", "--"))
_STYLE: Final = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222;
  overflow-wrap: anywhere }  /* the path of a script has no spaces */
h1 { font-size: 1.4rem } h2 { font-size: 1.15rem; margin: 2.5rem 0 .8rem }
p.verdict { font-size: 1.1rem; font-weight: 600; background: #eef4f9; border-left: 4px solid #0072b2;
  padding: .7rem 1rem }
div { overflow-x: auto; margin: 1rem 0 } table { border-collapse: collapse; font-size: .9rem }
th, td { padding: .3rem 1.4rem .3rem 0; text-align: left; vertical-align: top; overflow-wrap: break-word;
  border-bottom: 1px solid #e4e4e4; font-variant-numeric: tabular-nums }
th { border-bottom-color: #999 } td.number { text-align: right }
pre { background: #f4f4f4; padding: .8rem 1rem; overflow-x: auto } svg { display: block; width: 100%; height: auto }
footer { color: #666; font-size: .85rem; margin-top: 3rem; border-top: 1px solid #e4e4e4; padding-top: .8rem }
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
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "platform": platform.platform(),
        "cpu": describe_cpu()["name"],
        "gpus": [gpu["name"] for gpu in describe_gpus()],
        "versions": {"python": platform.python_version(), "ampx": ampx.__version__, **(versions or {})},
    }


def framework_versions(framework: str | None) -> dict[str, str]:
    """Return the versions of the packages of a framework, as they are installed."""
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
    return f"<div><table>{f'<tr>{titles}</tr>' if head else ''}{body}</table></div>"


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


def by_optimizer(
    steps: Iterable[int], losses: Iterable[Loss | None], names: Iterable[str | None]
) -> dict[str, list[tuple[int, Loss]]]:
    """Return the points of step and loss of each optimizer, by its name; of "" where only one has losses.

    In adversarial training the losses of two optimizers take turns: as one curve they would be a saw.
    """
    curves: dict[str, list[tuple[int, Loss]]] = {}
    for step, loss, name in zip(steps, losses, chain(names, repeat(None)), strict=False):
        if loss is not None:
            curves.setdefault(name or "", []).append((step, loss))
    return curves if len(curves) > 1 else dict(zip([""], curves.values(), strict=False))


def draw_losses(axes: Any, losses: Mapping[str, Iterable[tuple[int, float | str]]]) -> None:
    """Draw curves of step and loss on each other, by name; a loss that is not finite is text, and a red line."""
    alarmed, lowest, highest = False, math.inf, 0.0
    for position, (name, points) in enumerate(losses.items()):
        colour, line = style_of(name, position)
        steps, heights = [], []
        for step, loss in points:
            steps.append(step)
            heights.append(loss if isinstance(loss, float) else math.nan)
            if isinstance(loss, str):
                alarmed = True
                axes.axvline(step, color=ALARM, linewidth=0.8)
        finite = [height for height in heights if not math.isnan(height)]
        lowest, highest = min([lowest, *finite]), max([highest, *finite])
        marker = "." if len(finite) < _FEW_POINTS else ""
        axes.plot(steps, heights, color=colour, linestyle=line, marker=marker, linewidth=1.4, label=name)
    if 0 < 20 * lowest < highest:
        axes.set_yscale("log")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("step; a red line is a loss that is not finite" if alarmed else "step")
    axes.set_ylabel("loss")
    axes.legend(frameon=False)


def heat_map(
    rows: Sequence[str],
    columns: Sequence[Any],
    values: Sequence[Sequence[float | None]],
    title: str,
    *,
    powers: bool = True,
    missing: str = "white",
) -> str:
    """Return a picture of layers by steps, dark where a number is large; the rows with the largest where all are many.

    Args:
        rows: Names of the layers.
        columns: Steps.
        values: A number for each row and column; None where there is none that is finite.
        title: What is drawn.
        powers: Colours are powers of ten; else shares, from 0 to 1.
        missing: Colour where there is no number.
    """
    if not rows or not columns:
        return ""
    from matplotlib import colormaps

    numbers = [[value if isinstance(value, (int, float)) else math.nan for value in row] for row in values]
    shown = _largest_rows(numbers)
    numbers = [numbers[row] for row in shown]
    low, high = _exponents(numbers) if powers else (0.0, 1.0)
    heights = [[math.log10(max(n, 10**low)) if powers else n for n in row] for row in numbers]
    figure, axes = new_figure(1.2 + 0.17 * max(5, len(shown)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of numbers that are all NaN
        image = axes.imshow(
            heights,
            aspect="auto",
            cmap=colormaps["magma_r"].with_extremes(bad=missing),
            interpolation="nearest",
            vmin=low,
            vmax=high,
        )
    if len(columns) <= _FEW_COLUMNS:
        _annotate(axes, numbers, heights, (low + high) / 2, ".2g" if powers else ".0%")
    axes.set_yticks(range(len(shown)), [plain_label(rows[row]) for row in shown], fontsize=7)
    axes.set_xticks(range(len(columns)), [str(column) for column in columns])
    axes.set_xlabel("step")
    hidden = len(rows) - len(shown)
    axes.set_title(title + (f" ({hidden} rows with smaller numbers are left out)" if hidden else ""), fontsize=9)
    figure.colorbar(image, ax=axes, label="power of ten" if powers else "share")
    return svg(figure)


def _largest_rows(numbers: list[list[float]]) -> list[int]:
    """Return the positions of the rows with the largest numbers, in their order."""
    order = sorted(range(len(numbers)), key=lambda row: -max([0.0, *(n for n in numbers[row] if not math.isnan(n))]))
    return sorted(order[:MOST_ROWS])


def _annotate(axes: Any, numbers: list[list[float]], heights: list[list[float]], middle: float, form: str) -> None:
    """Write the numbers into their fields, light in dark ones."""
    for place, row in enumerate(numbers):
        for column, number in enumerate(row):
            if not math.isnan(number):
                colour = "white" if heights[place][column] > middle else "black"
                axes.text(column, place, format(number, form), color=colour, fontsize=6.5, ha="center", va="center")


def _exponents(numbers: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the powers of ten of the lightest and the darkest colour; zeros are as light as the smallest number."""
    exponents = [math.log10(n) for row in numbers for n in row if n > 0] or [0.0]
    middle, half = (min(exponents) + max(exponents)) / 2, (max(exponents) - min(exponents)) / 2
    half = max(1.0, half)  # two powers at least, so that less is no alarm
    return middle - half, middle + half


def plain_label(name: str) -> str:
    """Return a name that matplotlib draws as it is: a dollar begins a formula."""
    name = name.replace("$", r"\$")
    return name if len(name) <= _LONGEST else f"…{name[-_LONGEST:]}"
