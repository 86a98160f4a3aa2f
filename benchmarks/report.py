"""Tables and plots of benchmark results, for the terminal and for the manual, made from the JSON and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable

DOCS = Path(__file__).parents[1] / "docs" / "reference" / "benchmarks"
Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]


@dataclass(frozen=True)
class Table:
    """One table: a title, columns and rows of text; the first `words` columns hold words, the others numbers."""

    part: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int

    def rich(self) -> RichTable:
        """Return the table for the terminal."""
        table = RichTable(title=self.title)
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="left" if number < self.words else "right")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """Return the table for the manual; beside numbers a word that stands in all rows is said once, above them."""
        rule = ["---" if number < self.words else "---:" for number in range(len(self.columns))]
        words = range(self.words if len(self.rows) > 1 and self.words < len(self.columns) else 0)
        same = [number for number in words if len({row[number] for row in self.rows}) == 1]
        said = f"{'; '.join(f'{self.columns[number]}: {self.rows[0][number]}' for number in same)}.\n\n" if same else ""
        kept = [number for number in range(len(self.columns)) if number not in same]
        lines = ["| " + " | ".join(line[number] for number in kept) + " |" for line in (self.columns, rule, *self.rows)]
        return said + "\n".join(lines) + "\n"


def _text(key: str) -> Callable[[Row], str]:
    return lambda row: str(row[key])


def _number(key: str, form: str) -> Callable[[Row], str]:
    return lambda row: format(row[key], form)


def _time(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row[key] * 1e3:,.2f} ms" if row[key] < 1 else f"{row[key]:.1f} s"


def _peak(key: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(key) is None else f"{row[key]:.1f} MiB"


def _spread(row: Row) -> str:
    return f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}"


def _paired(*words: Column, other: str = "the other") -> tuple[Column, ...]:
    """Return the columns of a paired comparison, after some that say what was compared."""
    times = (("ampx", _time("median_a")), (other, _time("median_b")))
    return (*words, *times, ("ratio", _number("ratio", ".3f")), ("middle half", _spread))


_AGAINST: Column = ("against", _text("against"))
_WORKLOAD: Column = ("workload", _text("workload"))
_DTYPE: Column = ("dtype", _text("dtype"))
_STEP = (
    *_paired(_AGAINST, _WORKLOAD, _DTYPE),
    ("memory, ampx", _peak("peak_a")),
    ("memory, the other", _peak("peak_b")),
)


def _of(key: str, total: str) -> Callable[[Row], str]:
    return lambda row: row.get("missing", f"{row[key]} of {row[total]}" if key in row else "")


def _cost(row: Row) -> str:
    if "ratio" not in row:
        return ""
    return f"{row['ratio']:.0f} steps, once" if row["once"] else f"{row['ratio']:.2f}"


_DEBUGGERS: tuple[Column, ...] = (
    ("tool", _text("tool")),
    ("notices", _of("noticed", "faults")),
    ("names the place", lambda row: "" if "missing" in row else _of("places", "faults")(row)),
    ("names the kind", lambda row: "" if "missing" in row else _of("kinds", "faults")(row)),
    ("accuses clean models", lambda row: "" if "missing" in row else _of("accused", "clean")(row)),
    ("time of a step, without = 1", _cost),
    ("middle half", lambda row: _spread(row) if "ratio" in row and not row["once"] else ""),
)


def _faults(**tools: str) -> tuple[Column, ...]:
    """Return the columns of what each tool named: title and key by tool."""
    named = ((title, lambda row, key=key: str(row.get(key, "not installed"))) for title, key in tools.items())
    return (("fault", _text("fault")), ("planted", _text("planted")), ("ampx", _text("ampx.diagnose")), *named)


def _range(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row[key][0]:.2f} ({row[key][1]:.2f} to {row[key][2]:.2f})"


def _share(row: Row, key: str) -> str:
    return f"{100 * (row[key] - 1) / row['every']:.2f} %"


_METER: tuple[Column, ...] = (
    _WORKLOAD,
    ("a step it looks at", _time("median_a")),
    ("any other", _time("median_b")),
    ("of all steps", lambda row: f"{100 * row['share']:.2f} %"),
    ("middle half", lambda row: f"{_share(row, 'ratio_low')} to {_share(row, 'ratio_high')}"),
)

_PARTS: tuple[Column, ...] = (
    ("part", _text("part")),
    ("ampx", lambda row: f"{row['seconds_a'] * 1e6:.0f} µs"),
    ("GradScaler", lambda row: f"{row['seconds_b'] * 1e6:.0f} µs"),
    ("more", lambda row: f"{(row['seconds_a'] - row['seconds_b']) * 1e6:.0f} µs"),
)

_TUNED: tuple[Column, ...] = (
    _WORKLOAD,
    ("tuned", _text("tuned")),
    _AGAINST,
    ("tuned step", _time("median_a")),
    ("the other", _time("median_b")),
    ("ratio", _number("ratio", ".3f")),
    ("middle half", _spread),
)

_WITH_METER: tuple[Column, ...] = (
    ("with the meter", _time("median_a")),
    ("without", _time("median_b")),
    ("of all steps", lambda row: f"{100 * row['share']:.2f} %"),
    ("middle half", lambda row: f"{100 * row['ratio_low'] - 100:.2f} % to {100 * row['ratio_high'] - 100:.2f} %"),
)

_MEMORY = ("parameters", "gradients", "master weights", "optimizer state", "peak")

LAYOUT: dict[str, tuple[str, int, tuple[Column, ...]]] = {
    # part: title, number of columns of words, columns
    "optimizer_phase": (
        "the optimizer phase alone: ampx against GradScaler",
        2,
        _paired(
            ("optimizer", _text("optimizer")),
            ("clipped", lambda row: "yes" if row["clipped"] else "no"),
            ("threads", lambda row: str(row.get("threads", 1))),
            ("tensors", _number("tensors", ",")),
            ("elements", _number("elements", ",")),
            other="GradScaler",
        ),
    ),
    "whole_step": ("one training step in PyTorch: ampx against other recipes", 3, _STEP),
    "keras_on_torch": ("one training step: ampx in PyTorch against Keras 3 on torch", 3, _STEP),
    "jax_step": ("one training step in JAX: ampx against other recipes", 3, _STEP),
    "paddle_step": ("one training step in PaddlePaddle: ampx against other recipes", 3, _STEP),
    "tensorflow_step": ("one training step in TensorFlow and Keras: ampx against other recipes", 3, _STEP),
    "mxnet_step": ("one training step in MXNet: ampx against other recipes", 3, _STEP),
    "step_parts_torch": ("where the time of the small perceptron's step goes in PyTorch", 1, _PARTS),
    "step_parts_paddle": ("where the time of the smallest step goes in PaddlePaddle", 1, _PARTS),
    "run_speed": (
        "one training step of an unedited script: ampx run against the same loop edited by hand",
        2,
        _paired(_WORKLOAD, _DTYPE, other="by hand"),
    ),
    "dtype_speed": (
        "one training step: a 16-bit dtype through ampx against plain float32",
        2,
        (
            _WORKLOAD,
            _DTYPE,
            ("16 bit", _time("median_a")),
            ("float32", _time("median_b")),
            ("steps per second, float32 = 1", lambda row: f"{1 / row['ratio']:.2f}"),
            ("middle half", lambda row: f"{1 / row['ratio_high']:.2f} to {1 / row['ratio_low']:.2f}"),
        ),
    ),
    "tuned_torch": ("one training step in PyTorch: what ampx.tune decides", 3, _TUNED),
    "tuned_jax": ("one training step in JAX: what ampx.tune decides", 3, _TUNED),
    "tuned_tensorflow": ("one training step in TensorFlow and Keras: what ampx.tune decides", 3, _TUNED),
    "tuned_mxnet": ("one training step in MXNet: what ampx.tune decides", 3, _TUNED),
    "meter_cost": ("what the meter takes of the time of all steps, PyTorch", 1, _METER),
    "meter_cost_mxnet": ("what the meter takes of the time of all steps, MXNet", 1, _METER),
    "meter_cost_paddle": ("what the meter takes of the time of all steps, PaddlePaddle", 1, _METER),
    "meter_cost_jax": (
        "what the meter takes of compiled steps in JAX, where it looks",
        1,
        (_WORKLOAD, *_WITH_METER, ("two builds without", lambda row: f"{100 * row['twice']:.2f} %")),
    ),
    "meter_cost_tensorflow": (
        "what the meter takes of functions of TensorFlow, where it was asked for",
        2,
        (_WORKLOAD, ("trained by", _text("way")), *_WITH_METER),
    ),
    "convergence": (
        "training to the same quality (medians over the seeds)",
        2,
        (
            ("task", _text("task")),
            _DTYPE,
            ("time", _time("seconds")),
            ("steps", _number("steps", ".0f")),
            ("quality at the end", _number("quality", ".3f")),
            ("time, float32 = 1", _number("ratio", ".2f")),
            ("over the seeds", _spread),
        ),
    ),
    "memory": (
        "memory by level, AdamW, 8 layers of 1024, batch 256, bfloat16 (MiB)",
        1,
        (("level", _text("level")), *((name, _number(name, ".0f")) for name in _MEMORY)),
    ),
    "call_cost": (
        "time that an import adds to a bare interpreter",
        1,
        (("import", _text("import")), ("median", _time("seconds"))),
    ),
    "diagnose_cost": (
        "what a command costs: median ratio of processor time, least and largest",
        2,
        (
            ("command", _text("command")),
            ("what is wrong with the script", _text("wrong")),
            ("runs of the script", _number("runs", ".0f")),
            ("of the plain script", _range("plain")),
            ("of the same under ampx run", _range("run")),
        ),
    ),
    "debuggers_torch": ("who finds a planted fault in PyTorch, and what it costs", 1, _DEBUGGERS),
    "debuggers_torch:fault": (
        "what each names of a planted fault in PyTorch",
        6,
        _faults(
            DebugUnderflowOverflow="Hugging Face's DebugUnderflowOverflow",
            set_detect_anomaly="torch.autograd.set_detect_anomaly",
            mixed_precision_nanny="mixed-precision-nanny",
        ),
    ),
    "debuggers_tensorflow": ("who finds a planted fault in TensorFlow, and what it costs", 1, _DEBUGGERS),
    "debuggers_tensorflow:fault": (
        "what each names of a planted fault in TensorFlow",
        4,
        _faults(enable_check_numerics="tf.debugging.enable_check_numerics"),
    ),
    "debuggers_jax": ("who finds a planted fault in JAX, and what it costs", 1, _DEBUGGERS),
    "debuggers_jax:fault": (
        "what each names of a planted fault in JAX",
        4,
        _faults(jax_debug_nans="jax_debug_nans, jax_debug_infs"),
    ),
    "debuggers_paddle": ("who finds a planted fault in PaddlePaddle, and what it costs", 1, _DEBUGGERS),
    "debuggers_paddle:fault": (
        "what each names of a planted fault in PaddlePaddle",
        4,
        _faults(**{"tensor checker": "the tensor checker of paddle.amp.debugging"}),
    ),
    "call_cost:calls": (
        "the calls of one step where there is nothing to compute",
        1,
        _paired(("calls", _text("calls")), other="GradScaler"),
    ),
}


def tables(results: dict[str, Any]) -> Iterator[Table]:
    """Return the tables of one run."""
    for name, (title, words, columns) in LAYOUT.items():
        part, _, kind = name.partition(":")
        rows = [row for row in results.get(part, ()) if "left_out" not in row and _kind(row) == kind]
        if rows:
            cells = tuple(tuple(cell(row) for _, cell in columns) for row in rows)
            yield Table(name.replace(":", "_"), title, tuple(name for name, _ in columns), cells, words)


def _kind(row: Row) -> str:
    return next((kind for kind in ("calls", "fault") if kind in row), "")


def described(results: dict[str, Any]) -> str:
    """Return on what a run was made, and of which commit, in one line."""
    machine = results["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in sorted(machine.keys() - _NOT_PACKAGES))
    where = f"{machine['processor']}, {machine['threads']} thread, Python {machine['python']}"
    commit = f", commit {results['commit']}" if results.get("commit") else ""
    return f"{where}, {versions}; {results['time'][:10]}{commit}"


_NOT_PACKAGES = {"processor", "system", "python", "threads", "features"}


def pages(results: Path) -> dict[str, str]:
    """Return the manual's tables: file name and text, from the committed runs, the newest of each part."""
    texts: dict[str, str] = {}
    for path, run in _runs(results):
        for table in tables(run):
            texts[f"{table.part}.md"] = f"{table.markdown()}\n*{described(run)}. File: `{path.name}`.*\n"
    return texts


