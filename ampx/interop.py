"""Read the loss-scale states that other libraries save, into the portable form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from .errors import AmpxError, InvalidStateError, UnknownSchemaError
from .loss_scale import LossScale, LossScaleState, round_to_float32
from .state import SCHEMA, GroupState, dump_state, parse_state

Fields = Mapping[str, Any]


def import_state(data: object) -> dict[str, Any]:
    """Convert a saved loss-scale state of another library.

    Read are the dictionaries of apex (`amp.state_dict()`), torch (`GradScaler.state_dict()`), Paddle
    (`GradScaler.state_dict()`), Keras (`dynamic_scale`, `step_counter`), flax (`DynamicScale`) and DeepSpeed
    (the loss scaler's part of an optimizer state, or its fields). A state of ampx itself passes through
    after the same checks. Array values of one element count as numbers.

    What the dictionary does not hold is taken from the library it comes from: apex, Keras and flax save no
    factors, and use 2, 0.5 and an interval of 2000.

    Args:
        data: The dictionary.

    Returns:
        The state in the schema `ampx.loss_scale/1`, for `amp.load_state_dict`.

    Raises:
        UnknownSchemaError: It is none of these.
        InvalidStateError: It is one of these, but a value is missing or not acceptable.

    Sync: none; a value that lives on a device is copied to the host.
    """
    if not isinstance(data, Mapping):
        raise _unknown(f"a {type(data).__name__}")
    if data.get("schema") == SCHEMA:
        parse_state(data)
        return dict(data)
    for keys, name, read in _READERS:
        if keys <= data.keys() or (name == "apex" and any(_is_apex_key(key) for key in data)):
            try:
                state = dump_state(name, [read(data)])
                parse_state(state)
            except InvalidStateError:
                raise
            except (AmpxError, TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
                raise InvalidStateError(
                    f"the {name} state cannot be read: {error}; accepted: the dictionary as {name} saved it. "
                    f"The loss scale is unchanged."
                ) from error
            return state
    raise _unknown(f"a dict with the keys {', '.join(sorted(map(repr, data))) or '(none)'}")


def _unknown(passed: str) -> UnknownSchemaError:
    return UnknownSchemaError(
        f"the state is {passed}; accepted: a state of ampx, or a loss-scale dictionary of apex, torch GradScaler, "
        f"Paddle GradScaler, Keras LossScaleOptimizer, flax DynamicScale or DeepSpeed. Pass that part of the "
        f"checkpoint."
    )


def _is_apex_key(key: object) -> bool:
    return isinstance(key, str) and key.startswith("loss_scaler") and key[len("loss_scaler") :].isdigit()


def _number(value: Any) -> float:
    """Read a Python number or a one-element array of any framework."""
    if isinstance(value, (str, bool)) or value is None:
        raise TypeError(f"{value!r} is not a number")
    for _ in range(8):  # lists and arrays of one element, however deep
        if isinstance(value, (int, float)):
            return value
        if isinstance(value, (list, tuple)):
            (value,) = value
        else:
            value = value.tolist() if callable(getattr(value, "tolist", None)) else float(value)
    raise TypeError("nested too deeply to be a number")


def _whole(value: Any) -> int:
    number = _number(value)
    if number != int(number):
        raise ValueError(f"{value!r} is not a whole number")
    return int(number)


def _make(scale: Any, tracker: Any, hysteresis_left: Any = None, **config: Any) -> GroupState:
    value = round_to_float32(_number(scale))
    # The bounds are widened where the library let the scale leave ours, so that the trace can go on from there.
    default = LossScale()
    bounds = {"min_scale": min(default.min_scale, value), "max_scale": max(default.max_scale, value)}
    if not value > 0:
        raise ValueError(f"scale {value!r} is not positive")
    init = min(max(default.init_scale, bounds["min_scale"]), bounds["max_scale"])
    made = LossScale(**{"init_scale": init, **bounds, **config})
    left = made.hysteresis if hysteresis_left is None else _whole(hysteresis_left)
    return made, {0: LossScaleState(value, _whole(tracker), left, 0)}


def _read_apex(data: Fields) -> GroupState:
    config, states = LossScale(), {}
    for key in sorted(filter(_is_apex_key, data)):
        entry = data[key]
        config, state = _make(entry["loss_scale"], entry["unskipped"])
        states[int(key[len("loss_scaler") :])] = state[0]
    return config, states


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
        dynamic=bool(data.get("use_dynamic_loss_scaling", True)),
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


def _read_deepspeed(data: Fields) -> GroupState:
    factor, window = _number(data.get("scale_factor", 2.0)), _whole(data.get("scale_window", 1000))
    tracker = _whole(data["cur_iter"]) - _whole(data["last_overflow_iter"]) - 1
    hysteresis = _whole(data.get("delayed_shift", 1))
    return _make(
        data["cur_scale"],
        max(tracker, 0) % window,
        data.get("cur_hysteresis", hysteresis),
        hysteresis=hysteresis,
        growth_factor=factor,
        backoff_factor=1 / factor,
        growth_interval=window,
        dynamic=bool(data.get("dynamic_loss_scale", True)),
    )


_READERS: Final[tuple[tuple[set[str], str, Callable[[Fields], GroupState]], ...]] = (
    ({"loss_scaler0"}, "apex", _read_apex),
    ({"scale", "_growth_tracker"}, "torch", _read_torch),
    ({"scale", "incr_count"}, "paddle", _read_paddle),
    ({"dynamic_scale", "step_counter"}, "keras", _read_keras),
    ({"scale", "fin_steps"}, "flax", _read_flax),
    ({"cur_scale", "cur_iter"}, "deepspeed", _read_deepspeed),
)
