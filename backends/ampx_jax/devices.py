"""What JAX computes natively, device by device."""

from __future__ import annotations

import jax

import ampx
from ampx.backend import Device, cpu_flags
from ampx.policy import Dtype

_BOTH: frozenset[Dtype] = frozenset({"float16", "bfloat16"})
# What the library that multiplies matrices in XLA's programs for CPUs has kernels for.
_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")


def describe(name: str) -> Device:
    """Describe a device; `"auto"` is the device that JAX itself prefers."""
    if name not in ("auto", "cpu", "cuda"):
        raise _unsupported(name)
    try:
        first = jax.devices()[0] if name == "auto" else jax.devices(name)[0]
    except RuntimeError as error:
        raise _unsupported(name) from error
    kind = _kind(first)
    if kind == "cuda":
        return _cuda(first)
    if kind == "cpu":
        return _cpu(first)
    raise _unsupported(kind)


def _kind(device: jax.Device) -> str:
    """Return `"cuda"` for NVIDIA's GPUs and `"rocm"` for AMD's, both of which JAX calls GPUs; else JAX's name."""
    if device.platform not in ("gpu", "cuda"):
        return str(device.platform)
    return "rocm" if str(getattr(device, "compute_capability", "")).startswith("gfx") else "cuda"


def _cpu(first: jax.Device) -> Device:
    flags = cpu_flags()
    instructions = [flag for flag in _INSTRUCTIONS if flag in flags]
    details = {"kind": first.device_kind, "instructions": instructions}
    if not instructions:
        reason = "no instructions for bfloat16 were found on this CPU, so XLA converts to float32 to compute"
        return Device("cpu", emulated=_BOTH, reason=reason, details=details)
    native: frozenset[Dtype] = frozenset({"bfloat16"})
    # None is preferred: transformers ran at 1.1 to 1.4 times the speed of float32, small perceptrons at 0.8.
    reason = (
        f"on a CPU XLA computes convolutions in float32, and small steps take longer in bfloat16. Steps with large "
        f"products gain from this CPU's instructions ({', '.join(instructions)}): pass dtype='bfloat16' for these; "
        f"`ampx tune` measures a script"
    )
    return Device("cpu", native, _BOTH - native, reason=reason, details=details)


def _cuda(first: jax.Device) -> Device:
    major, minor = (int(part) for part in str(getattr(first, "compute_capability", "0.0")).split("."))
    details = {"kind": first.device_kind, "compute_capability": f"{major}.{minor}"}
    if (major, minor) >= (8, 0):
        return Device("cuda", _BOTH, preferred="float16", reason="it has Tensor Cores", details=details)
    if (major, minor) >= (7, 0):
        native: frozenset[Dtype] = frozenset({"float16"})
        reason = "it has Tensor Cores for float16"
        return Device("cuda", native, _BOTH - native, preferred="float16", reason=reason, details=details)
    return Device("cuda", emulated=_BOTH, reason="it has no Tensor Cores", details=details)


def _unsupported(name: str) -> ampx.UnsupportedDeviceError:
    default = _kind(jax.devices()[0])
    accepted = [*(["auto"] if default in ("cpu", "cuda") else []), "cpu", *(["cuda"] if default == "cuda" else [])]
    return ampx.UnsupportedDeviceError(
        f"device={name!r} is not a device of JAX that ampx knows here; accepted: {', '.join(map(repr, accepted))}. "
        f"Pass one of these. To compute, lower or export for another device, pass device='cpu' and a dtype by name: "
        f"sessions of one dtype lower alike on all devices."
    )
