"""What the devices of this machine compute, as Paddle tells it."""

from __future__ import annotations

import paddle

from ampx.backend import Device
from ampx.errors import UnsupportedDeviceError
from ampx.policy import Dtype


def describe(name: str) -> Device:
    """Describe a device.

    Args:
        name: `"gpu"`, `"cpu"`, with an index if wanted (`"gpu:1"`), or `"auto"` for the best present.

    Raises:
        UnsupportedDeviceError: There is no such device here.
    """
    count = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    wanted = ("gpu" if count else "cpu") if name == "auto" else str(name)
    kind, _, index = wanted.partition(":")
    if wanted == "cpu":
        return _describe_cpu()
    if kind == "gpu" and (not index or index.isdigit()) and int(index or 0) < count:
        return _describe_gpu(int(index or 0))
    present = ["cpu", *(["gpu"] if count else []), *(f"gpu:{one}" for one in range(count))]
    raise UnsupportedDeviceError(
        f"device={name!r} is not a device that paddle offers here; accepted: 'auto', {', '.join(map(repr, present))}. "
        f"Pass one of these{'' if count else ', or install a CUDA build of paddle'}."
    )


def _describe_cpu() -> Device:
    if not paddle.in_dynamic_mode():
        bfloat16: frozenset[Dtype] = frozenset({"bfloat16"})
        native = bool(paddle.base.core.supports_bfloat16())
        return Device(
            name="cpu",
            native=bfloat16 if native else frozenset(),
            emulated=frozenset() if native else bfloat16,
            preferred="bfloat16" if native else None,
            reason=f"static graphs compute bfloat16 on this CPU{'' if native else ', without instructions for it'}",
            details={"version": paddle.__version__},
        )
    # Eager Paddle skips every cast of a tensor on the CPU, and has no low-precision kernels there.
    return Device(
        name="cpu",
        reason="eager Paddle computes float32 on the CPU whatever auto_cast says; loss scaling works all the same",
        details={"version": paddle.__version__},
    )


def _describe_gpu(index: int) -> Device:
    major, minor = paddle.device.cuda.get_device_capability(index)
    capability = (major, minor)
    native: set[Dtype] = {"float16"} if capability >= (5, 3) else set()
    if capability >= (8, 0):
        native.add("bfloat16")
    tensor_cores = capability >= (7, 0)
    label = f"{paddle.device.cuda.get_device_name(index)}, compute capability {major}.{minor}"
    return Device(
        name="gpu",
        native=frozenset(native),
        preferred="float16" if tensor_cores else None,
        reason=f"{label}: {'Tensor Cores compute float16' if tensor_cores else 'no Tensor Cores (they start at 7.0)'}",
        details={
            "name": paddle.device.cuda.get_device_name(index),
            "compute_capability": f"{major}.{minor}",
            "tensor_cores": tensor_cores,
            "version": paddle.__version__,
            "cuda": paddle.version.cuda(),
        },
    )
