"""A gluon trainer that delegates everything to another: beside it, or in its place."""

from __future__ import annotations

from typing import Any

from ampx.optimizer import Delegated, delegate

from .compat import mx


class DelegatingTrainer(mx.gluon.Trainer):
    """Looks to MXNet like the raw trainer it holds: parameters, state and learning rate are that one's.

    The base class's `__init__` is never called: it would take the parameters away from the raw trainer.
    """

    trainer: Any


delegate(DelegatingTrainer, mx.gluon.Trainer, "trainer")


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
        name: Delegated(mx.gluon.Trainer, "trainer", name)
        for base in own.__mro__[: own.__mro__.index(mx.gluon.Trainer)]
        for name, value in vars(base).items()
        if not name.startswith("__") and not callable(value) and not hasattr(type(value), "__get__")
    }
    both: type = type(become)(own.__name__, (become, own), data)
    return both
