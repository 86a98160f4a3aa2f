"""Assertions that several kit tests share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def refused(error: type[Exception], *, passed: str, accepted: str, advice: str) -> Iterator[None]:
    """Expect exactly this error, with a message of three parts: what was passed, what is accepted, what to do."""
    with pytest.raises(error) as caught:
        yield
    assert caught.type is error
    message = str(caught.value)
    for part, text in (("passed", passed), ("accepted", accepted), ("to do", advice)):
        assert text in message, f"the message does not say what {'is' if part != 'passed' else 'was'} {part}: {message}"


def json_copy(state: Any) -> Any:
    """Send a state through JSON; equality shows that it was plain JSON before."""
    copy = json.loads(json.dumps(state, allow_nan=False))
    assert copy == state
    return copy
