"""Run kit tests as plain functions: how mutants are judged, without a pytest session for each."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal

import pytest

Verdict = Literal["passed", "failed", "skipped"]


def list_tests(suite: type) -> list[str]:
    """List the tests of a suite, inherited ones included."""
    return sorted(name for name, _ in inspect.getmembers(suite, inspect.isfunction) if name.startswith("test_"))


def judge(
    suite: type, test: str | Callable[[Any], None], patches: Iterable[contextlib.AbstractContextManager[Any]] = ()
) -> Verdict:
    """Run one test as pytest would: a fresh instance, set up and torn down, warnings as errors.

    Args:
        suite: The test class.
        test: Name of a method, or a function that takes the instance.
        patches: Entered around all of it.
    """
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("error")
        for patch in patches:
            stack.enter_context(patch)
        instance = suite()
        try:
            getattr(instance, "setup_method", lambda: None)()
            if callable(test):
                test(instance)
            else:
                getattr(instance, test)()
        except pytest.skip.Exception:
            return "skipped"
        except (Exception, pytest.fail.Exception):
            return "failed"
        finally:
            getattr(instance, "teardown_method", lambda: None)()
    return "passed"
