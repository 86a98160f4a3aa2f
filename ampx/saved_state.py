"""The portable state: plain JSON types under the schema `ampx.loss_scale/1`, and the loss scales of a session in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import islice
from typing import Any, Final, TypeGuard

from . import callers
from .errors import AmpxError, AmpxWarning, InvalidStateError, StateError, UnknownSchemaError, shown
from .protocol import ScaleGroup
from .scale_state import FLOAT32_MAX, FLOAT32_TINY, LossScale, LossScaleState, round_to_float32

SCHEMA: Final = "ampx.loss_scale/1"
_STATE_FIELDS: Final = tuple(field.name for field in fields(LossScaleState))
GroupState = tuple[LossScale, dict[int, LossScaleState]]


def dump_state(framework: str | None, groups: Sequence[GroupState]) -> dict[str, Any]:
    """Return the portable form of some loss scales."""
    return {
        "schema": SCHEMA,
        "framework": framework,
        "groups": [
            {
                "config": asdict(config),
                "losses": [{"loss_id": key, **asdict(states[key])} for key in sorted(states)],
            }
            for config, states in groups
        ],
    }


def parse_state(data: object) -> list[GroupState]:
    """Read the portable form, checking every value."""
    try:
        return _parse(data)
    except StateError:
        raise
    except Exception as error:  # a value's own methods: the comparison of an array, a subclass of dict
        raise InvalidStateError(
            f"the state cannot be loaded: reading it raises {type(error).__name__}; accepted: plain JSON types. The "
            f"loss scale is unchanged; pass a state that state_dict() or import_state() returned."
        ) from error


def has_schema(data: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether this is a state of ampx, of the present schema."""
    schema = data.get("schema") if isinstance(data, Mapping) else None
    return isinstance(schema, str) and schema == SCHEMA


def refuse_session_state(state: object, call: str) -> None:
    """Raise where an optimizer is asked to load the state of a session.

    Args:
        state: What was passed.
        call: The method of the optimizer.

    Raises:
        InvalidStateError: It is a state of ampx.
    """
    if has_schema(state):
        raise InvalidStateError(
            f"{call} of an optimizer got what amp.state_dict() returns: the loss scales of a session, not the state of "
            f"an optimizer; accepted: what opt.state_dict() returned. Nothing has changed; load this one by "
            f"amp.load_state_dict(state)."
        )


def outline(data: object) -> str:
    """Return what kind of state something is, as an error message shows it."""
    if not isinstance(data, Mapping):
        return f"a {type(data).__name__}"
    keys = ", ".join(map(shown, islice(data, 8)))[:300]
    return f"a dict with the keys {keys or '(none)'}{', …' if len(data) > 8 else ''}"


def _parse(data: object) -> list[GroupState]:
    if not has_schema(data):
        schema = data.get("schema") if isinstance(data, Mapping) else None
        passed = outline(data) if schema is None else f"of the schema {shown(schema)}"
        raise UnknownSchemaError(
            f"the state is {passed}; accepted: what amp.state_dict() returned, of the schema {SCHEMA!r}. Pass that; "
            f"give the state of an optimizer or a model to its own load_state_dict, and convert the loss scale of "
            f"another library with ampx.import_state(d)."
        )
    groups = data.get("groups")
    if not isinstance(groups, Sequence) or isinstance(groups, str):
        raise _invalid("groups", groups, "a list with one entry a loss scale")
    return [_parse_group(group, f"groups[{position}]") for position, group in enumerate(groups)]


def _parse_group(group: object, where: str) -> GroupState:
    if not isinstance(group, Mapping):
        raise _invalid(where, group, "a dict with 'config' and 'losses'")
    config_data, losses = group.get("config"), group.get("losses")
    names = {field.name for field in fields(LossScale)}
    if not isinstance(config_data, Mapping) or set(config_data) != names:
        raise _invalid(f"{where}.config", config_data, f"a dict with exactly {', '.join(sorted(names))}")
    try:
        config = LossScale(**config_data)
    except AmpxError as error:
        raise InvalidStateError(f"the state cannot be loaded: {where}.config: {error}") from error
    if not isinstance(losses, Sequence) or isinstance(losses, str) or not losses:
        raise _invalid(f"{where}.losses", losses, "a list with one entry a loss id")
    states = _parse_losses(losses, f"{where}.losses")
    return config if config.dynamic else _static_config(config, states, where), states


