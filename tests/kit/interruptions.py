"""Exceptions at every place of a call, as a Ctrl-C or a signal handler's time-out raises them.

Whatever is interrupted must leave training as it was, or refuse to go on until the gradients are cleared.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, TypeVar

import ampx.testing

Subject = TypeVar("Subject")
_COMPARED: Final = "Exception raised while checking equality of metadata fields"
_KIT: Final = str(Path(ampx.testing.__file__).parent) + os.sep  # it is in the package, and is what tests
_ENTERS: Final = ("BEFORE_WITH", "SETUP_WITH", "LOAD_SPECIAL")

THOROUGH: Final = bool(os.environ.get("AMPX_TEST_ALL"))


def sampled(stride: int, first: int = 1) -> dict[str, int | bool]:
    """Return the places to interrupt, as arguments of `interrupted_everywhere`.

    Args:
        stride: One of so many lines; with AMPX_TEST_ALL of lines and calls. Never every place: each runs all that
            stands before it, and a step has some thousand.
        first: The first place to take.
    """
    return {"stride": stride, "first": first, "after_calls": THOROUGH}


class Interruption(BaseException):
    """Raised in the middle of a call."""


def interrupted_everywhere(
    start: Callable[[], Subject],
    act: Callable[[Subject], object],
    packages: Sequence[str] = ("ampx",),
    *,
    after_calls: bool = False,
    stride: int = 1,
    first: int = 1,
    error: type[BaseException] = Interruption,
) -> Iterator[tuple[Subject, str]]:
    """Call `act` again and again, each time on a fresh subject and interrupted one place later.

    Python handles signals between lines and when a call in a line has returned.

    Args:
        start: Makes what `act` is called with; it runs undisturbed.
        act: What is interrupted. It is called until it comes to its end without being interrupted.
        packages: Import packages whose lines are interrupted; those of a framework run undisturbed.
        after_calls: Interrupt after every call, too, and not only before every line.
        stride: Take every place, every second, and so on.
        first: The first place to take.
        error: What is raised.

    Yields:
        The subject as the interruption left it, and the place, as file:line.
    """
    roots = tuple(map(_folder, packages))
    number = first - stride
    while True:
        number += stride
        subject, interruption = start(), _Interruption(number, roots, after_calls, error)
        before = sys.gettrace()
        sys.settrace(interruption.enter)
        try:
            act(subject)
        except BaseException as raised:
            # JAX raises an error of its own because of one that comes while it compares static values; from 0.12 on it
            # does not keep the other as the cause.
            # Of one in a callback of its runtime nothing but the text arrives.
            texts = (_COMPARED, f"{error.__name__}: {interruption.place}")
            interrupted = any(isinstance(each, error) for each in _causes(raised)) or any(
                text in str(raised) for text in texts
            )
            if interruption.place is None or not interrupted:
                raise
        finally:
            sys.settrace(before)
        if interruption.place is None:
            return
        yield subject, interruption.place


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it was raised because of."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _folder(package: str) -> str:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"package {package!r} is not importable")
    return str(Path(spec.origin).parent) + os.sep


class _Interruption:
    """A trace function that raises at one place."""

    def __init__(self, number: int, roots: tuple[str, ...], after_calls: bool, error: type[BaseException]) -> None:
        self.place: str | None = None  # where it raised; None before
        self._left = number
        self._roots = roots
        self._after_calls = after_calls
        self._error = error
        self._called: set[FrameType] = set()

    def enter(self, frame: FrameType, event: str, value: Any) -> Any:
        """Look at a function only if it lies in one of the packages."""
        file = frame.f_code.co_filename
        if self.place is not None or not file.startswith(self._roots) or file.startswith(_KIT):
            return None
        frame.f_trace_opcodes = self._after_calls
        return self._look

    def _look(self, frame: FrameType, event: str, value: Any) -> Any:
        if self.place is None and self._counts(frame, event):
            self._left -= 1
            if not self._left:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                self._called.clear()  # a frame keeps its region alive, which is to end with the exception
                raise self._error(self.place)
        return self._look

    def _counts(self, frame: FrameType, event: str) -> bool:
        leaves = frame.f_lasti in _exits(frame.f_code)
        if event == "line":
            return not leaves
        if event != "opcode":
            return False
        counts = frame in self._called and not leaves  # else what a signal raises belongs to the call, in the body
        if frame.f_lasti in _calls(frame.f_code):
            self._called.add(frame)
        else:
            self._called.discard(frame)
        return counts


@functools.cache
def _calls(code: CodeType) -> frozenset[int]:
    """Return where a function calls."""
    return frozenset(each.offset for each in dis.get_instructions(code) if each.opname.startswith("CALL"))


@functools.cache
def _exits(code: CodeType) -> frozenset[int]:
    """Return where a `with` statement's own line comes up a second time, to leave it; no signal is handled there."""
    lines = {offset: line for start, end, line in code.co_lines() for offset in range(start, end, 2)}
    entering = {
        lines.get(instruction.offset) for instruction in dis.get_instructions(code) if instruction.opname in _ENTERS
    }
    first: dict[int | None, int] = {}
    for offset in sorted(lines):
        first.setdefault(lines[offset], offset)
    return frozenset(offset for offset, line in lines.items() if line in entering and offset != first[line])
