"""Read the loss-scale states that other libraries save, into the portable form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from .errors import InvalidStateError, StateError, UnknownSchemaError, shown
from .saved_state import GroupState, dump_state, has_schema, outline, parse_state
from .scale_state import FLOAT32_MAX, FLOAT32_TINY, LossScale, LossScaleState, round_to_float32

Fields = Mapping[str, Any]


def import_state(data: object) -> dict[str, Any]:
    """Convert a saved loss-scale state of another library.

    Read are the dictionaries of apex (`amp.state_dict()`), torch (`GradScaler.state_dict()`), Paddle
    (`GradScaler.state_dict()`), Keras and tf_keras (the optimizer's variables, as a list or by name, path or
    position), TF1 (`DynamicLossScale`), flax (`DynamicScale`) and DeepSpeed (an optimizer's `state_dict()`, a
    checkpoint that holds one, or the loss scaler in it). A state of ampx itself passes through after the same
    checks. Array values of one element count as numbers.

    What the dictionary does not hold is taken from the library it comes from: apex, Keras and flax save no
    factors, and use 2, 0.5 and an interval of 2000. Bounds are those of `LossScale`, wider where the scale
    is outside. Training goes on with the scales that the library would have used, with two exceptions for
    DeepSpeed: a second growth without an overflow in between comes one step later, and hysteresis is
    refilled by every finite step.

    Args:
        data: The dictionary (Keras: or list of variables).

    Returns:
        The state in the schema `ampx.loss_scale/1`, for `amp.load_state_dict`.

    Raises:
        UnknownSchemaError: It is none of these.
        InvalidStateError: It is one of these, but a value is missing or not acceptable.

    Sync: where a value lives on a device.

    Example:
        >>> ampx.load_state_dict(ampx.import_state(grad_scaler.state_dict()))
    """
    # A value of a foreign object may raise anything when it is looked at; nothing but these two errors gets out.
    try:
        if has_schema(data):
            framework = data.get("framework")
            return dump_state(framework if isinstance(framework, str) else None, parse_state(data))
        match = _find(data)
    except StateError:
        raise
    except Exception as error:
        raise _unknown(f"a {type(data).__name__}, reading which raises {type(error).__name__}") from error
    if match is None:
        if isinstance(data, dict) and not data:
            raise UnknownSchemaError(
                "the state is an empty dict, which a GradScaler saves that is switched off: it holds no loss scale; "
                "accepted: a state that holds one. Load nothing; the optimizer begins with its first scale."
            )
        raise _unknown(outline(data))
    name, fields, read = match
    try:
        state = dump_state(name, [read(fields)])
        parse_state(state)
    except InvalidStateError:
        raise
    except KeyError as error:
        raise _unreadable(name, f"{shown(error.args[0] if error.args else error)} is missing") from error
    except Exception as error:
        raise _unreadable(name, _reason(error)) from error
    return state


def _reason(error: Exception) -> str:
    try:
        return str(error)[:300] or type(error).__name__
    except Exception:  # of the error's own __str__
        return type(error).__name__


def _unreadable(name: str, reason: str) -> InvalidStateError:
    return InvalidStateError(
        f"the {name} state cannot be read: {reason}; accepted: the dictionary as {name} saved it. The loss scale is "
        f"unchanged."
    )


def _unknown(passed: str) -> UnknownSchemaError:
    return UnknownSchemaError(
        f"the state is {passed}; accepted: a state of ampx, or a loss-scale dictionary of apex, torch GradScaler, "
        f"Paddle GradScaler, Keras LossScaleOptimizer, TF1 DynamicLossScale, flax DynamicScale or DeepSpeed. Pass "
        f"that part of the checkpoint."
    )


def _find(data: object) -> tuple[str, Fields, Callable[[Fields], GroupState]] | None:
    """Return the library that saved this, the fields of its loss scale, and how to read them."""
    for _ in range(4):  # an engine's checkpoint holds an optimizer's, which holds the scaler
        fields = _fields(data)
        for key, name, read in _READERS:
            if key in fields or (name == "apex" and any(map(_is_apex_key, fields))):
                return name, fields, read
        inner = next(
            (fields[key] for key in ("loss_scaler", "optimizer_state_dict", "optimizer") if key in fields), None
        )
        if inner is None:
            return None
        data = inner if isinstance(inner, Mapping) else getattr(inner, "__dict__", None)
    return None


def _fields(data: object) -> Fields:
    """Return the fields by the last part of their name; a list of Keras variables is read by their paths."""
    if isinstance(data, (list, tuple)):
        data = {getattr(item, "path", None) or getattr(item, "name", None): item for item in data}
    if not isinstance(data, Mapping):
        return {}
    if data.keys() >= {"0", "1", "2", "3"}:  # Keras' store: iteration, learning rate, counter, scale, inner variables
        return {"step_counter": data["2"], "dynamic_scale": data["3"]}
    return {key.rsplit("/", 1)[-1].removesuffix(":0"): value for key, value in data.items() if isinstance(key, str)}


def _is_apex_key(key: str) -> bool:
    return key.startswith("loss_scaler") and key[len("loss_scaler") :].isdigit()


def _number(value: Any) -> float:
    """Read a Python number or a one-element array of any framework."""
    for _ in range(8):  # lists and arrays of one element, however deep
        if isinstance(value, (str, bytes, bool)) or value is None:
            break
        if isinstance(value, (int, float)):
            return value
        if isinstance(value, (list, tuple)):
            if len(value) != 1:
                break
            value = value[0]
        else:
            value = value.tolist() if callable(getattr(value, "tolist", None)) else float(value)
    raise ValueError(f"{shown(value)} is not a number")


def _whole(value: Any) -> int:
    number = _number(value)
    if number != int(number):
        raise ValueError(f"{shown(value)} is not a whole number")
    return int(number)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool) and value not in (0, 1):
        raise ValueError(f"{shown(value)} is neither True nor False")
    return bool(value)


def _make(scale: Any, tracker: Any, hysteresis_left: Any = None, **config: Any) -> GroupState:
    value = _number(scale)
    if not FLOAT32_TINY <= value <= FLOAT32_MAX:
        raise ValueError(f"scale {shown(value)} is not a positive finite float32 number")
    value = round_to_float32(value)
    # The bounds are widened where the library let the scale leave ours, so that the trace can go on from there.
    default = LossScale()
    bounds = {"min_scale": min(default.min_scale, value), "max_scale": max(default.max_scale, value)}
    loss_scale = LossScale(**{**bounds, **config})
    left = loss_scale.hysteresis if hysteresis_left is None else _whole(hysteresis_left)
    return loss_scale, {0: LossScaleState(value, _whole(tracker), left, 0)}


def _read_apex(data: Fields) -> GroupState:
    configs, states = [], {}
    for key in filter(_is_apex_key, data):
        entry = data[key]
        config, state = _make(entry["loss_scale"], entry["unskipped"])
        configs.append(config)
        states[int(key[len("loss_scaler") :])] = state[0]
    lowest, highest = min(each.min_scale for each in configs), max(each.max_scale for each in configs)
    return LossScale(min_scale=lowest, max_scale=highest), states


def _read_torch(data: Fields) -> GroupState:
    return _make(
        data["scale"],
        data["_growth_tracker"],
        growth_factor=_number(data["growth_factor"]),
        backoff_factor=_number(data["backoff_factor"]),
        growth_interval=_whole(data["growth_interval"]),
    )


def _read_paddle(data: Fields) -> GroupState:
    hysteresis = _whole(data["decr_every_n_nan_or_inf"])
    return _make(
        data["scale"],
        data["incr_count"],
        hysteresis - _whole(data["decr_count"]),
        hysteresis=hysteresis,
        growth_factor=_number(data["incr_ratio"]),
        backoff_factor=_number(data["decr_ratio"]),
        growth_interval=_whole(data["incr_every_n_steps"]),
        dynamic=_flag(data.get("use_dynamic_loss_scaling", True)),
    )


def _read_keras(data: Fields) -> GroupState:
    return _make(
        data["dynamic_scale"],
        data["step_counter"],
        growth_interval=_whole(data.get("dynamic_growth_steps", 2000)),
    )


def _read_flax(data: Fields) -> GroupState:
    # flax grows one step late: its interval of N acts as N + 1 finite steps.
    return _make(
        data["scale"],
        data["fin_steps"],
        growth_factor=_number(data.get("growth_factor", 2.0)),
        backoff_factor=_number(data.get("backoff_factor", 0.5)),
        growth_interval=_whole(data.get("growth_interval", 2000)) + 1,
    )


def _read_tf1(data: Fields) -> GroupState:
    factor = _number(data.get("multiplier", 2.0))
    return _make(
        data["current_loss_scale"],
        data["good_steps"],
        growth_factor=factor,
        backoff_factor=1 / factor,
        growth_interval=_whole(data.get("increment_period", data.get("dynamic_growth_steps", 2000))),
    )


def _read_deepspeed(data: Fields) -> GroupState:
    if not _flag(data.get("dynamic_loss_scale", data.get("dynamic", True))):
        return _make(data["cur_scale"], 0, dynamic=False)
    factor, window = _number(data.get("scale_factor", 2.0)), _whole(data.get("scale_window", 1000))
    # DeepSpeed grows on a finite step that has a positive multiple of `window` finite steps right before it: the
    # first time after window + 1 finite steps, which is what an overflow is followed by.
    before = _whole(data["cur_iter"]) - _whole(data["last_overflow_iter"]) - 1
    left = _whole(data.get("cur_hysteresis", data.get("delayed_shift", 1)))
    return _make(
        data["cur_scale"],
        (before - 1) % window + 1 if before > 0 else before,
        left,
        hysteresis=_whole(data.get("delayed_shift", left)),
        growth_factor=factor,
        backoff_factor=1 / factor,
        growth_interval=window + 1,
    )


# The key that only this library has, its name, and how to read its fields.
_READERS: Final[tuple[tuple[str, str, Callable[[Fields], GroupState]], ...]] = (
    ("loss_scaler0", "apex", _read_apex),
    ("_growth_tracker", "torch", _read_torch),
    ("incr_count", "paddle", _read_paddle),
    ("dynamic_scale", "keras", _read_keras),
    ("current_loss_scale", "tensorflow", _read_tf1),
    ("fin_steps", "flax", _read_flax),
    ("cur_scale", "deepspeed", _read_deepspeed),
)
