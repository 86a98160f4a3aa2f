"""Check ampx on a CUDA device: correctness, syncs, kernels, speed. Needs the framework and pluggy, nothing else.

    PYTHONPATH=.:backends python3 benchmarks/gpu.py --minutes 8

Runs what proves most first: the checks of every framework in tiny sizes, then the tests marked `gpu`, where pytest and
hypothesis are there, then in full size what measures. Each framework runs in a process of its own. Prints a table, and
writes it, with the machine described, as JSON after every check. Exit code 0: all passed; 1: a check failed; 2: there
is no CUDA device and nothing was run. `--device cpu` runs what makes sense there, to try the script out, and
`--device simulated` runs PyTorch, PaddlePaddle and MXNet on the devices that their tests simulate.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import warnings

from _gpu_checks import Outcome, Report, Setup, describe_host, run_check, show
from _gpu_tests import run_tests

import ampx

ROOT = pathlib.Path(__file__).parents[1]
# Framework → the module with its CHECKS, what they COVER, those that are MEASURED and those that are NOT_SIMULATED, its
# describe(device) and its has(device), and its plugin.
FRAMEWORKS: dict[str, tuple[str, str]] = {
    "torch": ("_gpu_torch", "ampx_torch"),
    "jax": ("_gpu_jax", "ampx_jax"),
    "tensorflow": ("_gpu_tensorflow", "ampx_tensorflow"),
    "paddle": ("_gpu_paddle", "ampx_paddle"),
    "mxnet": ("_gpu_mxnet", "ampx_mxnet"),
}
# Framework → the module of `tests/kit` that simulates its device.
SIMULATED = {"torch": "simulated_cuda", "paddle": "simulated_paddle", "mxnet": "simulated_mxnet"}
STAGES = ("quick", "tests", "full")
NOTHING_RUN = 2
AGAIN = 3  # a check broke: another process goes on, since a GPU that has failed a process may fail all that it asks
# A check that takes longer hangs: it is ended with its process, and a new one goes on with the next check.
SECONDS = {"quick": 120.0, "full": 300.0}


def main(arguments: list[str]) -> int:
    """Run the stages, each for every framework, or for one in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu", "simulated"))
    parser.add_argument("--framework", choices=tuple(FRAMEWORKS), help="this one alone, in this process")
    parser.add_argument("--quick", action="store_true", help="only the first stage: tiny sizes, times are not judged")
    parser.add_argument("--stages", default=",".join(STAGES), help="some of %(default)s")
    parser.add_argument("--minutes", type=float, help="start nothing more after so long")
    parser.add_argument("--only", default="", metavar="REGEX", help="only the checks and tests whose name matches")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="where the JSON goes")
    parser.add_argument("--part", choices=("first", "later"), help="of a run of several processes; later ones add")
    options = parser.parse_args(arguments)
    # JAX takes most of a GPU's memory when it starts, which other processes then lack.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    stages = [stage for stage in STAGES if stage in ("quick" if options.quick else options.stages).split(",")]
    # A CPU has no tests marked gpu, and nothing that is judged in full size.
    stages = stages if options.device != "cpu" else [stage for stage in stages if stage == "quick"]
    deadline = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    target = options.out or default_target(options.device, stages)
    with tempfile.TemporaryDirectory() as folder:
        # Processes tell each other by the file, even where none is wanted.
        report = Report(target or pathlib.Path(folder, "gpu.json"), options.device, append=options.part == "later")
        if options.framework:
            again = options.part is not None and options.device == "cuda"
            ran = run_framework(options.framework, stages, report, options.only, deadline, again)
        else:
            ran = run_all(options, stages, report, deadline)
    if not ran:
        if options.part is None:
            print(f"no {options.device.upper()} device: nothing was run")
        return NOTHING_RUN
    if options.part is None:
        print(", ".join(f"{count} {status}" for status, count in report.counts().items()))
        if target is not None:
            print(f"written: {target}")
    return 1 if report.failed() else 0


