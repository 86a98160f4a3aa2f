"""A CUDA device for tests where there is no GPU: torch computes as on CUDA, with the kernels of the CPU.

`device.cpp` gives torch's CPU build the device. Its tensors are ordinary ones of torch whose device is "cuda" and whose
memory is the host's, so that the dispatcher, autograd and the optimizers do with them what they do on a GPU: they cast
by CUDA's lists, run backward in the device's own thread, choose foreach and fused kernels, and wait where the host
reads.

What tests show here is which operations run, in which dtype, in which order, and what the host waits for. They say
nothing of CUDA's kernels and their rounding, of speed, memory, streams and races, CUDA graphs, the profiler and NCCL:
processes talk over gloo.
"""

from __future__ import annotations

import ctypes
import pathlib
import sys
from typing import Any

import compiled
from compiled import CannotSimulateError, home_of

SOURCE = pathlib.Path(__file__).with_name("device.cpp")
_library: Any = None
built_in: pathlib.Path | None = None
"""The folder of what was compiled, for processes that are to have the device, too; None where this one has it not."""


def start(folder: pathlib.Path) -> None:
    """Give this process the device. What was compiled is kept in `folder`, and compiled anew for another torch.

    Raises:
        CannotSimulateError: Torch or a compiler is missing, or torch was imported before and has already looked for
            devices.
    """
    if "torch" in sys.modules:
        raise CannotSimulateError("torch was imported before the simulated CUDA device, and looks for devices once")
    home = home_of("torch")
    library = build(home, folder)
    ctypes.CDLL(str(home / "lib" / "libtorch_global_deps.so"), ctypes.RTLD_GLOBAL)
    global _library, built_in
    _library = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    _library.simulated_cuda_syncs.restype = ctypes.c_int64
    _offer(_library)
    built_in = folder


def build(home: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Compile the device for the torch at `home`, unless `folder` has it; return the library."""
    options = ["-std=c++20", "-O0", f"-I{home / 'include'}"]
    options += [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home / 'lib'}"]
    return compiled.library(SOURCE, home, folder, options)


def _offer(library: Any) -> None:
    """Let `torch.cuda` answer as it does where there is one device."""
    import torch

    class Event:
        """What is recorded has happened."""

        def __init__(self, *_: object, **__: object) -> None: ...
        def record(self, stream: object = None) -> None: ...
        def wait(self, stream: object = None) -> None: ...
        def synchronize(self) -> None: ...
        def query(self) -> bool:
            return True

    class Stream(Event):
        """All work is done in order, as it comes."""

        device = torch.device("cuda", 0)

        def wait_stream(self, stream: object) -> None: ...
        def wait_event(self, event: object) -> None: ...
        def record_event(self, event: Event | None = None) -> Event:
            return event or Event()

        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *_: object) -> None: ...

    class Properties:
        name, major, minor, total_memory, multi_processor_count = "simulated", 9, 0, 2**36, 132

    modes = ["default", "warn", "error"]

    def set_sync_debug_mode(mode: int | str) -> None:
        library.simulated_cuda_set_sync_mode(modes.index(mode) if isinstance(mode, str) else mode)

    def copied(storage: torch.UntypedStorage, device: object = None, non_blocking: bool = False) -> Any:
        values = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return values.to(device or storage.device, non_blocking=non_blocking, copy=True).untyped_storage()

    answers: dict[str, Any] = {
        "_lazy_init": None,
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "get_device_name": Properties.name,
        "get_device_capability": (Properties.major, Properties.minor),
        "get_device_properties": Properties(),
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "current_stream": Stream(),
        "default_stream": Stream(),
        "synchronize": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    # There is one generator: that of the host.
    torch.cuda.manual_seed = torch.cuda.manual_seed_all = lambda seed: None
    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)
    torch.cuda.Event, torch.cuda.Stream = Event, Stream
    torch.cuda.set_sync_debug_mode = set_sync_debug_mode
    torch.cuda.get_sync_debug_mode = lambda: library.simulated_cuda_sync_mode()
    torch.UntypedStorage.clone = torch.UntypedStorage.to = copied  # a storage alone is made for CPU and GPUs only


def started() -> bool:
    """Return whether this process has the device."""
    return _library is not None


def syncs() -> int:
    """Return how often the host has waited for the device."""
    return int(_library.simulated_cuda_syncs())
