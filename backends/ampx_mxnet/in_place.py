"""Turn a trainer that a script holds into a wrapped one: the object stays, what it was moves into another."""

from __future__ import annotations

from typing import Any

from .compat import mx
from .delegation import Delegated


def move_out(trainer: Any, become: type) -> Any:
    """Move what a raw trainer is into a new object, and make the old one an empty instance of another class.

    Args:
        trainer: A raw trainer, of gluon's class or one made from it.
        become: The class of wrapped trainers that it turns into; its attributes are still to be set. A trainer of the
            script's own class becomes one of both classes.

    Returns:
        The raw trainer, as another object: same class, same attributes.
    """
    own = type(trainer)
    raw = object.__new__(own)
    vars(raw).update(vars(trainer))
    vars(trainer).clear()
    trainer.__class__ = become if own is mx.gluon.Trainer else _both(become, own)
    return raw


def move_back(trainer: Any, raw: Any) -> None:
    """Undo `move_out`."""
    vars(trainer).clear()
    trainer.__class__ = type(raw)
    vars(trainer).update(vars(raw))


def _both(become: type, own: type) -> type:
    """Make a class with the script's methods, whose data are the raw trainer's."""
    data = {
        name: Delegated(name)
        for one in own.__mro__[: own.__mro__.index(mx.gluon.Trainer)]
        for name, value in vars(one).items()
        if not name.startswith("__") and not callable(value) and not hasattr(type(value), "__get__")
    }
    both: type = type(become)(own.__name__, (become, own), data)
    return both
