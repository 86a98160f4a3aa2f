"""Programs and scopes by the names of `fluid`, on those of Paddle's static graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import paddle
from paddle.base.libpaddle import pir

from .missing import refuse_missing

__all__ = [
    "Program",
    "Scope",
    "default_main_program",
    "default_startup_program",
    "global_scope",
    "name_scope",
    "program_guard",
    "scope_guard",
]


class Program:
    """A program of a static graph, with `clone(for_test=True)` as in fluid.

    Attributes:
        program: Paddle's own.
    """

    def __init__(self, program: Any = None, values: Any = None) -> None:
        """Make an empty program, or stand for one of Paddle's; `values` leads from another program's values here."""
        self.program = paddle.static.Program() if program is None else program
        self._values = values

    def clone(self, for_test: bool = False) -> Program:
        """Copy the program as it is now.

        Args:
            for_test: Dropout and batch normalisation compute as in inference. To be called before `minimize`.

        Returns:
            The copy; `Executor.run` finds values of this program in it.

        Sync: none.
        """
        values = pir.IrMapping()
        copy = self.program.clone(values)
        if for_test:
            copy.set_is_test_attr()
        return Program(copy, values)

    def find(self, value: Any) -> Any:
        """Give what stands here for a value of the program that this is a clone of; the value itself otherwise."""
        return self._values.look_up(value) if self._values is not None and self._values.has(value) else value

    def all_parameters(self) -> list[Any]:
        """List the trainable parameters. Sync: none."""
        found: list[Any] = self.program.global_block().all_parameters()
        return found

    @property
    def random_seed(self) -> int:
        """The seed of the program."""
        return int(self.program.random_seed)

    @random_seed.setter
    def random_seed(self, seed: int) -> None:
        # In these graphs the operators of a program draw from the generator of the process.
        paddle.seed(seed)
        self.program.random_seed = seed

    def __getattr__(self, name: str) -> Any:
        """Look the rest up on Paddle's program."""
        if name.startswith("__") or "program" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.program, name)

    def __eq__(self, other: object) -> bool:
        """Tell whether both stand for the same program."""
        return isinstance(other, Program) and other.program is self.program

    def __hash__(self) -> int:
        """Hash as the program."""
        return id(self.program)

    def __str__(self) -> str:
        """Print the program."""
        return str(self.program)


def raw(program: Any) -> Any:
    """Give Paddle's program for one of these; others, and None, are returned as they are. Sync: none."""
    return program.program if isinstance(program, Program) else program


def default_main_program() -> Program:
    """Give the program that is built. Sync: none."""
    return Program(paddle.static.default_main_program())


def default_startup_program() -> Program:
    """Give the program that initialises parameters. Sync: none."""
    return Program(paddle.static.default_startup_program())


@contextmanager
def program_guard(main_program: Any, startup_program: Any = None) -> Iterator[None]:
    """Build these programs inside. Sync: none."""
    with paddle.static.program_guard(raw(main_program), raw(startup_program)):
        yield


Scope = paddle.base.core.Scope
global_scope = paddle.static.global_scope
scope_guard = paddle.static.scope_guard
name_scope = paddle.static.name_scope

__getattr__ = refuse_missing(__name__)
