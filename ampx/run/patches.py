"""The points at which a framework is patched: a function, a method or a property, and what replaces it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

Point = tuple[Any, str, Callable[[Any], Any]]


@contextmanager
def patched(*points: Point) -> Iterator[None]:
    """Replace attributes inside the region; at its end they are as they were.

    Args:
        *points: Owner, name, and a function that takes what stands there and returns what stands there inside.
    """
    with ExitStack() as stack:
        for owner, name, replacement in points:
            stack.enter_context(mock.patch.object(owner, name, replacement(getattr(owner, name))))
        yield
