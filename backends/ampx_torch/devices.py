"""What the devices of this machine compute, as torch tells it."""

from __future__ import annotations

from typing import Any

import torch

from ampx.backend import Device, choose_device
from ampx.policy import Dtype


def describe(name: str) -> Device:
    """Describe `"cuda"`, `"cpu"`, one with an index (`"cuda:1"`), or `"auto"`: the best present."""
    if name == "cpu":  # without waking CUDA's driver
        return _describe_cpu()
    index = choose_device(name, "torch", "cuda", torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if index is None:
        return _describe_cpu()
    return _describe_cuda(torch.cuda.current_device() if index < 0 else index)


def _describe_cpu() -> Device:
    # oneDNN says what its matrix kernels have instructions for; for bfloat16 it also says yes where it converts
    # to float32 on the way, so the instruction sets decide there.
    instructions = _instructions()
    native: set[Dtype] = set()
    if torch.ops.mkldnn._is_mkldnn_bf16_supported() and instructions["bfloat16"]:
        native.add("bfloat16")
    if torch.ops.mkldnn._is_mkldnn_fp16_supported() and instructions["float16"]:
        native.add("float16")
    names = ", ".join(instructions["bfloat16"]) if "bfloat16" in native else "none"
    return Device(
        name="cpu",
        native=frozenset(native),
        emulated=frozenset({"float16", "bfloat16"} - native),  # type: ignore[arg-type]
        preferred="bfloat16" if "bfloat16" in native else None,
        reason=f"this CPU computes bfloat16 natively ({names})"
        if "bfloat16" in native
        else "this CPU has no instructions for bfloat16",
        details={
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "bfloat16 instructions": instructions["bfloat16"],
            "float16 instructions": instructions["float16"],
        },
    )


def _instructions() -> dict[str, list[str]]:
    """List the instruction sets that compute in each dtype; empty where torch cannot tell."""
    flags: dict[str, Any] = {}
    tell = getattr(torch.cpu, "get_capabilities", None)  # torch 2.10 and later
    if tell is not None:
        flags = dict(tell())
    else:
        for flag, function in (
            ("avx512_bf16", "_is_avx512_bf16_supported"),
            ("amx_bf16", "_is_amx_tile_supported"),
            ("amx_fp16", "_is_amx_fp16_supported"),
        ):
            flags[flag] = getattr(torch.cpu, function, bool)()
        flags["avx512_fp16"] = torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return {
        "bfloat16": [
            flag for flag in ("amx_bf16", "avx512_bf16", "avx_ne_convert", "bf16", "sve_bf16") if flags.get(flag)
        ],
        "float16": [flag for flag in ("amx_fp16", "avx512_fp16", "fp16", "fp16_arith") if flags.get(flag)],
    }


def _describe_cuda(index: int) -> Device:
    major, minor = torch.cuda.get_device_capability(index)
    capability = (major, minor)
    native: set[Dtype] = {"float16"} if capability >= (5, 3) else set()
    if torch.cuda.is_bf16_supported(including_emulation=False):
        native.add("bfloat16")
    tensor_cores = capability >= (7, 0)
    label = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
    return Device(
        name="cuda",
        native=frozenset(native),
        emulated=frozenset(),
        preferred="float16" if tensor_cores else None,
        reason=f"{label}: {'Tensor Cores compute float16' if tensor_cores else 'no Tensor Cores (they start at 7.0)'}",
        details={
            "name": torch.cuda.get_device_name(index),
            "compute_capability": f"{major}.{minor}",
            "tensor_cores": tensor_cores,
            "tf32": capability >= (8, 0),
            "fp8": capability >= (8, 9),
            "memory_gib": round(torch.cuda.get_device_properties(index).total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        },
    )
