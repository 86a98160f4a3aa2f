"""What the devices of this machine compute, as far as MXNet and the operating system tell."""

from __future__ import annotations

import os
from typing import Final

from ampx.backend import Device, choose_device, cpu_flags
from ampx.policy import Dtype

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
    instructions, obstacle = [flag for flag in _NATIVE if flag in cpu_flags()], _obstacle()
    native = emulated = frozenset[Dtype]()
    if obstacle is not None:
        reason = f"MXNet has no bfloat16 kernels {obstacle}"
    elif instructions:
        native, reason = frozenset({"bfloat16"}), f"this CPU computes bfloat16 natively ({', '.join(instructions)})"
    else:
        emulated, reason = frozenset({"bfloat16"}), "this CPU has no instructions for bfloat16"
    return Device(
        name="cpu",
        native=native,
        emulated=emulated,
        preferred="bfloat16" if native else None,
        # Errors of MXNet are asynchronous: without this refusal, training in float16 would fail steps later.
        reason=f"{reason}; MXNet has no float16 matrix kernels on any CPU",
        details={"version": mx.__version__, "instructions": instructions},
    )


def _obstacle() -> str | None:
    """Return what keeps MXNet from bfloat16 on the CPU; None where nothing does."""
    limit = os.environ.get("DNNL_MAX_CPU_ISA")
    if limit in _TOO_WEAK:
        return f"where DNNL_MAX_CPU_ISA={limit}"
    if not has_onednn():
        return "without oneDNN (MXNET_MKLDNN_ENABLED=0, or a build without it)"
    return None if _NEEDED in cpu_flags() else "for this CPU"


def _describe_gpu() -> Device:
    return Device(
        name="gpu",
        native=frozenset({"float16"}),
        preferred="float16",
        reason="MXNet computes float16 on NVIDIA GPUs; it does not tell whether this one has Tensor Cores",
        details={"version": mx.__version__},
    )