def run_all(options: argparse.Namespace, stages: list[str], report: Report, deadline: float) -> bool:
    """Run every stage of every framework, each in a process of its own; return whether one had the device."""
    installed = [framework for framework in FRAMEWORKS if importlib.util.find_spec(framework)]
    for framework in FRAMEWORKS:
        if framework not in installed:
            print(f"{framework}: not installed")
    present, started = list(installed), time.time()
    for stage in stages:
        for framework in list(present):
            while True:
                left = (deadline - time.monotonic()) / 60
                command = [sys.executable, __file__, "--device", options.device, "--framework", framework]
                command += ["--stages", stage, "--only", options.only, "--out", str(report.path)]
                command += ["--part", "later" if report.checks else "first"]
                command += [] if options.minutes is None else ["--minutes", str(max(left, 1e-9))]
                sys.stdout.flush()
                code = subprocess.run(command, check=False).returncode
                if report.path.exists() and report.path.stat().st_mtime >= started:  # else it is of a former run
                    report.read()
                unended = report.unended()
                if code == AGAIN:
                    continue
                if unended is None:
                    break
                # It hung, or took the process with it: the next process goes on behind it.
                ended = Outcome(**{**unended, "line": f"{unended['line']}: its process ended with {code}"})
                report.add(ended)
                show(ended)
            if code == NOTHING_RUN:
                present.remove(framework)
            elif code not in (0, 1):
                ended = Outcome(framework, f"the process of stage {stage}", "ERROR", f"ended with {code}", 0.0, [])
                report.add(ended)
                show(ended)
    return bool(present)


def run_framework(
    framework: str, stages: list[str], report: Report, only: str, deadline: float, again: bool = False
) -> bool:
    """Run the stages of one framework in this process; return whether it has the device.

    With `again` the process ends after a check that broke, and what it leaves is for the next one.
    """
    simulated = report.device == "simulated"
    device = "cuda" if simulated else report.device
    if simulated and not simulate(framework):
        return False
    module, plugin = FRAMEWORKS[framework]
    try:
        checks = importlib.import_module(module)
    except ModuleNotFoundError as error:
        print(f"{framework}: needs {error.name}, which is not installed")
        return False
    if not checks.has(device):
        print(f"{framework}: no {device.upper()} device")
        return False
    if framework not in ampx.backends():  # where it is installed, it registers through its entry point
        ampx.register_plugin(importlib.import_module(plugin), framework)
    report.machine[framework] = checks.describe(device)
    print(f"{framework}: {json.dumps(report.machine[framework])}", flush=True)
    # A check that needs a warning to be an error says so itself.
    warnings.simplefilter("ignore")
    gc.collect()
    gc.freeze()  # what the framework made for good: each measurement collects garbage first
    for stage in stages:
        if stage == "tests":
            for outcome in run_tests(ROOT, framework, plugin, only, simulated, deadline):
                report.add(outcome)
            continue
        setup = Setup(device, quick=stage == "quick")
        for check in checks.CHECKS if setup.quick else checks.MEASURED:
            if re.search(only, check.__name__):
                covers = checks.COVERS.get(check.__name__, ())
                begun = Outcome(framework, check.__name__, "", "", 0.0, [], quick=setup.quick)
                if report.has(begun):
                    continue
                missing = checks.NOT_SIMULATED.get(check.__name__) if simulated else None
                if missing:
                    outcome = Outcome(framework, check.__name__, "not here", f"needs {missing}", 0.0, [])
                else:
                    report.begin(begun)
                    # A check that has begun has half a minute beyond the deadline of the run.
                    left = max(deadline - time.monotonic(), 0) + 30
                    faulthandler.dump_traceback_later(min(SECONDS[stage], left), exit=True)
                    outcome = run_check(framework, check, setup, covers, deadline)
                    faulthandler.cancel_dump_traceback_later()
                report.add(outcome)
                show(outcome)
                if again and outcome.status == "ERROR":
                    sys.exit(AGAIN)
                ampx.shutdown()
    return True


def simulate(framework: str) -> bool:
    """Put the simulated device of a framework in place; return whether it is there."""
    if framework not in SIMULATED:
        print(f"{framework}: there is no simulated device")
        return False
    sys.path.append(str(ROOT / "tests" / "kit"))
    from compiled import CannotSimulateError

    try:
        importlib.import_module(SIMULATED[framework]).start(ROOT / ".pytest_cache" / "simulated-cuda")
    except CannotSimulateError as reason:
        print(f"{framework}: {reason}")
        return False
    return True


def default_target(device: str, stages: list[str]) -> pathlib.Path | None:
    """Return the file for full runs on a GPU; others are written only where --out says so."""
    if device != "cuda" or "full" not in stages:
        return None
    label = re.sub(r"[^a-z0-9]+", "-", str(describe_host()["gpu"]).lower()).strip("-")
    return pathlib.Path(__file__).with_name("results") / f"gpu-{label}.json"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
