"""A trainer's states on disk, with the loss scale in them."""

from __future__ import annotations

from typing import Any, Final

from ampx.protocol import ScaleGroup
from ampx.saved_state import dump_session, load_session

# Under this name the optimizer in the file carries the loss scale: an attribute that plain MXNet takes along.
_SAVED: Final = "ampx_loss_scale"


def save(trainer: Any, group: ScaleGroup, path: str) -> None:
    """Save a raw trainer's states and the loss scale; plain MXNet reads the file too. Sync: as MXNet's."""
    optimizer = trainer._optimizer
    if group.enabled:
        setattr(optimizer, _SAVED, dump_session("mxnet", [group]))
    try:
        trainer.save_states(path)
    finally:
        vars(optimizer).pop(_SAVED, None)


def load(trainer: Any, group: ScaleGroup, path: str) -> None:
    """Load a raw trainer's states, and the loss scale where the file has one.

    Raises:
        UnknownSchemaError, InvalidStateError: The loss scale in it cannot be read; the states are loaded all the same.

    Sync: as MXNet's.
    """
    trainer.load_states(path)
    saved = vars(trainer._optimizer).pop(_SAVED, None)
    if saved is not None and group.enabled:
        load_session(saved, [group])
