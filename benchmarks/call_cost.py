"""What importing ampx costs, and what its calls cost beside torch's."""

from __future__ import annotations

import statistics
import subprocess
import sys

_IMPORT = "import time; s = time.perf_counter(); import {module}; print(time.perf_counter() - s)"


def import_time(module: str, runs: int) -> float:
    """Give the median seconds that `import module` adds to a bare interpreter."""
    command = [sys.executable, "-c", _IMPORT.format(module=module)]
    times = [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(runs)]
    return statistics.median(times)


def run(quick: bool) -> list[dict[str, object]]:
    """Measure the imports a user of ampx waits for."""
    runs = 5 if quick else 21
    return [
        {"import": module, "seconds": import_time(module, runs)} for module in ("ampx", "ampx.api", "pluggy", "torch")
    ]


if __name__ == "__main__":
    for row in run("--quick" in sys.argv):
        print(f"import {row['import']:10} {float(str(row['seconds'])) * 1e3:8.1f} ms")
