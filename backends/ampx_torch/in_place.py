"""Make the user's own optimizer object the wrapped one, for code that keeps other references to it.

A wrapper that delegates is a second object; a trainer, a scheduler or a dictionary made before it would go on
stepping the first. Here the object keeps its identity and becomes the wrapper, and what it was lives on in a twin
of its original class. Schedulers made before stay right, and `isinstance` tells the original class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from ampx.errors import UnsupportedByBackendError

from .delegation import DelegatingOptimizer

_set_class: Callable[[object, type], None] = object.__dict__["__class__"].__set__


class TakenOver(DelegatingOptimizer):
    """An optimizer that was taken over.

    Attributes:
        own: Names that are set on the wrapper; all others are set on the raw optimizer, whose methods read them.
    """

    own: ClassVar[frozenset[str]] = frozenset()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The raw optimizer's class, so that `isinstance(opt, torch.optim.SGD)` goes on to hold."""
        raw = self.__dict__.get("optimizer")
        return type(self) if raw is None else type(raw)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set on the raw optimizer what is its own."""
        if name == "optimizer" or name in self.own or hasattr(type(self), name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.optimizer, name, value)

    def __getstate__(self) -> Any:
        """Return the raw optimizer's."""
        return self.optimizer.__getstate__()  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as the raw optimizer, of its original class."""
        return self.optimizer.__reduce_ex__(protocol)


def take_over(optimizer: torch.optim.Optimizer, kind: type[TakenOver]) -> torch.optim.Optimizer:
    """Turn an optimizer into one of `kind`, in place.

    Args:
        optimizer: Any optimizer whose class has no slots.
        kind: What it becomes; its attributes other than `optimizer` are to be set by the caller.

    Returns:
        The raw optimizer: a twin of the original class that has all the attributes the object had.

    Raises:
        UnsupportedByBackendError: Its class has slots, so that Python cannot change the class of an object.
    """
    raw: torch.optim.Optimizer = object.__new__(type(optimizer))
    attributes = optimizer.__dict__
    object.__setattr__(raw, "__dict__", attributes)
    try:
        _set_class(optimizer, kind)
    except TypeError as error:
        raise UnsupportedByBackendError(
            f"{type(optimizer).__name__} cannot be taken over in place: its class has __slots__; accepted: optimizers "
            f"whose attributes are in a __dict__. Remove __slots__, or use the object that ampx.wrap_optimizer returns."
        ) from error
    object.__setattr__(optimizer, "__dict__", {"optimizer": raw})
    if hasattr(attributes.get("step"), "_wrapped_by_lr_sched"):
        # A scheduler's own patch: it counts steps of the object, whose `step` is the wrapper's from now on.
        del attributes["step"]
    return raw


def give_back(optimizer: TakenOver) -> None:
    """Undo `take_over`."""
    raw = optimizer.optimizer
    object.__setattr__(optimizer, "__dict__", raw.__dict__)
    _set_class(optimizer, type(raw))
