"""What the devices of this machine compute, as TensorFlow tells it."""

from __future__ import annotations

import os
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.util import _pywrap_util_port

from ampx.backend import Device, choose_device, cpu_flags
from ampx.policy import Dtype

_BOTH: Final[frozenset[Dtype]] = frozenset({"float16", "bfloat16"})
# What ONEDNN_MAX_CPU_ISA may say such that oneDNN has no kernel for bfloat16, or one that computes in float32.
_NO_BFLOAT16: Final = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"})
_SLOW_BFLOAT16: Final = frozenset({"AVX512_CORE", "AVX512_CORE_VNNI"})


def describe(name: str) -> Device:
    """Describe a device."""
    gpus = tf.config.list_physical_devices("GPU")
    index = choose_device(name, "TensorFlow", "gpu", len(gpus))
    return _describe_cpu() if index is None else _describe_gpu(gpus[max(index, 0)])


def _describe_cpu() -> Device:
    details = {"version": tf.__version__}
    flags, uses_onednn = cpu_flags(), bool(_pywrap_util_port.IsMklEnabled())
    limit = (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "").upper()
    if uses_onednn and limit in _NO_BFLOAT16 and "avx512f" in flags:
        # Native defect: TensorFlow asks the CPU, not oneDNN, and the missing kernel ends the process.
        usable: frozenset[Dtype] = frozenset() if flags & {"avx512_fp16", "amx_fp16"} else frozenset({"float16"})
        reason = (
            f"ONEDNN_MAX_CPU_ISA={limit} takes oneDNN's kernels for bfloat16 away, without which TensorFlow ends the "
            f"process on this CPU; unset it, or set TF_ENABLE_ONEDNN_OPTS=0"
        )
        return Device("cpu", emulated=usable, reason=reason, details=details)
    if uses_onednn and limit not in _SLOW_BFLOAT16 and flags & {"avx512_bf16", "amx_bf16"}:
        native: frozenset[Dtype] = frozenset({"bfloat16"})
        reason = "this CPU has instructions for bfloat16, which TensorFlow uses"
        return Device("cpu", native, _BOTH - native, preferred="bfloat16", reason=reason, details=details)
    reason = "TensorFlow computes low precision on this CPU, but not faster than float32"
    return Device("cpu", emulated=_BOTH, reason=reason, details=details)


def _describe_gpu(device: Any) -> Device:
    facts = tf.config.experimental.get_device_details(device)
    capability = tuple(facts.get("compute_capability", (0, 0)))
    label = f"{facts.get('device_name', device.name)}, compute capability {'.'.join(map(str, capability))}"
    details = {"name": facts.get("device_name"), "compute_capability": capability, "version": tf.__version__}
    if capability >= (8, 0):
        return Device(
            "gpu", _BOTH, preferred="float16", reason=f"{label}: Tensor Cores compute float16", details=details
        )
    if capability >= (7, 0):
        native: frozenset[Dtype] = frozenset({"float16"})
        reason = f"{label}: Tensor Cores compute float16"
        return Device("gpu", native, _BOTH - native, preferred="float16", reason=reason, details=details)
    reason = f"{label}: no Tensor Cores (they start at 7.0)"
    return Device("gpu", emulated=_BOTH, reason=reason, details=details)
