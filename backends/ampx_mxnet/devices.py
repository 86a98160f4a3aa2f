"""What the devices of this machine compute, as far as MXNet and the operating system tell."""

from __future__ import annotations

import os
from typing import Final

from ampx.backend import Device, choose_device, cpu_flags

from .compat import mx

# What oneDNN, on which MXNet computes on the CPU, has bfloat16 instructions for; and what it needs at least.
_NATIVE: Final = ("avx512_bf16", "amx_bf16")
_NEEDED: Final = "avx512bw"
# What DNNL_MAX_CPU_ISA may say such that MXNet's oneDNN does without it.
_TOO_WEAK: Final = frozenset(("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_MIC", "AVX512_MIC_4OPS"))


def has_onednn() -> bool:
    """Return whether oneDNN computes on the CPU."""
    on = os.environ.get("MXNET_MKLDNN_ENABLED", "1").lower() not in ("0", "false")
    return on and bool(mx.runtime.Features().is_enabled("MKLDNN"))


def describe(name: str) -> Device:
    """Describe a device."""
    return _describe_cpu() if choose_device(name, "mxnet", "gpu", mx.context.num_gpus()) is None else _describe_gpu()


def _describe_cpu() -> Device:
    flags = cpu_flags()
    instructions = [flag for flag in _NATIVE if flag in flags]
    limit = os.environ.get("DNNL_MAX_CPU_ISA")
    works = has_onednn() and _NEEDED in flags and limit not in _TOO_WEAK
    native = works and bool(instructions)
    reason = f"this CPU computes bfloat16 natively ({', '.join(instructions)})"
    if limit in _TOO_WEAK:
        reason = f"MXNet has no bfloat16 kernels where DNNL_MAX_CPU_ISA={limit}"
    elif not has_onednn():
        reason = "MXNet has no bfloat16 kernels without oneDNN (MXNET_MKLDNN_ENABLED=0, or a build without it)"
    elif not native:
        reason = "this CPU has no instructions for bfloat16" if works else "MXNet has no bfloat16 kernels for this CPU"
    return Device(
        name="cpu",
        native=frozenset({"bfloat16"}) if native else frozenset(),
        emulated=frozenset({"bfloat16"}) if works and not native else frozenset(),
        preferred="bfloat16" if native else None,
        # Errors of MXNet are asynchronous: without this refusal, training in float16 would fail steps later.
        reason=f"{reason}; MXNet has no float16 matrix kernels on any CPU",
        details={"version": mx.__version__, "instructions": instructions},
    )


def _describe_gpu() -> Device:
    return Device(
        name="gpu",
        native=frozenset({"float16"}),
        preferred="float16",
        reason="MXNet computes float16 on NVIDIA GPUs; it does not tell whether this one has Tensor Cores",
        details={"version": mx.__version__},
    )
