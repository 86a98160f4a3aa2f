"""Two versions of ampx side by side: the time of a small training step, of `last_step`, and of `import ampx`.

`python benchmarks/versions.py FORMER` compares the ampx of this checkout with that of another, in every framework that
can be imported. Each version runs in a process of its own, and the two take turns. The model is as good as nothing, so
that what is timed is the cost of ampx's calls and of the framework's own smallest step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from _paired import Ratio, machine, paired
from hops import FRAMEWORKS
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parents[1]
IMPORT = "import time; start = time.process_time(); import ampx; print(time.process_time() - start)"


def environment(checkout: Path) -> dict[str, str]:
    """Return the environment in which Python imports ampx from a checkout."""
    paths = (checkout, checkout / "backends", HERE / "benchmarks")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}


class Worker:
    """A process that trains with one version of ampx, a number of steps at a time."""

    def __init__(self, checkout: Path, framework: str) -> None:
        """Start it; the framework is imported there."""
        command = [sys.executable, __file__, "--worker", framework, str(checkout)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, env=environment(checkout), text=True, bufsize=1, **pipes)

    def __enter__(self) -> Worker:
        """Wait for nothing: the first run does."""
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait(30)

    def run(self, part: str, times: int) -> None:
        """Run a part of a step a number of times."""
        self._process.stdin.write(f"{part} {times}\n")
        if self._process.stdout.readline() != "done\n":
            raise RuntimeError(f"the process with {self._process.args} ended")


def work(framework: str, checkout: str) -> None:
    """Be a worker: run what standard input asks for."""
    import ampx

    assert Path(ampx.__file__).is_relative_to(checkout), ampx.__file__
    parts = FRAMEWORKS[framework]()

    def step() -> None:
        parts.block()
        parts.step()

    functions: dict[str, Callable[[], object]] = {"step": parts.compiled or step, "last_step": parts.last_step}
    step()
    for line in sys.stdin:
        part, times = line.split()
        for _ in range(int(times)):
            functions[part]()
        print("done", flush=True)


def import_seconds(checkout: Path) -> float:
    """Return the processor time of `import ampx`, the least of some."""
    command = [sys.executable, "-c", IMPORT]
    options = {"env": environment(checkout), "capture_output": True, "text": True, "check": True}
    return min(float(subprocess.run(command, **options).stdout) for _ in range(9))


def compare(former: Path, framework: str, pairs: int) -> dict[str, Ratio]:
    """Return the ratios now/former for the parts of a step in one framework."""
    ratios = {}
    with Worker(HERE, framework) as new, Worker(former, framework) as old:
        for part in ("step", "last_step"):
            new.run(part, 20)  # the first of each waits for the import
            old.run(part, 20)
            started = time.perf_counter()
            old.run(part, 20)
            repeat = max(1, int(0.1 / ((time.perf_counter() - started) / 20)))
            ratios[part] = paired(
                lambda part=part, repeat=repeat: new.run(part, repeat),
                lambda part=part, repeat=repeat: old.run(part, repeat),
                pairs=pairs,
                warmup=3,
            )
            seconds = {"median_a": ratios[part].median_a / repeat, "median_b": ratios[part].median_b / repeat}
            ratios[part] = Ratio(**{**ratios[part].to_json(), **seconds})
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("former", type=Path, help="another checkout of ampx")
    parser.add_argument("--worker", metavar="FRAMEWORK", help=argparse.SUPPRESS)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    former = arguments.former.resolve()
    if not (former / "ampx" / "__init__.py").is_file():
        parser.error(f"{former} is no checkout of ampx")
    if arguments.worker:
        work(arguments.worker, str(former))
        return
    table = Table("framework", "part", "now, µs", "former, µs", "ratio", "middle half")
    rows = []
    seconds = [import_seconds(checkout) for checkout in (HERE, former)]
    measured = {}
    for framework in FRAMEWORKS:
        if find_spec(framework) is not None:
            measured[framework] = compare(former, framework, arguments.pairs)
    for framework, ratios in measured.items():
        for part, ratio in ratios.items():
            times = f"{ratio.median_a * 1e6:.1f}", f"{ratio.median_b * 1e6:.1f}"
            table.add_row(
                framework, part, *times, f"{ratio.ratio:.3f}", f"{ratio.ratio_low:.3f}–{ratio.ratio_high:.3f}"
            )
            rows.append({"framework": framework, "part": part, **ratio.to_json()})
    Console().print(table)
    Console().print(f"import ampx: {seconds[0] * 1e3:.1f} ms of processor time, former {seconds[1] * 1e3:.1f} ms")
    if arguments.out:
        arguments.out.write_text(json.dumps({"machine": machine(), "import_seconds": seconds, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
