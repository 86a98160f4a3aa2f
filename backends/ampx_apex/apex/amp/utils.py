"""Small functions of `apex.amp.utils`, `compat` and `rnn_compat`, and of `apex._autocast_utils`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ampx_torch import trees

VERSION = (0, 1, 0)
__version__ = "0.1.0"


def is_cuda_enabled() -> bool:
    """Return whether torch was built for CUDA."""
    return torch.version.cuda is not None


def get_cuda_version() -> tuple[int, ...]:
    """Return the version of CUDA that torch was built for; nothing without one."""
    return tuple(int(part) for part in (torch.version.cuda or "").split(".") if part)


def is_tensor_like(x: Any) -> bool:
    """Return whether it is a tensor."""
    return torch.is_tensor(x)


def is_floating_point(x: Any) -> bool:
    """Return whether a tensor has a floating dtype."""
    return bool(torch.is_floating_point(x))


def is_nested(x: Any) -> bool:
    """Return whether it is a list or a tuple."""
    return isinstance(x, (list, tuple))


def is_fp_tensor(x: Any) -> bool:
    """Return whether it is a floating tensor, or a list or tuple of such."""
    if is_nested(x):
        return all(is_fp_tensor(item) for item in x)
    return is_tensor_like(x) and is_floating_point(x)


def type_string(x: torch.Tensor) -> str:
    """Return the name of a tensor's type, such as `FloatTensor`."""
    return str(x.type()).split(".")[-1]


def maybe_half(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Return a tensor, or a list or tuple of such, in float16."""
    return type(x)(maybe_half(item) for item in x) if is_nested(x) else x.half()


def maybe_float(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Return a tensor, or a list or tuple of such, in float32."""
    return type(x)(maybe_float(item) for item in x) if is_nested(x) else x.float()


def scalar_python_val(x: Any) -> Any:
    """Return the number in a tensor of one element. Sync: one."""
    return x.item() if hasattr(x, "item") else x[0]


def filter_attrs(module: Any, attrs: Iterable[str]) -> list[str]:
    """Return the names that a module has."""
    return [name for name in attrs if hasattr(module, name)]


def has_old_rnns() -> bool:
    """Return False: no torch of today has them."""
    return False


def _cast_if_autocast_enabled(*args: Any) -> Any:
    """Return the arguments, floating tensors in the dtype of autocast on CUDA where that is on."""
    if not torch.is_autocast_enabled("cuda"):
        return args
    return trees.cast(args, torch.get_autocast_dtype("cuda"), "cuda")
