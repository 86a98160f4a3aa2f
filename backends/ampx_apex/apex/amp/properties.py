"""The opt levels: each is a bundle of properties, which options of `initialize` override."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

import torch

from .errors import PropertyError


@dataclass
class Properties:
    """What one opt level does."""

    enabled: bool = False  # False: every call is transparent
    opt_level: str | None = None  # `"O0"` to `"O3"`
    # Dtype of parameters, inputs and buffers; None or False casts nothing.
    cast_model_type: torch.dtype | Literal[False] | None = None
    patch_torch_functions: bool = False  # operations are cast by the op lists
    keep_batchnorm_fp32: bool | None = None  # batch norms stay in float32 where the model is cast
    master_weights: bool | None = None  # the optimizer updates float32 copies of low-precision parameters
    loss_scale: float | str = 1.0  # `"dynamic"`, or a number

    @property
    def options(self) -> dict[str, Any]:
        """The properties by name."""
        return asdict(self)


def _level(name: str, cast: torch.dtype | None, patch: bool, norms: Any, masters: Any, scale: Any) -> Properties:
    return Properties(True, name, cast, patch, norms, masters, scale)


LEVELS: Final[dict[str, Properties]] = {
    "O0": _level("O0", torch.float32, False, None, False, 1.0),
    "O1": _level("O1", None, True, None, None, "dynamic"),
    "O2": _level("O2", torch.float16, False, True, True, "dynamic"),
    "O3": _level("O3", torch.float16, False, False, False, 1.0),
}


def choose(opt_level: str, low: torch.dtype, overrides: dict[str, Any]) -> Properties:
    """Return the properties of a level, with the overrides that are not None in their place."""
    if not isinstance(opt_level, str) or opt_level not in LEVELS:
        raise PropertyError(
            f"opt_level={opt_level!r} is not an opt level; accepted: 'O0', 'O1', 'O2', 'O3' (the letter O, then a "
            f"digit). Pass one of these."
        )
    properties = replace(LEVELS[opt_level])
    if properties.cast_model_type is torch.float16:
        properties.cast_model_type = low
    for name, value in overrides.items():
        if value is not None:
            setattr(properties, name, _checked(properties, name, value))
    return properties


def _checked(level: Properties, name: str, value: Any) -> Any:
    if name == "cast_model_type":
        return _cast_model_type(level, value)
    if name == "patch_torch_functions":
        value = _flag(name, value)
        if value and level.opt_level != "O1":
            raise _refused(level, name, value, "None or False", "Use opt_level='O1', which casts operations")
        return value
    if name == "loss_scale":
        return _loss_scale(value)
    if level.opt_level == "O1":
        why = {
            "keep_batchnorm_fp32": "O1 leaves the model in float32, batch norms included",
            "master_weights": "O1 leaves the model's weights in float32, so there is nothing to make masters of",
        }[name]
        raise _refused(level, name, value, f"None ({why})", "Leave it out, or use opt_level='O2'")
    return _flag(name, value)


def _cast_model_type(level: Properties, value: Any) -> Any:
    accepted = (torch.float16, torch.bfloat16, torch.float32)
    if value is not False and value not in accepted:
        names = ", ".join(str(dtype) for dtype in accepted)
        raise PropertyError(f"cast_model_type={value!r} is not accepted; accepted: {names}, False. Pass one of these.")
    if level.opt_level == "O1" and value not in (False, torch.float32):
        raise _refused(
            level,
            "cast_model_type",
            value,
            "None (O1 casts operations and leaves the model's weights in float32)",
            "Use opt_level='O2' or 'O3' to cast the model",
        )
    return value


def _flag(name: str, value: Any) -> bool:
    flag = {"True": True, "False": False}.get(value, value) if isinstance(value, str) else value
    if flag is not True and flag is not False:
        raise PropertyError(
            f"{name}={value!r} is not a choice; accepted: True, False, the strings 'True' and 'False', None. Pass one "
            f"of these."
        )
    return flag


def _loss_scale(value: Any) -> float | str:
    if value == "dynamic":
        return "dynamic"
    try:
        scale = float(value)
    except (TypeError, ValueError):
        scale = 0.0
    if not 0.0 < scale < float("inf") or isinstance(value, bool):
        raise PropertyError(
            f"loss_scale={value!r} is not a loss scale; accepted: 'dynamic', a positive number, or a string of one "
            f"such as '128.0'. Pass one of these."
        )
    return scale


def _refused(level: Properties, name: str, value: Any, accepted: str, remedy: str) -> PropertyError:
    return PropertyError(
        f"{name}={value!r} does not go with opt_level={level.opt_level!r}; accepted: {accepted}. {remedy}."
    )
