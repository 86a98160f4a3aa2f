"""The table of what is tested, made from files: what tests showed, and what `make gpu` showed on a GPU.

No framework is needed: frameworks do not coexist, and the table is about all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ampx.cli.capability_table import FACTS
from ampx.cli.frameworks import KNOWN
from evidence import ASPECTS, COMBINATIONS, WORDS, Evidence

GPU: Final = "tested on GPU"
# Every word of the table that says how something was shown, from the most to the least.
_SHOWN: Final = (GPU, *WORDS)
_NO: Final = "not supported"
# What an opt level leaves out by its definition, in whatever framework.
_BY_LEVEL: Final[dict[tuple[str, str], str]] = {
    ("O0", "casting"): "O0 computes in float32.",
    **{(level, "master weights"): f"{level} keeps parameters in float32: they need no copy." for level in ("O0", "O1")},
    ("O3", "master weights"): "O3 is low precision throughout: O2 is the level with float32 copies.",
}


@dataclass(frozen=True)
class Row:
    """One combination: the status of every aspect, and where one is not supported the reason."""

    framework: str
    device: str
    dtype: str
    level: str
    statuses: dict[str, str]
    reasons: dict[str, str]

    @property
    def supported(self) -> bool:
        """Whether anything is."""
        return set(self.statuses.values()) != {_NO}


def read_all(folder: Path) -> dict[str, Evidence]:
    """Read the file of every framework, the known ones first."""
    order = list(KNOWN)
    names = sorted(path.stem for path in folder.glob("*.json"))
    names.sort(key=lambda name: order.index(name) if name in order else len(order))
    return {name: Evidence.read(folder / f"{name}.json") for name in names}


def read_gpu(folder: Path) -> dict[str, set[str]]:
    """Gather, by framework, the cells shown by checks of `make gpu` that passed on a CUDA device."""
    shown: dict[str, set[str]] = {}
    for path in sorted(folder.glob("gpu-*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["device"] != "cuda":
            continue
        for check in content["checks"]:
            if check["status"] == "pass":
                shown.setdefault(check["framework"], set()).update(check["covers"])
    return shown


def make_rows(framework: str, evidence: Evidence, gpu: Iterable[str] = ()) -> list[Row]:
    """Return every combination of one framework's devices, dtypes and levels."""
    shown: dict[str, str] = {cell: word for word, cell in reversed(evidence.cells())}  # the strongest word comes last
    shown.update(dict.fromkeys(gpu, GPU))
    # A mode that is not a device of its own, such as static graphs, is known by its tests and refusals only.
    cells = sorted(cell for cell in {*shown, *evidence.refused} if "/" in cell)
    devices = dict.fromkeys([*evidence.declared["devices"], *(cell.split("/")[0] for cell in cells)])
    rows = []
    for device in devices:
        for dtype, level in COMBINATIONS:
            asked = f"{device}/{dtype}/{level}/"
            if device in evidence.declared["devices"] or any(f"{cell}/".startswith(asked) for cell in cells):
                rows.append(_make_row(framework, evidence, shown, device, dtype, level))
    return rows


def _make_row(framework: str, evidence: Evidence, shown: Mapping[str, str], device: str, dtype: str, level: str) -> Row:
    statuses, reasons = {}, {}
    for aspect in ASPECTS:
        status = shown.get(f"{device}/{dtype}/{level}/{aspect}")
        reason = None if status else _why_not(framework, evidence, device, dtype, level, aspect)
        statuses[aspect] = status or (_NO if reason else "declared")
        if reason:
            reasons[aspect] = reason
    return Row(framework, device, dtype, level, statuses, reasons)


