"""Assertions that several kit tests share."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def refused(error: type[Exception], *, passed: str, accepted: str, advice: str, hint: str = "") -> Iterator[None]:
    """Expect exactly this error, with a message of three parts: what was passed, what is accepted, what to do.

    Args:
        error: The error.
        passed: Text of the first part.
        accepted: Text of the second.
        advice: Text of the third.
        hint: What an author may do if nothing is raised.
    """
    __tracebackhide__ = True  # what failed is the line of the test
    caught: Exception | None = None
    try:
        yield
    except error as raised:
        caught = raised
    if caught is None:
        pytest.fail(f"nothing was raised; expected: {error.__name__} with {passed!r} in its message. {hint}".rstrip())
    assert type(caught) is error
    message = str(caught)
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
