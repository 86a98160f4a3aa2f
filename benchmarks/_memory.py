"""What a step takes of the process's memory, as the system counts it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def peak(function: Callable[[], object], before: Callable[[], object] | None = None, runs: int = 3) -> float | None:
    """Return the most memory in MiB that the process holds in a call, beyond what it holds between two calls.

    Memory that was freed is given back to the system first, so that it counts when it is taken again. That leaves out
    what a library keeps in a pool of its own between calls.

    Args:
        function: What is measured.
        before: Runs before each call, not counted.
        runs: Calls; the largest counts.

    Returns:
        MiB; None where the system does not tell: not on Linux, and in some containers.
    """
    processes = []
    for _ in range(runs):
        if before is not None:
            before()
        gc.collect()
        _give_back()
        try:
            _CLEAR.write_text("5")  # from here on counts what the process holds at most
            held = resident("VmRSS")
            resident("VmHWM")
        except (OSError, StopIteration):
            return None
        function()
        processes.append(resident("VmHWM") - held)
    return max(*processes, 0.0)


def resident(key: str) -> float:
    """Return a line of the process's status, such as VmRSS or VmHWM, in MiB."""
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) / 1024


def _give_back() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
