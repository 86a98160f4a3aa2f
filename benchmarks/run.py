"""Run the benchmarks, write one JSON per run and print its tables. `QUICK=1` or `--quick` for a short run."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import call_cost
import step_cost
import torch
from _paired import machine
from rich.console import Console
from rich.progress import track
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", default=bool(os.environ.get("QUICK")))
    parser.add_argument("--out", type=Path, help="file to write; by default one named after the time of the run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # one thread: the other cores keep the rest of the machine out of the timing
    console = Console()
    results: dict[str, object] = {
        "machine": {**machine(), "torch": torch.__version__, "threads": torch.get_num_threads()},
        "quick": arguments.quick,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }
    parts = {"step_cost": step_cost.run, "call_cost": call_cost.run}
    for name in track(parts, description="benchmarks", console=console):
        results[name] = parts[name](arguments.quick)
    out = arguments.out or RESULTS / f"cpu-{time.strftime('%Y%m%d-%H%M%S')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=2) + "\n")
    show(console, results)
    console.print(f"written to {out}")


def show(console: Console, results: dict[str, object]) -> None:
    """Print the tables of one run."""
    table = Table(title="one training step: ampx against the recipe by hand (paired, one thread)")
    for column in ("by hand", "workload", "optimizer", "dtype"):
        table.add_column(column)
    for column in ("ampx", "by hand", "ratio", "middle half"):
        table.add_column(column, justify="right")
    for row in results["step_cost"]:  # type: ignore[attr-defined]
        table.add_row(
            row["native"],
            row["workload"],
            row["optimizer"],
            row["dtype"],
            f"{row['median_a'] * 1e6:.0f} us",
            f"{row['median_b'] * 1e6:.0f} us",
            f"{row['ratio']:.3f}",
            f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}",
        )
    console.print(table)
    imports = Table(title="time that an import adds to a bare interpreter")
    imports.add_column("import")
    imports.add_column("median", justify="right")
    for row in results["call_cost"]:  # type: ignore[attr-defined]
        imports.add_row(row["import"], f"{row['seconds'] * 1e3:.1f} ms")
    console.print(imports)


if __name__ == "__main__":
    main()
