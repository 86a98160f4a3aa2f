"""Mutants judged by the kit: its tests run as plain functions, without a pytest session for each."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal

import pytest
from hypothesis import Phase, settings

import ampx
from ampx.plugins import default_registry
from ampx.testing import BackendSuite
from ampx.testing.base import KitTests
from toy.mutation import Mutant

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


class _Plugin:
    """Registers one mutant."""

    def __init__(self, name: str, backend: type[ampx.Backend]) -> None:
        self.name = name
        self.backend = backend

    @ampx.hookimpl
    def ampx_register_backends(self, register: ampx.Register) -> None:
        """Register it."""
        register(self.name, self.backend, roots=("toy",), requires="ampx")


def suite_for(mutant: Mutant, base: type[KitTests] = BackendSuite, **attributes: Any) -> type[KitTests]:
    """Return the suite of a mutant, with few and unshrunk random cases."""
    name = f"mutant-{mutant.name}"
    backend = type(mutant.name, (mutant.backend,), {"name": name})
    if name not in default_registry().names():
        ampx.register_plugin(_Plugin(name, backend), name)
    harness = type(f"{mutant.name}Harness", (mutant.harness,), {"framework": name})
    few = settings(
        max_examples=15,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate,),
        report_multiple_bugs=False,
    )
    return type(f"{mutant.name}Suite", (base,), {"harness": harness, "hypothesis": few, **attributes})
