"""Check ampx on a CUDA device: correctness, syncs, kernels, speed. Needs the framework and pluggy, nothing else.

    PYTHONPATH=.:backends python3 benchmarks/gpu.py

Prints a table and writes it, with the machine described, as JSON. Exit code 0: all passed; 1: a check failed;
2: there is no CUDA device and nothing was run. `--device cpu` runs what makes sense there, to try the script out.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import pathlib
import re
import sys
import time
import warnings

from _gpu_checks import Outcome, Setup, describe_host, run_check, show

import ampx

# Framework → the module with its CHECKS and what they COVER, its describe(device) and its has(device), and its plugin.
FRAMEWORKS: dict[str, tuple[str, str]] = {
    "torch": ("_gpu_torch", "ampx_torch"),
    "paddle": ("_gpu_paddle", "ampx_paddle"),
    "jax": ("_gpu_jax", "ampx_jax"),
    "mxnet": ("_gpu_mxnet", "ampx_mxnet"),
    "tensorflow": ("_gpu_tensorflow", "ampx_tensorflow"),
}


def register(framework: str, plugin: str) -> None:
    """Make the backend known where it is not installed: an installed one registers through its entry point."""
    if framework not in ampx.backends():
        ampx.register_plugin(importlib.import_module(plugin), framework)


def main(arguments: list[str]) -> int:
    """Run every check of every framework that can be imported."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny sizes; times are measured but not judged")
    parser.add_argument("--only", default="", metavar="REGEX", help="only the checks whose name matches")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="where the JSON goes")
    options = parser.parse_args(arguments)
    setup = Setup(options.device, options.quick)
    # A check that needs a warning to be an error says so itself.
    warnings.simplefilter("ignore")

    outcomes: list[Outcome] = []
    machine = describe_host()
    for framework, (module, plugin) in FRAMEWORKS.items():
        if importlib.util.find_spec(framework) is None:
            print(f"{framework}: not installed")
            continue
        checks = importlib.import_module(module)
        if not checks.has(setup.device):
            print(f"{framework}: no {setup.device.upper()} device")
            continue
        register(framework, plugin)
        machine[framework] = checks.describe(setup.device)
        print(f"{framework}: {json.dumps(machine[framework])}", flush=True)
        gc.collect()
        gc.freeze()  # what the framework made for good: each measurement collects garbage first
        for check in checks.CHECKS:
            if re.search(options.only, check.__name__):
                outcomes.append(run_check(framework, check, setup, checks.COVERS.get(check.__name__, ())))
                show(outcomes[-1])
                ampx.shutdown()
    if not any(framework in machine for framework in FRAMEWORKS):
        print(f"no {setup.device.upper()} device: nothing was run")
        return 2
    failed = [outcome for outcome in outcomes if outcome.status in ("FAIL", "ERROR")]
    counts = {
        status: sum(outcome.status == status for outcome in outcomes)
        for status in ("pass", "FAIL", "ERROR", "not here")
    }
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    target = options.out or default_target(setup, machine)
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine,
            "device": setup.device,
            "quick": setup.quick,
            "counts": counts,
            "checks": [outcome.to_json() for outcome in outcomes],
        }
        target.write_text(json.dumps(content, indent=1) + "\n")
        print(f"written: {target}")
    return 1 if failed else 0


def default_target(setup: Setup, machine: dict[str, object]) -> pathlib.Path | None:
    """Return the file for full runs on a GPU; others are written only where --out says so."""
    if not setup.on_gpu or setup.quick:
        return None
    names = [str(facts["name"]) for facts in machine.values() if isinstance(facts, dict) and "name" in facts]
    label = re.sub(r"[^a-z0-9]+", "-", (names or ["unknown"])[0].lower()).strip("-")
    return pathlib.Path(__file__).with_name("results") / f"gpu-{label}.json"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