def _static_config(config: LossScale, states: Mapping[int, LossScaleState], where: str) -> LossScale:
    """Return the configuration of a static loss scale, which says what it is: others look there whether it is 1."""
    scales = sorted({state.scale for state in states.values()})
    if len(scales) > 1:
        raise _invalid(f"{where}.losses", scales, "one scale for all losses, where it is static")
    same = round_to_float32(config.init_scale) == scales[0]
    return config if same else replace(config, init_scale=scales[0])


def _parse_losses(losses: Sequence[object], where: str) -> dict[int, LossScaleState]:
    states: dict[int, LossScaleState] = {}
    for position, loss in enumerate(losses):
        place = f"{where}[{position}]"
        if not isinstance(loss, Mapping):
            raise _invalid(place, loss, "a dict")
        loss_id = loss.get("loss_id")
        if not isinstance(loss_id, int) or isinstance(loss_id, bool) or not 0 <= loss_id < 2**63 or loss_id in states:
            raise _invalid(f"{place}.loss_id", loss_id, "an integer from 0 to 2**63 - 1 that occurs once")
        states[loss_id] = parse_loss_state(loss, place)
    return states


def parse_loss_state(data: Mapping[str, Any], where: str) -> LossScaleState:
    """Read one loss scale's four numbers."""
    missing = [name for name in _STATE_FIELDS if name not in data]
    if missing:
        raise _invalid(where, sorted(map(str, data)), f"a dict that also has {', '.join(missing)}")
    scale = data["scale"]
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if not number or not FLOAT32_TINY <= scale <= FLOAT32_MAX:
        raise _invalid(f"{where}.scale", scale, "a positive finite float32 number")
    for name in _STATE_FIELDS[1:]:
        value = data[name]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
            raise _invalid(f"{where}.{name}", value, "an integer from 0 to 2**31 - 1")
    return LossScaleState(round_to_float32(scale), *(data[name] for name in _STATE_FIELDS[1:]))


def _invalid(where: str, value: object, accepted: str) -> InvalidStateError:
    return InvalidStateError(
        f"the state cannot be loaded: {where} is {shown(value)}; accepted: {accepted}. The loss scale is unchanged; "
        f"pass a state that state_dict() or import_state() returned."
    )


def dump_session(framework: str, groups: Sequence[ScaleGroup]) -> dict[str, Any]:
    """Return the portable state of some loss scales. Sync: as their ledgers need."""
    for group in groups:
        group.resolve()
    return dump_state(framework, [(group.config, group.states) for group in groups if group.enabled])


def load_session(state: object, groups: Sequence[ScaleGroup]) -> None:
    """Put the states of a portable state into some loss scales; all or none.

    Sync: as their ledgers need.
    """
    saved = parse_state(state)
    if not saved and groups:
        callers.warn(
            "the state holds no loss scale: it was saved with mixed precision disabled, or by a session without "
            "wrapped optimizers; the current ones stay. Save it with enabled=True, by the session that wrapped the "
            "optimizers, if a run is to go on with its loss scales.",
            AmpxWarning,
        )
        return
    if len(saved) != len(groups):
        raise InvalidStateError(
            f"the state holds {len(saved)} loss scales, and {len(groups)} of wrapped optimizers are to take them over; "
            f"accepted: as many as wrap_optimizer made (a list of optimizers makes one). Wrap the same optimizers "
            f"before loading, or load one with amp.load_state_dict(state, opt)."
        )
    matching = []
    for group, (config, states) in zip(groups, saved, strict=True):
        if config.dynamic == group.config.dynamic:
            matching.append((group, config, states))
            continue
        now, then = _kind(group.config.dynamic), _kind(config.dynamic)
        callers.warn(
            f"the state of loss scale {group.index} was saved with a {then} loss scale and this run has a {now} one "
            f"(another dtype or loss_scale); the current loss scale {group.states[0].scale:g} stays. Pass init the "
            f"dtype and loss_scale of the saved run if it is to go on as it was.",
            AmpxWarning,
        )
    for group, config, states in matching:  # only now: a warning may be an error, and then nothing is loaded
        group.load(config, states)


def _kind(dynamic: bool) -> str:
    return "dynamic" if dynamic else "static"