def _runs(results: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return the committed runs that count and their files, the oldest first."""
    runs = [(path, json.loads(path.read_text())) for path in results.glob("*.json")]
    counted = [(path, run) for path, run in runs if "framework" in run and not run["quick"]]
    return sorted(counted, key=lambda each: each[1].get("time", ""))


def write(results: Path) -> list[Path]:
    """Write the manual's tables and plots; gives the files written."""
    DOCS.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in pages(results).items():
        (DOCS / name).write_text(text)
        written.append(DOCS / name)
    return written + plots(results)


def plots(results: Path) -> list[Path]:
    """Draw the ratios of the committed runs."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    parts = {part: rows for _, run in _runs(results) for part, rows in run.items() if isinstance(rows, list)}
    written = []
    if steps := [row for part in parts if part.endswith("_step") for row in parts[part] if "ratio" in row]:
        figure, axes = pyplot.subplots(figsize=(9, 0.28 * len(steps) + 1), layout="constrained")
        for place, row in enumerate(reversed(steps)):
            axes.plot([row["ratio_low"], row["ratio_high"]], [place, place], color="tab:blue", linewidth=2, alpha=0.5)
            axes.plot(row["ratio"], place, "o", color="tab:blue", markersize=4)
        axes.axvline(1, color="black", linewidth=0.8)
        names = [f"{row['against']}: {row['workload']}" for row in reversed(steps)]
        axes.set_yticks(range(len(steps)), names, fontsize=7)
        axes.set_xlabel("time of one step, ampx / other\n(median and middle half; left of 1: ampx is faster)")
        written.append(_save(figure, "steps.png"))
    if phase := [row for row in parts.get("optimizer_phase", ()) if row.get("threads", 1) == 1]:
        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        for name, clipped in sorted({(row["optimizer"], row["clipped"]) for row in phase}):
            line = sorted(
                (row["elements"], row["ratio"])
                for row in phase
                if (row["optimizer"], row["clipped"]) == (name, clipped)
            )
            axes.plot(*zip(*line, strict=True), "o" if clipped else "s", label=f"{name}{', clipped' * clipped}")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xlabel("elements of all parameters")
        axes.set_ylabel("optimizer phase, ampx / GradScaler")
        axes.legend()
        written.append(_save(figure, "optimizer_phase.png"))
    return written


def _save(figure: Any, name: str) -> Path:
    figure.savefig(DOCS / name, dpi=72, metadata={"Software": None})
    return DOCS / name
