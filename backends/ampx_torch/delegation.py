"""A torch optimizer that delegates everything to another: beside it, or in its place.

A wrapper that delegates is a second object; a trainer, a scheduler or a dictionary made before it would go on
stepping the first. `take_over` makes the user's own object the wrapper, and what it was lives on in a twin of its
original class. Schedulers made before stay right, and `isinstance` tells the original class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from ampx.errors import UnsupportedByBackendError

_set_class: Callable[[object, type], None] = object.__dict__["__class__"].__set__


def of_raw(name: str) -> Any:
    """Return a property that is read, and set, on the raw optimizer."""

    def read(self: Any) -> Any:
        return getattr(self.optimizer, name)

    def write(self: Any, value: Any) -> None:
        setattr(self.optimizer, name, value)

    return property(read, write)


class DelegatingOptimizer(torch.optim.Optimizer):
    """Looks to torch like the raw optimizer it holds: groups, state, hooks and checkpoints are that one's.

    The base class's `__init__` is never called: it would make a second set of parameter groups.
    """

    optimizer: torch.optim.Optimizer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "optimizer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    state = of_raw("state")
    param_groups = of_raw("param_groups")
    defaults = of_raw("defaults")

    def state_dict(self) -> dict[str, Any]:
        """Return the raw optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the raw optimizer's state."""
        self.optimizer.load_state_dict(state_dict)


class TakenOver(DelegatingOptimizer):
    """An optimizer that was taken over."""

    # Names that are set on the wrapper; all others are set on the raw optimizer, whose methods read them.
    own: ClassVar[frozenset[str]] = frozenset()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The raw optimizer's class, so that `isinstance(opt, torch.optim.SGD)` goes on to hold."""
        raw = self.__dict__.get("optimizer")
        return type(self) if raw is None else type(raw)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "optimizer" or name in self.own or hasattr(type(self), name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.optimizer, name, value)

    def __getstate__(self) -> Any:
        return self.optimizer.__getstate__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as the raw optimizer, of its original class."""
        return self.optimizer.__reduce_ex__(protocol)


def take_over(optimizer: torch.optim.Optimizer, kind: type[TakenOver]) -> torch.optim.Optimizer:
    """Turn an optimizer into one of `kind`, in place, whose attributes the caller sets; return the raw optimizer.

    That is a twin of the original class, with all the attributes that the object had.
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
