"""What the machine offers, whatever the frameworks make of it."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

# Instructions that compute in low precision, by the kernel's names for them.
_CPU_FLAGS = {
    "avx512_fp16": "float16",
    "amx_fp16": "float16 (AMX)",
    "avx512_bf16": "bfloat16",
    "avx_ne_convert": "bfloat16 conversion",
    "amx_bf16": "bfloat16 (AMX)",
    "asimdhp": "float16",
    "bf16": "bfloat16",
}
_QUERY = ("name", "compute_cap", "memory.total", "driver_version")


def describe_machine() -> dict[str, Any]:
    """Return Python, platform, CPU and NVIDIA GPUs."""
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cpu": describe_cpu(),
        "gpus": describe_gpus(),
    }


def describe_cpu(info: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Return the CPU's name and its instructions for low precision; None where the system does not tell them."""
    try:
        lines = info.read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return {"name": platform.processor() or platform.machine(), "instructions": None}
    facts = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set(facts.get("flags", facts.get("features", "")).split())
    return {
        "name": facts.get("model name", platform.machine()),
        "instructions": {flag: meaning for flag, meaning in _CPU_FLAGS.items() if flag in flags},
    }


def describe_gpus() -> list[dict[str, Any]]:
    """List the NVIDIA GPUs that the driver shows, with what their Tensor Cores compute."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines()]
    return [
        {
            "name": name,
            "compute_capability": capability,
            "memory": memory,
            "driver": driver,
            "tensor_cores": tensor_core_dtypes(capability),
        }
        for name, capability, memory, driver in (row for row in rows if len(row) == len(_QUERY))
    ]


def tensor_core_dtypes(capability: str) -> list[str]:
    """Name what Tensor Cores compute at a compute capability such as `"8.0"`."""
    try:
        major, minor = (int(part) for part in capability.split("."))
    except ValueError:
        return []
    since = {"float16": (7, 0), "bfloat16": (8, 0), "TF32": (8, 0), "FP8": (8, 9)}
    return [dtype for dtype, first in since.items() if (major, minor) >= first]
