"""A gluon trainer whose whole being is another trainer's."""

from __future__ import annotations

from typing import Any

from .compat import mx


class Delegated:
    """A name of gluon's trainer that is looked up, and set, on the raw trainer instead."""

    def __init__(self, name: str) -> None:
        """Remember the name."""
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        """Return the raw trainer's; asked of the class, gluon's."""
        return getattr(mx.gluon.Trainer if instance is None else instance.trainer, self._name)

    def __set__(self, instance: Any, value: Any) -> None:
        """Set the raw trainer's."""
        setattr(instance.trainer, self._name, value)


class DelegatingTrainer(mx.gluon.Trainer):  # type: ignore[misc]
    """Looks to MXNet like the raw trainer it holds: parameters, state and learning rate are that one's.

    The base class's `__init__` is never called: it would take the parameters away from the raw trainer.

    Attributes:
        trainer: The raw trainer.
    """

    trainer: Any


# Every method and property, private ones included: MXNet's own modules call many of them from outside.
for _name in vars(mx.gluon.Trainer):
    if not _name.startswith("__"):
        setattr(DelegatingTrainer, _name, Delegated(_name))
