"""What the devices of this machine compute, as Paddle tells it."""

from __future__ import annotations

import functools

import paddle

from ampx.backend import Device, choose_device
from ampx.errors import UnsupportedDeviceError
from ampx.policy import Dtype

from . import casting


def describe(name: str) -> Device:
    """Describe a device: `"gpu"`, `"cpu"`, with an index if wanted (`"gpu:1"`), or `"auto"`.

    That is the best one present, or the CPU where eager Paddle was told to compute there.

    Raises:
        UnsupportedDeviceError: There is no such device, or eager Paddle was told to compute on the CPU.
    """
    count = _gpus()
    on_cpu = bool(count) and paddle.in_dynamic_mode() and paddle.get_device() == "cpu"
    index = choose_device(name, "paddle", "gpu", count)
    if index is None or (name == "auto" and on_cpu):
        return _describe_cpu()
    if on_cpu:
        raise UnsupportedDeviceError(
            f"device={name!r} was asked for while paddle computes on 'cpu', where auto_cast casts nothing; accepted: "
            f"'auto', 'cpu', or another device once paddle computes there. Call paddle.set_device({name!r}) before."
        )
    return _describe_gpu(max(index, 0))


def best() -> Device:
    """Describe the best device present, wherever Paddle computes now."""
    return _describe_gpu(0) if _gpus() else _describe_cpu()


def _gpus() -> int:
    count: int = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    return count


def _describe_cpu() -> Device:
    if not paddle.in_dynamic_mode():
        present = _computes_bfloat16()
        return Device(
            name="cpu",
            native=frozenset({"bfloat16"}) if present else frozenset(),
            preferred="bfloat16" if present else None,
            reason="static graphs compute bfloat16 on this CPU"
            if present
            else "static graphs compute bfloat16 with AVX-512 only, which this CPU lacks or ONEDNN_MAX_CPU_ISA forbids",
            details={"version": paddle.__version__},
        )
    # Eager Paddle skips every cast of a tensor on the CPU, and has no low-precision kernels there.
    reason = "eager Paddle computes float32 on the CPU whatever auto_cast says; loss scaling works all the same"
    present = paddle.get_device()
    if present != "cpu":
        reason += f". It computes on {present!r} now: paddle.set_device('cpu') changes that"
    return Device(
        name="cpu",
        reason=reason,
        details={"version": paddle.__version__},
    )


def programs_compute_bfloat16() -> bool:
    """Return whether programs compute bfloat16 on this CPU, also where Paddle is eager now."""
    if not paddle.in_dynamic_mode():
        return _computes_bfloat16()
    paddle.enable_static()
    try:
        return _computes_bfloat16()
    finally:
        paddle.disable_static()


@functools.cache
def _computes_bfloat16() -> bool:
    """Return whether static graphs compute bfloat16 here, by a tiny product: a few hundredths of a second, once.

    Without AVX-512 oneDNN has no such kernels. Paddle asks the CPU alone, and not oneDNN, which the environment may
    forbid to use all that the CPU has; then a program is built, and fails in its first step.
    """
    if not paddle.base.core.supports_bfloat16():
        return False
    program = paddle.static.Program()
    with paddle.static.program_guard(program, paddle.static.Program()), paddle.utils.unique_name.guard(), casting.off():
        ones = paddle.full([2, 2], 1.0, "bfloat16")
        product = paddle.matmul(ones, ones)
    try:
        with paddle.static.scope_guard(paddle.static.Scope()):
            paddle.static.Executor(paddle.CPUPlace()).run(program, fetch_list=[product])
    except RuntimeError:
        return False
    return True


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
