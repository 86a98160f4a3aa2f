"""Kernels that honour the rules about operations.

An operation gets a kernel of ours under torch's autocast key, in place of torch's own: it casts the floating
arguments and calls the operation with autocast out of the way. Being a kernel of the dispatcher it is reached
from functions, methods and modules alike, and by the compiler.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from ampx.errors import UnsupportedByBackendError
from ampx_torch.trees import LOW, cast, floating

from .oplists import Kind

_KEYS: Final = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
# These update tensors that their schema does not declare, so only what they normalise may be cast.
_STATEFUL: Final = ("batch_norm", "instance_norm")


def register(device: str, operations: Iterable[tuple[Kind, str]]) -> list[torch.library.Library]:
    """Replace torch's autocast kernels of some overloads until the libraries are destroyed."""
    return replace(
        device,
        {
            name: make_kernel(_overload(name), kind, device, name.partition("::")[2].rpartition(".")[0])
            for kind, name in operations
        },
    )


def replace(device: str, kernels: Mapping[str, Callable[..., Any]]) -> list[torch.library.Library]:
    """Put kernels, by qualified overload, in the place of torch's own autocast kernels, as `register`."""
    libraries: dict[str, torch.library.Library] = {}
    with warnings.catch_warnings():
        # torch says once a process that a kernel is being replaced, which is the purpose.
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name, kernel in kernels.items():
            space = name.partition("::")[0]
            if space not in libraries:
                libraries[space] = torch.library.Library(space, "IMPL", _KEYS[device])
            libraries[space].impl(_overload(name), kernel)
    return list(libraries.values())


def _overload(name: str) -> Any:
    space, _, qualified = name.partition("::")
    operation, _, overload = qualified.rpartition(".")
    return getattr(getattr(getattr(torch.ops, space), operation), overload)


def make_kernel(target: Any, kind: Kind, device: str, name: str) -> Callable[..., Any]:
    """Return the kernel that casts the arguments of one overload."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEYS[device]))
    stateful = any(part in name for part in _STATEFUL)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        low = torch.get_autocast_dtype(device)
        dtype = low if kind == "allow" else torch.float32
        if kind == "ban":
            refuse_low(name, (args, kwargs))
        elif kind == "promote" and all(tensor.dtype in LOW for tensor in floating((args, kwargs))):
            dtype = low
        with torch._C._ExcludeDispatchKeyGuard(keys):
            if stateful:
                return target(cast(args[0], dtype, device), *args[1:], **kwargs)
            return target(*cast(args, dtype, device), **cast(kwargs, dtype, device))

    return kernel


def refuse_low(name: str, arguments: Any) -> None:
    """Raise where a floating argument of a banned operation has low precision."""
    dtype = next((tensor.dtype for tensor in floating(arguments) if tensor.dtype in LOW), None)
    if dtype is not None:
        raise UnsupportedByBackendError(
            f"{name} got a {dtype} tensor; accepted: float32, because its logarithms overflow in low precision. Use "
            f"{name}_with_logits in place of sigmoid and {name}, or call .float() on its input."
        )
