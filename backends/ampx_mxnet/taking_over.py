"""Turn a trainer that a script holds into a wrapped one: the object stays, what it was moves into another."""

from __future__ import annotations

from typing import Any


def move_out(trainer: Any, become: type) -> Any:
    """Move what a raw trainer is into a new object, and make the old one an empty instance of another class.

    Args:
        trainer: A raw trainer, of gluon's class or one made from it.
        become: The class of trainer that it turns into; its attributes are still to be set.

    Returns:
        The raw trainer, as another object: same class, same attributes.

    Sync: none.
    """
    raw = object.__new__(type(trainer))
    vars(raw).update(vars(trainer))
    vars(trainer).clear()
    trainer.__class__ = become
    return raw


def move_back(trainer: Any, raw: Any) -> None:
    """Undo `move_out`. Sync: none."""
    vars(trainer).clear()
    trainer.__class__ = type(raw)
    vars(trainer).update(vars(raw))
