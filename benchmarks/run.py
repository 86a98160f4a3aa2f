"""Run one framework's benchmarks, write one JSON and print its tables. `QUICK=1` or `--quick` for a short run.

`TINY=1` or `--tiny` runs each part once in its smallest form and keeps no number: it shows that they run. A part that
fails keeps no other from running; its traceback is printed, and the exit status is 1.

`--report` makes the manual's tables and plots from the JSON files that are committed under `results/`, and measures
nothing.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _paired
import report
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

RESULTS = Path(__file__).parent / "results"
PARTS = {
    "torch": (
        "optimizer_phase",
        "whole_step",
        "step_parts_torch",
        "keras_on_torch",
        "run_speed",
        "dtype_speed",
        "tuned_torch",
        "meter_cost",
        "convergence",
        "memory",
        "call_cost",
        "diagnose_cost",
        "debuggers_torch",
    ),
    "jax": ("jax_step", "tuned_jax", "meter_cost_jax", "debuggers_jax"),
    "paddle": ("paddle_step", "step_parts_paddle", "meter_cost_paddle", "debuggers_paddle"),
    "tensorflow": ("tensorflow_step", "tuned_tensorflow", "meter_cost_tensorflow", "debuggers_tensorflow"),
    "mxnet": ("mxnet_step", "tuned_mxnet", "meter_cost_mxnet"),
}
"""The modules to run, each with `run(quick, advance)` and the number of its measurements, `STEPS`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", choices=PARTS, default="torch")
    parser.add_argument("--quick", action="store_true", default=bool(os.environ.get("QUICK")))
    parser.add_argument("--tiny", action="store_true", default=bool(os.environ.get("TINY")))
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
    if arguments.tiny:
        os.environ["TINY"], _paired.shortest = "1", True
    out = arguments.out or RESULTS / f"cpu-{time.strftime('%Y%m%d-%H%M%S')}-{arguments.framework}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    seconds: dict[str, float] = {}
    results: dict[str, object] = {
        "framework": arguments.framework,
        "machine": {**_paired.machine(), "threads": 1, **_versions()},
        "quick": arguments.quick or arguments.tiny,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "commit": _commit(),
        "seconds": seconds,
    }
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:

        def attempt(name: str, do: Callable[[], Any]) -> Any:
            try:
                return do()
            except Exception:
                failed.append(name)
                console.print(traceback.format_exc(), markup=False, highlight=False)
                return None

        names = arguments.only or PARTS[arguments.framework]
        # All at once: some set the environment in which another is imported.
        parts = {name: attempt(name, functools.partial(importlib.import_module, name)) for name in names}
        for name, part in parts.items():
            if part is None:
                continue
            task = progress.add_task(name, total=part.STEPS)
            started = time.perf_counter()
            advance = functools.partial(progress.advance, task)
            rows = attempt(name, functools.partial(part.run, results["quick"], advance))
            if rows is not None:
                results[name] = rows
                progress.update(task, completed=part.STEPS)
                seconds[name] = round(time.perf_counter() - started, 1)
                if not arguments.tiny:  # after each part: a run that is ended later keeps what it measured
                    out.write_text(json.dumps(results, indent=1) + "\n")
    for table in report.tables(results):
        console.print(table.rich())
    if not arguments.tiny:
        console.print(f"written to {out}")
    console.print(f"ran, in seconds: {', '.join(f'{name} {taken}' for name, taken in seconds.items()) or 'nothing'}")
    if failed:
        console.print(f"failed: {', '.join(failed)}")
    sys.exit(bool(failed))


def _commit() -> str:
    """Return the commit that is measured; with "+" where files differ from it, empty outside of a clone."""
    asked = ["git", "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=8"]
    done = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()


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
