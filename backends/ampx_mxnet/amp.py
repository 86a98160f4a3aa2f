"""The names of `mxnet.contrib.amp` on ampx: scripts written for MXNet's own amp run with them.

`install()` puts this module in the place of `mxnet.contrib.amp` and of its module `amp`, and offers it as `mxnet.amp`,
as MXNet 2.0 calls it. MXNet's own amp does the casting underneath; the loss scale is ampx's. What is not written here,
such as `lists` and `LossScaler`, is MXNet's own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

import ampx
from ampx.errors import NotAnOptimizerError, NotInitializedError, NotWrappedError, UnsupportedByBackendError
from ampx.scaling import ScaleLoss
from ampx.session import sessions

from .amp_convert import convert_bucketing_module, convert_hybrid_block, convert_model, convert_symbol
from .amp_lists import (
    dtype_of,
    list_conditional_fp32_ops,
    list_fp16_fp32_ops,
    list_fp16_ops,
    list_fp32_ops,
    list_loss_output_functions,
    list_lp16_fp32_ops,
    list_lp16_ops,
    list_lp16_use_fp32_params,
    list_widest_type_cast,
    native_lists,
)
from .compat import amp as _native, mx
from .oplists import NativeLists
from .optimizer import AmpTrainer

__all__ = [
    "convert_bucketing_module",
    "convert_hybrid_block",
    "convert_model",
    "convert_symbol",
    "init",
    "init_trainer",
    "install",
    "list_conditional_fp32_ops",
    "list_fp16_fp32_ops",
    "list_fp16_ops",
    "list_fp32_ops",
    "list_loss_output_functions",
    "list_lp16_fp32_ops",
    "list_lp16_ops",
    "list_lp16_use_fp32_params",
    "list_widest_type_cast",
    "scale_loss",
    "uninstall",
    "unscale",
]

# Where scripts look for it: in MXNet 1, and in MXNet 2.
_PLACES: Final = ((mx.contrib, "mxnet.contrib.amp"), (mx, "mxnet.amp"))
_OWN: Final = ("", ".amp")  # modules of these names are this one; the others are MXNet's own
_NATIVE: Final = {
    ".lists": _native.lists,
    ".lists.symbol_bf16": _native.lists.symbol_bf16,
    ".lists.symbol_fp16": _native.lists.symbol_fp16,
    ".loss_scaler": _native.loss_scaler,
}
_attributes: Final[list[tuple[Any, Any]]] = []  # place, and what its attribute `amp` was
_modules: Final[dict[str, Any]] = {}  # what was imported by each name


class _Asked:
    """What the running session was asked for, to tell a repeated `init` from a new one."""

    session: Any = None
    settings: object = None


def init(
    target_dtype: object = None,
    target_precision_ops: Sequence[str] | None = None,
    conditional_fp32_ops: Sequence[tuple[str, str, Sequence[str]]] | None = None,
    fp32_ops: Sequence[str] | None = None,
    layout_optimization: bool = False,
) -> None:
    """Switch casting on, and give every trainer of `init_trainer` a dynamic loss scale.

    Repeated with the same arguments it does nothing; with others it replaces what was on, which MXNet's cannot.

    Args:
        target_dtype: `"float16"` or `"bfloat16"`. None for what the device computes: float16 on a GPU, which is also
            MXNet's default, and bfloat16 on a CPU, where MXNet has no float16.
        target_precision_ops: Names of operators to compute in it, instead of MXNet's list.
        conditional_fp32_ops: Operator, argument and values with which it computes in float32, instead of MXNet's list.
        fp32_ops: Names of operators to compute in float32, instead of MXNet's list.
        layout_optimization: False; MXNet 1.9.1 has none.

    Raises:
        UnsupportedDtypeError: The device cannot compute in `target_dtype`.
        UnsupportedOpError: A name is no operator, or stands in both lists.
        UnsupportedByBackendError: `layout_optimization` is True.
    """
    if layout_optimization:
        raise UnsupportedByBackendError(
            "layout_optimization=True is not supported by MXNet 1.9.1; accepted: False. Leave it out, or build the "
            "network in the layout you want."
        )
    dtype = "auto" if target_dtype is None else dtype_of(target_dtype)
    lists = native_lists(target_precision_ops, fp32_ops, conditional_fp32_ops)
    settings = dtype, lists
    running = sessions.get("mxnet")
    if running is not None and running is _Asked.session and settings == _Asked.settings:
        return
    allow = () if lists == NativeLists() else (lists,)
    _Asked.session = ampx.init("mxnet", dtype=dtype, loss_scale="dynamic", allow=allow)
    _Asked.session.recipe = "mxnet.contrib.amp"
    _Asked.settings = settings


def init_trainer(optimizer_or_trainer: Any) -> None:
    """Add a loss scale to a gluon trainer, in place: the script goes on with the same object.

    Args:
        optimizer_or_trainer: A `gluon.Trainer`. Its own `step` and `update` unscale, check and skip from now on.

    Raises:
        NotInitializedError: `init` was not called.
        NotAnOptimizerError: It is no trainer.
        AlreadyWrappedError: It was given before.
    """
    session = _session("init_trainer")
    if not isinstance(optimizer_or_trainer, mx.gluon.Trainer):
        raise NotAnOptimizerError(
            f"init_trainer got {type(optimizer_or_trainer).__name__}; accepted: a gluon.Trainer, which holds the "
            f"optimizer. Pass that."
        )
    session.wrap_optimizer(optimizer_or_trainer, in_place=True)


def scale_loss(loss: Any, optimizer_or_trainer: Any) -> ScaleLoss:
    """Return a region that yields the scaled loss, inside or outside `autograd.record()`.

    Args:
        loss: Floating array of any shape, or a list of such, one a context.
        optimizer_or_trainer: The trainer that was given to `init_trainer`.

    Returns:
        A context manager yielding the loss in float32 times the loss scale.

    Raises:
        NotInitializedError: `init` was not called.
        NotWrappedError: The trainer was not given to `init_trainer`.
    """
    return _session("scale_loss").scale_loss(loss, _wrapped(optimizer_or_trainer, "scale_loss"))


def unscale(optimizer_or_trainer: Any) -> None:
    """Make the gradients true before the step, to clip them; idempotent until the step.

    Args:
        optimizer_or_trainer: The trainer that was given to `init_trainer`.

    Raises:
        NotInitializedError: `init` was not called.
        NotWrappedError: The trainer was not given to `init_trainer`.
        NotScaledError: No `scale_loss` came since the last step.
    """
    _session("unscale").unscale(_wrapped(optimizer_or_trainer, "unscale"))


def install() -> None:
    """Make `from mxnet.contrib import amp` and `from mxnet import amp` give this module."""
    if _attributes:
        return
    module = sys.modules[__name__]
    for place, name in _PLACES:
        _attributes.append((place, vars(place).get("amp")))
        place.amp = module
        for path, provided in {**dict.fromkeys(_OWN, module), **_NATIVE}.items():
            _modules[name + path] = sys.modules.get(name + path)
            sys.modules[name + path] = provided


def uninstall() -> None:
    """Undo `install`: MXNet's own amp is back, and `mxnet.amp` is gone."""
    while _attributes:
        place, attribute = _attributes.pop()
        if attribute is None:
            del place.amp
        else:
            place.amp = attribute
    while _modules:
        name, module = _modules.popitem()
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module


def __getattr__(name: str) -> Any:
    """Look the rest up in MXNet's own modules, the package and its `amp`; by that name it is this one."""
    if name == "amp":
        return sys.modules[__name__]
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_native if hasattr(_native, name) else _native.amp, name)


def _session(call: str) -> ampx.Amp:
    session = sessions.get("mxnet")
    if session is None:
        raise NotInitializedError(f"{call} was called before init; accepted: after it. Call amp.init() first.")
    return session


def _wrapped(trainer: Any, call: str) -> AmpTrainer:
    if not isinstance(trainer, AmpTrainer):
        raise NotWrappedError(
            f"{call} got a {type(trainer).__name__} that was not given to init_trainer; accepted: a gluon.Trainer that "
            f"was. Call amp.init_trainer(trainer) first."
        )
    return trainer
