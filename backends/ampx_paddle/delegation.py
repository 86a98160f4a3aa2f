"""A Paddle optimizer whose whole being is another optimizer's."""

from __future__ import annotations

from typing import Any

import paddle


class Delegated:
    """A name of Paddle's base class that is looked up, and set, on the raw optimizer instead."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        """Return the raw optimizer's; asked of the class, the base class's."""
        return getattr(paddle.optimizer.Optimizer if instance is None else instance.optimizer, self._name)

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(instance.optimizer, self._name, value)


class DelegatingOptimizer(paddle.optimizer.Optimizer):  # type: ignore[misc]
    """Looks to Paddle like the raw optimizer it holds: parameters, state and learning rate are that one's.

    The base class's `__init__` is never called: it would make a second set of accumulators.
    """

    optimizer: Any


# Every method and property, private ones included: Paddle's own modules call many of them from outside.
for _name in vars(paddle.optimizer.Optimizer):
    if not _name.startswith("__"):
        setattr(DelegatingOptimizer, _name, Delegated(_name))
