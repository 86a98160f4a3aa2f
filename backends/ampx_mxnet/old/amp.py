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
from ampx.errors import (
    InvalidOptionError,
    NotAnOptimizerError,
    NotInitializedError,
    NotWrappedError,
    UnsupportedByBackendError,
)
from ampx.policy import Dtype, normalise_dtype
from ampx.scaling import ScaleLoss
from ampx_mxnet import convert
from ampx_mxnet.casting import running_session
from ampx_mxnet.casting.oplists import NativeLists
from ampx_mxnet.compat import amp as _native, mx
from ampx_mxnet.dtypes import BFLOAT16, DTYPES
from ampx_mxnet.step import AmpTrainer

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

# Operator, argument, and the argument's values with which it computes in float32.
Condition = tuple[str, str, Sequence[str]]
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
    conditional_fp32_ops: Sequence[Condition] | None = None,
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
    dtype = _dtype(target_dtype) or "auto"
    allow = _allow(target_precision_ops, fp32_ops, conditional_fp32_ops)
    settings = dtype, allow
    if settings == _Asked.settings and _Asked.session is running_session():
        return
    _Asked.session = ampx.init("mxnet", dtype=dtype, loss_scale="dynamic", allow=allow)
    _Asked.session.recipe = "mxnet.contrib.amp"
    _Asked.settings = settings


def init_trainer(optimizer_or_trainer: Any) -> None:
    """Add a loss scale to a gluon trainer, in place: the script goes on with the same object.

    Its own `step` and `update` unscale, check and skip from now on.

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
    """Unscale the gradients before the step, to clip them; idempotent until the step.

    Raises:
        NotInitializedError: `init` was not called.
        NotWrappedError: The trainer was not given to `init_trainer`.
        NotScaledError: No `scale_loss` came since the last step.
    """
    _session("unscale").unscale(_wrapped(optimizer_or_trainer, "unscale"))


def _session(call: str) -> ampx.Amp:
    session = running_session()
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


# -- conversion: see `ampx_mxnet.convert`; float16 by default as in MXNet, None for what the device prefers ---------


def convert_symbol(
    sym: Any,
    target_dtype: object = "float16",
    target_dtype_ops: Sequence[str] | None = None,
    fp32_ops: Sequence[str] | None = None,
    conditional_fp32_ops: Sequence[Condition] | None = None,
    excluded_sym_names: Sequence[str] = (),
    data_names: Sequence[str] | None = None,
    cast_optional_params: bool = False,
) -> Any:
    """Convert a float32 symbol; lists and dtype are those of `init`, the rest and the errors of `convert_symbol`."""
    return convert.convert_symbol(
        sym,
        _dtype(target_dtype),
        allow=_allow(target_dtype_ops, fp32_ops, conditional_fp32_ops),
        exclude=excluded_sym_names or (),
        data_names=data_names,
        cast_parameters=cast_optional_params,
    )


def convert_model(
    sym: Any,
    arg_params: dict[str, Any],
    aux_params: dict[str, Any],
    target_dtype: object = "float16",
    target_dtype_ops: Sequence[str] | None = None,
    fp32_ops: Sequence[str] | None = None,
    conditional_fp32_ops: Sequence[Condition] | None = None,
    excluded_sym_names: Sequence[str] = (),
    cast_optional_params: bool = False,
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Convert a float32 symbol and its parameters; what was passed stays as it was. See `convert_symbol`."""
    return convert.convert_model(
        sym,
        arg_params,
        aux_params,
        _dtype(target_dtype),
        allow=_allow(target_dtype_ops, fp32_ops, conditional_fp32_ops),
        exclude=excluded_sym_names or (),
        cast_parameters=cast_optional_params,
    )


def convert_hybrid_block(
    block: Any,
    target_dtype: object = "float16",
    target_dtype_ops: Sequence[str] | None = None,
    fp32_ops: Sequence[str] | None = None,
    conditional_fp32_ops: Sequence[Condition] | None = None,
    excluded_sym_names: Sequence[str] = (),
    ctx: Any = None,
    cast_optional_params: bool = False,
) -> Any:
    """Convert a block that was hybridized and called; its parameters go to `ctx`. See `convert_symbol`."""
    converted = convert.convert_hybrid_block(
        block,
        _dtype(target_dtype),
        allow=_allow(target_dtype_ops, fp32_ops, conditional_fp32_ops),
        exclude=excluded_sym_names or (),
        cast_parameters=cast_optional_params,
    )
    if ctx is not None:
        converted.collect_params().reset_ctx(ctx)
    return converted


