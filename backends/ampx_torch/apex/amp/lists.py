"""apex's op lists, as far as torch's autocast does not have them by itself.

What it has differs by device: on CUDA autocast took over nearly all of apex's lists, on the CPU it leaves most of the
float32 operations to their inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.nn import functional as F  # noqa: N812

from ampx_torch.oplists import Rule

# In low precision, beyond autocast's own lists.
_HALF_ON_CPU: Final = ("addmv", "addr", "mv", "gru_cell", "lstm_cell", "gru")
# In float32, beyond autocast's own lists: on every device, and on the CPU.
_FLOAT: Final = ("gelu", "std", "var")
_FLOAT_ON_CPU: Final = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "reciprocal", "rsqrt", "sinh", "tan"),
    *("pow", "cumprod", "cumsum", "dist", "norm", "sum", "renorm", "softplus", "softmax", "log_softmax"),
    *("linalg_vector_norm", "layer_norm", "group_norm", "cosine_similarity"),
    *(f"upsample_{kind}" for kind in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d")),
    "upsample_trilinear3d",
)
# In the widest dtype of their arguments.
_WIDEST_ON_CPU: Final = ("dot", "bilinear", "cross", "linalg_cross")
_BANNED: Final = F.binary_cross_entropy


def allowed(device: str) -> list[Any]:
    """Give the operations to compute in low precision on a kind of device. Sync: none."""
    return [] if device == "cuda" else list(_named(_HALF_ON_CPU))


def denied(device: str, allow_banned: bool) -> list[Any]:
    """Give the operations to compute in float32, in the widest dtype, or never in low precision. Sync: none."""
    names = _FLOAT if device == "cuda" else (*_FLOAT, *_FLOAT_ON_CPU)
    found = list(_named(names))
    if device != "cuda":
        found += [Rule("promote", one) for one in _named(_WIDEST_ON_CPU)]
    return [*found, _BANNED if allow_banned else Rule("ban", _BANNED)]


def _named(names: tuple[str, ...]) -> Iterator[Any]:
    return (getattr(torch.ops.aten, name) for name in names)
