"""apex's op lists: what is in force beyond torch's autocast, and the lists by name that scripts edit.

What autocast has by itself differs by device: on CUDA it took over nearly all of apex's lists, on the CPU it leaves
most of the float32 operations to their inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

import torch
from torch.nn import functional as F  # noqa: N812

from ampx.annotate import Kind
from ampx.errors import UnsupportedOpError
from ampx_torch.casting.oplists import Rule

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
    """Return the operations to compute in low precision on a kind of device."""
    return [] if device == "cuda" else list(_named(_HALF_ON_CPU))


def denied(device: str, allow_banned: bool) -> list[Any]:
    """Return the operations to compute in float32, in the widest dtype, or never in low precision."""
    names = _FLOAT if device == "cuda" else (*_FLOAT, *_FLOAT_ON_CPU)
    operations = list(_named(names))
    if device != "cuda":
        operations += [Rule("promote", operation) for operation in _named(_WIDEST_ON_CPU)]
    return [*operations, _BANNED if allow_banned else Rule("ban", _BANNED)]


def _named(names: tuple[str, ...]) -> Iterator[Any]:
    return (getattr(torch.ops.aten, name) for name in names)


# -- the lists by name -------------------------------------------------------------------------------

_KINDS: Final[dict[str, Kind]] = {
    "FP16_FUNCS": "half",
    "FP32_FUNCS": "float",
    "CASTS": "promote",
    "SEQUENCE_CASTS": "promote",
}
_CONVOLUTIONS: Final = (*(f"conv{kind}{size}d" for kind in ("", "_transpose") for size in (1, 2, 3)), "conv_tbc")
_TORCH: Final = {
    "FP16_FUNCS": (
        *_CONVOLUTIONS,
        *("prelu", "addmm", "addmv", "addr", "matmul", "mm", "mv", "addbmm", "baddbmm", "bmm"),
    ),
    "FP32_FUNCS": (
        *(
            "acos",
            "asin",
            "cosh",
            "erfinv",
            "exp",
            "expm1",
            "log",
            "log10",
            "log2",
            "reciprocal",
            "rsqrt",
            "sinh",
            "tan",
        ),
        *("pow", "cumprod", "cumsum", "dist", "norm", "prod", "std", "sum", "var", "renorm"),
    ),
    "CASTS": (
        *("addcdiv", "addcmul", "atan2", "cross", "bilinear", "dot", "add", "div", "mul"),
        *("eq", "equal", "ge", "gt", "le", "lt", "ne"),
    ),
    "SEQUENCE_CASTS": ("cat", "stack"),
}
_FUNCTIONAL: Final = {
    "FP16_FUNCS": (*_CONVOLUTIONS, "linear"),
    "FP32_FUNCS": (
        *("interpolate", "grid_sample", "softplus", "softmin", "log_softmax", "softmax", "gelu", "layer_norm"),
        *("group_norm", "local_response_norm", "normalize", "cosine_similarity", "poisson_nll_loss"),
        *("cosine_embedding_loss", "cross_entropy", "hinge_embedding_loss", "kl_div", "l1_loss", "mse_loss"),
        *("margin_ranking_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "multi_margin_loss"),
        *("nll_loss", "binary_cross_entropy_with_logits", "smooth_l1_loss", "soft_margin_loss"),
        *("triplet_margin_loss", "ctc_loss"),
    ),
    "CASTS": (),
    "SEQUENCE_CASTS": (),
}
_OPERATORS: Final = tuple(
    f"__{prefix}{name}__" for name in ("add", "sub", "mul", "truediv") for prefix in ("", "i", "r")
) + tuple(f"__{name}__" for name in ("eq", "ne", "ge", "gt", "le", "lt"))
_TENSOR: Final = {
    "FP16_FUNCS": ("__matmul__", *_TORCH["FP16_FUNCS"]),
    "FP32_FUNCS": ("__ipow__", "__pow__", "__rpow__", "cpu", *_TORCH["FP32_FUNCS"]),
    "CASTS": (*_OPERATORS, *_TORCH["CASTS"]),
    "SEQUENCE_CASTS": (),
}


def _by_name(name: str, module: Any, lists: dict[str, tuple[str, ...]], *banned: tuple[str, str]) -> ModuleType:
    overrides = ModuleType(f"{__name__}.{name}", "Lists of functions by name; those that a script adds are cast.")
    attributes = {kind: [own for own in names if hasattr(module, own)] for kind, names in lists.items()}
    vars(overrides).update(MODULE=module, BANNED_FUNCS=list(banned), **attributes)
    return overrides


functional_overrides: Any = _by_name("functional_overrides", F, _FUNCTIONAL, (_BANNED.__name__, "needs float32"))
torch_overrides: Any = _by_name("torch_overrides", torch, _TORCH)
tensor_overrides: Any = _by_name("tensor_overrides", torch.Tensor, _TENSOR)
_OVERRIDES: Final = (functional_overrides, torch_overrides, tensor_overrides)
_PUBLISHED: Final = [{kind: tuple(vars(overrides)[kind]) for kind in _KINDS} for overrides in _OVERRIDES]


def bans() -> bool:
    """Return whether banned functions are still on their list."""
    return bool(functional_overrides.BANNED_FUNCS)


def edits() -> dict[tuple[Any, str], Kind]:
    """Return what a script added to the lists, as if it had registered it."""
    added: dict[tuple[Any, str], Kind] = {}
    for overrides, published in zip(_OVERRIDES, _PUBLISHED, strict=True):
        listed: set[str] = set()
        for kind in _KINDS:
            names = set(vars(overrides)[kind])
            added.update({(overrides.MODULE, name): _KINDS[kind] for name in names - set(published[kind])})
            listed |= names
        for kind in _KINDS:
            missing = set(published[kind]) - listed
            if missing:
                raise UnsupportedOpError(
                    f"{min(missing)!r} was taken from {kind} of {overrides.__name__.rpartition('.')[2]} and put on no "
                    f"other list, but autocast goes on to cast it; accepted: FP16_FUNCS, FP32_FUNCS or CASTS for it. "
                    f"Append it to one of these."
                )
    return added