def _why_not(framework: str, evidence: Evidence, device: str, dtype: str, level: str, aspect: str) -> str | None:
    """Return the reason why something is not supported: the backend's own words, or the definition of the level."""
    declared, asked = evidence.declared, f"{device}/{dtype}/{level}"
    for cell in (f"{asked}/{aspect}", asked):
        if cell in evidence.refused:
            return evidence.refused[cell]
    if level not in declared["levels"] or (dtype != "float32" and dtype not in declared["dtypes"]):
        # No device has it, so what one of them said holds for all.
        return next(message for name, message in evidence.refused.items() if name.endswith(f"/{dtype}/{level}"))
    if (level, aspect) in _BY_LEVEL:
        return _BY_LEVEL[level, aspect]
    if device not in declared["devices"]:
        return f"nothing is declared for {device}: what is there is tested."
    if aspect == "distributed" and aspect not in FACTS.get(framework, ()):
        return evidence.refused.get(aspect, f"{framework} trains in one process.")
    return None


def reasons_table(rows: Iterable[Row]) -> str:
    """Return one line for each reason of a device, and what is not supported for it; without what levels leave out."""
    refused: dict[tuple[str, str, str], dict[tuple[str, str], list[str]]] = {}
    for row in rows:
        for reason in dict.fromkeys(row.reasons.values()):
            aspects = [aspect for aspect in ASPECTS if row.reasons.get(aspect) == reason]
            what = "" if len(aspects) == len(ASPECTS) else f", {' and '.join(aspects)}"
            if reason not in _BY_LEVEL.values():
                levels = refused.setdefault((row.framework, row.device, reason), {}).setdefault((row.dtype, what), [])
                levels.append(row.level)
    lines = [_line("framework", "device", "not supported", "why"), _line(*["---"] * 4)]
    for (framework, device, reason), cells in refused.items():
        parts = [f"{dtype} {_listed(levels)}{what}" for (dtype, what), levels in cells.items()]
        why, *_ = " ".join(reason.split()).split(" Choose ")  # an error also says what to do
        lines.append(_line(framework, device, "; ".join(parts), why))
    return "\n".join(lines)


def compact_table(rows: Iterable[Row]) -> str:
    """Return one line for each device: for every aspect the levels at which it is shown as most are, or how else."""
    by_device: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.supported:
            by_device.setdefault((row.framework, row.device), []).append(row)
    lines = [_line("framework", "device", "dtypes", "shown", *ASPECTS), _line(*["---"] * (4 + len(ASPECTS)))]
    for (framework, device), rows_of_device in by_device.items():
        dtypes = list(dict.fromkeys(row.dtype for row in rows_of_device if row.dtype != "float32"))
        cells = [_levels(rows_of_device, dtypes, aspect) for aspect in ASPECTS]
        words = [status for levels in cells for status in levels]
        usual = max((*_SHOWN, "declared"), key=words.count)
        lines.append(
            _line(framework, device, ", ".join(dtypes) or "none", usual, *(_summary(levels, usual) for levels in cells))
        )
    return "\n".join(lines)


def _levels(rows: list[Row], dtypes: list[str], aspect: str) -> dict[str, list[str]]:
    """Return the levels at which an aspect has each status that says that it is there."""
    levels_of = {}
    for status in (*_SHOWN, "declared"):
        matching = [row for row in rows if row.statuses[aspect] == status]
        levels = []
        for level in dict.fromkeys(row.level for row in matching):
            having = [row.dtype for row in matching if row.level == level]
            whole = level == "O0" or set(having) == set(dtypes)
            levels += [level] if whole else [f"{dtype} {level}" for dtype in having]
        if levels:
            levels_of[status] = levels
    return levels_of


def _summary(levels_of: Mapping[str, list[str]], usual: str) -> str:
    parts = [f"{'' if status == usual else f'{status}: '}{_listed(levels)}" for status, levels in levels_of.items()]
    return "; ".join(parts) or "no"


def _listed(levels: list[str]) -> str:
    """Return the levels with commas, and a row of three or more as a range."""
    return f"{levels[0]}–{levels[-1]}" if " ".join(levels) in "O0 O1 O2 O3" and len(levels) > 2 else ", ".join(levels)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
