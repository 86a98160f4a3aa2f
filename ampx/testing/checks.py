"""Assertions that several kit tests share."""

from __future__ import annotations

import json
import re
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
    parts = [part for part in re.split(r"[;:,.)] ", message) if part]
    assert len(parts) >= 3, f"the message has no three parts: {message}"
    assert message.endswith("."), f"the message breaks off: {message}"
    for part, text in (("passed", passed), ("accepted", accepted), ("to do", advice)):
        assert text in message, f"the message does not say what {'is' if part != 'passed' else 'was'} {part}: {message}"


def json_copy(state: Any) -> Any:
    """Send a state through JSON; equality shows that it was plain JSON before."""
    copy = json.loads(json.dumps(state, allow_nan=False))
    assert copy == state
    return copy
