"""Save and load the loss scales of a session."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from .errors import AmpxWarning, InvalidStateError
from .group import ScaleGroup
from .state import dump_state, parse_state


def dump_session(framework: str, groups: Sequence[ScaleGroup]) -> dict[str, Any]:
    """Give the portable state of some loss scales. Sync: as their ledgers need."""
    for group in groups:
        group.resolve()
    return dump_state(framework, [(group.config, group.states) for group in groups if group.enabled])


def load_session(state: object, groups: Sequence[ScaleGroup]) -> None:
    """Give some loss scales the states of a portable state; all or none.

    Raises:
        UnknownSchemaError: The state is of another schema.
        InvalidStateError: A value is not acceptable, or the numbers of loss scales differ.

    Sync: as their ledgers need.
    """
    saved = parse_state(state)
    if not saved and groups:
        warnings.warn(
            "the state was saved with mixed precision disabled and holds no loss scale; the current ones stay.",
            AmpxWarning,
            stacklevel=3,
        )
        return
    if len(saved) != len(groups):
        raise InvalidStateError(
            f"the state holds {len(saved)} loss scales, but {len(groups)} are to be loaded; accepted: as many as "
            f"wrap_optimizer made (a list of optimizers makes one). Wrap the same optimizers before loading, or load "
            f"one with amp.load_state_dict(state, opt)."
        )
    matching = []
    for group, (config, states) in zip(groups, saved, strict=True):
        if config.dynamic == group.config.dynamic:
            matching.append((group, config, states))
            continue
        now, then = _kind(group.config.dynamic), _kind(config.dynamic)
        warnings.warn(
            f"the state of loss scale {group.index} was saved with a {then} loss scale and this run has a {now} "
            f"one (another dtype or loss_scale); the current loss scale {group.states[0].scale:g} stays.",
            AmpxWarning,
            stacklevel=3,
        )
    for group, config, states in matching:  # only now: a warning may be an error, and then nothing is loaded
        group.load(config, states)


def _kind(dynamic: bool) -> str:
    return "dynamic" if dynamic else "static"
