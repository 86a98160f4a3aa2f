"""A GPU for tests where there is none: Paddle casts, looks kernels up and trains on a device "gpu" as on a real one.

`device.cpp` gives Paddle's CPU build the device, through Paddle's interface for devices of other makers. Its memory is
the host's. Paddle's own C++ does with its tensors what it does on a GPU: it casts by its lists, keeps master copies,
and fails where no kernel is registered for a dtype. Kernels in float16 and bfloat16 are the CPU's in float32, whose
results are rounded to the nearest.

What tests show here is which operations run in which dtype, what is in float16 memory, and what a step does with it.
They say nothing of CUDA's kernels and of how they add up, of speed, memory, streams and waits, and of NCCL: processes
add their gradients up in memory that they share.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import sys
import warnings
from typing import Any

import compiled
from compiled import CannotSimulateError, home_of

SOURCE = pathlib.Path(__file__).with_name("device.cpp")
CAPABILITY = (9, 0)
built_in: pathlib.Path | None = None  # the folder that holds what was compiled, for processes that tests start
_started = False


def start(folder: pathlib.Path) -> None:
    """Give this process the device. What was compiled is kept in `folder`, and compiled anew for another Paddle.

    Raises:
        CannotSimulateError: Paddle or a compiler is missing, or Paddle was imported before and has already looked for
            devices.
    """
    if "paddle" in sys.modules:
        raise CannotSimulateError("paddle was imported before the simulated device, and looks for devices once")
    library = build(home_of("paddle"), folder)
    # Paddle loads every library of a folder that this variable names; processes that tests start have no device.
    os.environ["CUSTOM_DEVICE_ROOT"] = str(library.parent)
    os.environ.setdefault("GLOG_minloglevel", "1")  # it tells of each library
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No ccache found", UserWarning)  # paddle says so on import
        import paddle
    del os.environ["CUSTOM_DEVICE_ROOT"]
    if paddle.device.get_all_custom_device_type() != ["gpu"]:
        raise CannotSimulateError("this build of paddle takes no devices of other makers")
    _offer(paddle)
    global _started, built_in
    _started, built_in = True, folder


def build(home: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Compile the device for the Paddle at `home`, unless `folder` has it; return the library."""
    include = home / "include"
    options = ["-std=c++17", "-O1", "-DPADDLE_WITH_CUSTOM_DEVICE", f"-I{include}", f"-I{include / 'third_party'}"]
    options += [f"-L{home / 'libs'}", "-lphi_core", f"-Wl,-rpath,{home / 'libs'}"]
    return compiled.library(SOURCE, home, folder, options)


def _offer(paddle: Any) -> None:
    """Let Paddle answer in Python as its GPU build does where there is one GPU."""
    amp = importlib.import_module("paddle.amp.auto_cast")  # `paddle.amp.auto_cast` is a function
    amp._is_custom_device_bfloat16_supported = lambda: True  # Paddle lists the makers whose devices have it
    paddle.is_compiled_with_cuda = paddle.device.is_compiled_with_cuda = lambda: True

    class CUDAPlace(paddle.CustomPlace):  # type: ignore[misc]
        def __init__(self, index: int) -> None:
            super().__init__("gpu", index)

    paddle.CUDAPlace = CUDAPlace
    native = paddle.device._convert_to_place  # which takes "gpu" for a custom device's name, but not "gpu:0"

    def place_of(device: Any) -> Any:
        kind, _, index = str(device).partition(":")
        return CUDAPlace(int(index)) if kind == "gpu" and index else native(device)

    # `paddle.device` stands for the module in which `set_device` looks the name up.
    paddle.device._convert_to_place = paddle.device.set_device.__globals__["_convert_to_place"] = place_of
    paddle.base.core.get_cuda_device_count = lambda: 0  # whose generators are to be seeded
    answers: dict[str, Any] = {
        "device_count": 1,
        "get_device_capability": CAPABILITY,
        "get_device_name": "simulated",
        "max_memory_allocated": 0,
        "synchronize": None,
    }
    for name, answer in answers.items():
        setattr(paddle.device.cuda, name, lambda *_, answer=answer, **__: answer)


def started() -> bool:
    """Return whether this process has the device."""
    return _started
