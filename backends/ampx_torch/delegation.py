"""A torch optimizer whose whole being is another optimizer's."""

from __future__ import annotations

from typing import Any

import torch


class DelegatingOptimizer(torch.optim.Optimizer):
    """Looks to torch like the raw optimizer it holds: groups, state, hooks and checkpoints are that one's.

    The base class's `__init__` is never called: it would make a second set of parameter groups.

    Attributes:
        optimizer: The raw optimizer.
    """

    optimizer: torch.optim.Optimizer

    def __getattr__(self, name: str) -> Any:
        """Look the rest up on the raw optimizer."""
        if name.startswith("__") or "optimizer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def state(self) -> Any:
        """The raw optimizer's state."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The raw optimizer's parameter groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def defaults(self) -> dict[str, Any]:
        """The raw optimizer's defaults."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.optimizer.defaults = value

    def state_dict(self) -> dict[str, Any]:
        """Return the raw optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the raw optimizer's state."""
        self.optimizer.load_state_dict(state_dict)
