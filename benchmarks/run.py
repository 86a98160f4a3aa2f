"""Run one framework's benchmarks, write one JSON and print its tables. `QUICK=1` or `--quick` for a short run.

`--report` makes the manual's tables and plots from the JSON files that are committed under `results/`, and measures
nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from pathlib import Path

import report
from _paired import machine
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

RESULTS = Path(__file__).parent / "results"
PARTS = {
    "torch": (
        "optimizer_phase",
        "whole_step",
        "keras_on_torch",
        "run_speed",
        "dtype_speed",
        "tuned_torch",
        "meter_cost",
        "convergence",
        "memory",
        "call_cost",
        "debuggers_torch",
    ),
    "jax": ("jax_step", "tuned_jax", "meter_cost_jax", "debuggers_jax"),
    "paddle": ("paddle_step", "meter_cost_paddle", "debuggers_paddle"),
    "tensorflow": ("tensorflow_step", "tuned_tensorflow", "meter_cost_tensorflow", "debuggers_tensorflow"),
    "mxnet": ("mxnet_step", "tuned_mxnet", "meter_cost_mxnet"),
}
"""The modules to run, each with `run(quick, advance)` and the number of its measurements, `STEPS`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", choices=PARTS, default="torch")
    parser.add_argument("--quick", action="store_true", default=bool(os.environ.get("QUICK")))
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts to run; by default all of the framework's")
    parser.add_argument("--out", type=Path, help="file to write; by default one named after the time of the run")
    parser.add_argument("--report", action="store_true", help="remake the manual's tables and plots, measure nothing")
    arguments = parser.parse_args()
    console = Console()
    if arguments.report:
        for path in report.write(RESULTS):
            console.print(f"written: {path}")
        return
    _one_thread(arguments.framework)
    parts = {name: importlib.import_module(name) for name in arguments.only or PARTS[arguments.framework]}
    results: dict[str, object] = {
        "framework": arguments.framework,
        "machine": {**machine(), "threads": 1, **_versions()},
        "quick": arguments.quick,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for name, part in parts.items():
            task = progress.add_task(name, total=part.STEPS)
            started = time.perf_counter()
            results[name] = part.run(arguments.quick, lambda task=task: progress.advance(task))
            progress.update(task, completed=part.STEPS)
            results.setdefault("seconds", {})[name] = round(time.perf_counter() - started, 1)  # type: ignore[attr-defined]
    out = arguments.out or RESULTS / f"cpu-{time.strftime('%Y%m%d-%H%M%S')}-{arguments.framework}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    for table in report.tables(results):
        console.print(table.rich())
    console.print(f"written to {out}")


def _one_thread(framework: str) -> None:
    # One thread: the other cores keep the rest of the machine out of the timing.
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        os.environ.setdefault(variable, "1")
    if framework == "torch":
        import torch

        torch.set_num_threads(1)


def _versions() -> dict[str, str]:
    from importlib.metadata import distributions

    shown = {
        "accelerate", "flax", "jax", "jaxlib", "jmp", "keras", "lightning-fabric", "mxnet", "numpy", "optax",
        "mixed-precision-nanny", "paddlepaddle", "tensorflow-cpu", "tensorflow", "tf-keras", "torch", "transformers",
    }  # fmt: skip
    versions = {each.metadata["Name"].lower().replace("_", "-"): each.version for each in distributions()}
    return {name: versions[name] for name in sorted(shown & versions.keys())}


if __name__ == "__main__":
    main()
