"""Whose parameters are whose: every parameter belongs to the optimizer made last that holds it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from .managed import Managed


class Owners:
    """Which optimizer a parameter belongs to."""

    def __init__(self) -> None:
        """Start with none."""
        self._owners: dict[int, weakref.ref[Managed]] = {}  # weak, so that optimizers go when the script drops them
        self._counted = 0

    def of(self, key: int) -> Managed | None:
        """Return the optimizer of a parameter, by its id."""
        reference = self._owners.get(key)
        return None if reference is None else reference()

    def sort(self, managed: Sequence[Managed]) -> None:
        """Look up anew whose parameters are whose, where optimizers or parameters came or went."""
        count = sum(len(group["params"]) for one in managed for group in one.raw.param_groups)
        if count != self._counted or any(self.of(id(p)) is None for p in _first_parameters(managed)):
            self._owners = {
                id(parameter): weakref.ref(one)
                for one in managed
                for group in one.raw.param_groups
                for parameter in group["params"]
            }
            self._counted = count

    def shares(self, managed: Managed) -> bool:
        """Return whether another optimizer owns some of its parameters; `sort` comes first."""
        return any(self.of(id(p)) is not managed for group in managed.raw.param_groups for p in group["params"])


def _first_parameters(managed: Sequence[Managed]) -> Iterator[Any]:
    for one in managed:
        for group in one.raw.param_groups:
            yield from group["params"][:1]