def convert_bucketing_module(*args: Any, **kwargs: Any) -> Any:
    """Refuse: only symbols, models and hybrid blocks are converted.

    Raises:
        UnsupportedByBackendError: Always.
    """
    raise UnsupportedByBackendError(
        "convert_bucketing_module is not offered by ampx_mxnet.amp; accepted: convert_symbol, convert_model and "
        "convert_hybrid_block. Convert the symbol of each bucket in the module's sym_gen."
    )


# -- lists --------------------------------------------------------------------------------------------------------


def list_lp16_ops(target_dtype: object = "float16") -> list[str]:
    """List the operators that MXNet computes in low precision."""
    return list(_native.list_lp16_ops(_native_dtype(target_dtype)))


def list_fp16_ops() -> list[str]:
    """List the operators that MXNet computes in float16, by the name that MXNet 1.5 had for it."""
    return list_lp16_ops("float16")


def list_fp32_ops(target_dtype: object = "float16") -> list[str]:
    """List the operators that MXNet computes in float32."""
    return list(_native.list_fp32_ops(_native_dtype(target_dtype)))


def list_lp16_fp32_ops(target_dtype: object = "float16") -> list[str]:
    """List the operators that compute in the dtype of their inputs."""
    return list(_native.list_lp16_fp32_ops(_native_dtype(target_dtype)))


def list_fp16_fp32_ops() -> list[str]:
    """List the operators that compute in the dtype of their inputs, by the name that MXNet 1.5 had for it."""
    return list_lp16_fp32_ops("float16")


def list_conditional_fp32_ops(target_dtype: object = "float16") -> list[tuple[str, str, list[str]]]:
    """List the operators that MXNet computes in float32 with some values of an argument."""
    return list(_native.list_conditional_fp32_ops(_native_dtype(target_dtype)))


def list_widest_type_cast(target_dtype: object = "float16") -> list[str]:
    """List the operators whose inputs get the widest dtype among them."""
    return list(_native.list_widest_type_cast(_native_dtype(target_dtype)))


def list_loss_output_functions(target_dtype: object = "float16") -> list[str]:
    """List the operators that make a loss themselves; they are refused while casting is on."""
    return list(_native.list_loss_output_functions(_native_dtype(target_dtype)))


def list_lp16_use_fp32_params(target_dtype: object = "float16") -> Any:
    """Return which inputs of low-precision operators stay in float32; None where MXNet has no such list."""
    return _native.list_lp16_use_fp32_params(_native_dtype(target_dtype))


def _dtype(target_dtype: object) -> Dtype | None:
    return None if target_dtype is None else _named(target_dtype)


def _native_dtype(target_dtype: object) -> Any:
    dtype = _named(target_dtype)
    return dtype if dtype == "float16" else DTYPES[dtype]


def _named(target_dtype: object) -> Dtype:
    """Read a dtype in any spelling of MXNet's: a name, a NumPy dtype or type, MXNet's own bfloat16."""
    return "bfloat16" if target_dtype == BFLOAT16 else normalise_dtype(target_dtype)


def _allow(
    target: Sequence[str] | None, fp32: Sequence[str] | None, conditional: Sequence[Condition] | None
) -> tuple[NativeLists, ...]:
    """Read the lists as `amp.init` takes them; None keeps MXNet's."""
    for name, entries in (("operators", target), ("fp32_ops", fp32), ("conditional_fp32_ops", conditional)):
        if isinstance(entries, str):
            raise InvalidOptionError(f"{name} got {entries!r}; accepted: a list of names. Pass [{entries!r}].")
    lists = NativeLists(
        None if target is None else tuple(target),
        None if fp32 is None else tuple(fp32),
        None if conditional is None else tuple((name, key, tuple(values)) for name, key, values in conditional),
    )
    return () if lists == NativeLists() else (lists,)


# -- install ------------------------------------------------------------------------------------------------------


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
