"""A gluon trainer whose whole being is another trainer's: beside it, or in its place."""

from __future__ import annotations

from typing import Any

from .compat import mx


class Delegated:
    """A name of gluon's trainer that is looked up, and set, on the raw trainer instead."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        """Return the raw trainer's; asked of the class, gluon's."""
        return getattr(mx.gluon.Trainer if instance is None else instance.trainer, self._name)

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(instance.trainer, self._name, value)


class DelegatingTrainer(mx.gluon.Trainer):  # type: ignore[misc]
    """Looks to MXNet like the raw trainer it holds: parameters, state and learning rate are that one's.

    The base class's `__init__` is never called: it would take the parameters away from the raw trainer.
    """

    trainer: Any


# Every method and property, private ones included: MXNet's own modules call many of them from outside.
for _name in vars(mx.gluon.Trainer):
    if not _name.startswith("__"):
        setattr(DelegatingTrainer, _name, Delegated(_name))


def move_out(trainer: Any, become: type) -> Any:
    """Move a raw trainer into a new object, which is returned, and make the script's an empty one of another class.

    A trainer of the script's own class becomes one of both classes.
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
        for base in own.__mro__[: own.__mro__.index(mx.gluon.Trainer)]
        for name, value in vars(base).items()
        if not name.startswith("__") and not callable(value) and not hasattr(type(value), "__get__")
    }
    both: type = type(become)(own.__name__, (become, own), data)
    return both
