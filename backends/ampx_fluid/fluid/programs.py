"""Programs and scopes by the names of `fluid`, on those of Paddle's static graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import paddle
from paddle.base.libpaddle import pir

from ampx.errors import InvalidOptionError, UnsupportedByBackendError

from .missing import refuse_missing

__all__ = [
    "CompiledProgram",
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
        """Copy the program as it is now; `Executor.run` finds values of this program in the copy.

        With `for_test` dropout and batch normalisation compute as in inference; to be called before `minimize`.
        """
        values = pir.IrMapping()
        copy = self.program.clone(values)
        if for_test:
            copy.set_is_test_attr()
        return Program(copy, values)

    def find(self, value: Any) -> Any:
        """Return this clone's counterpart of a value of the original program; the value itself otherwise."""
        return self._values.look_up(value) if self._values is not None and self._values.has(value) else value

    def all_parameters(self) -> list[Any]:
        """List the trainable parameters."""
        parameters: list[Any] = self.program.global_block().all_parameters()
        return parameters

    @property
    def random_seed(self) -> int:
        """The seed of the program."""
        return int(self.program.random_seed)

    @random_seed.setter
    def random_seed(self, seed: int) -> None:
        # In these graphs the operators of a program draw from the generator of the process.
        paddle.seed(seed)
        self.program.random_seed = seed

    def global_block(self) -> Block:
        """Return the block that holds all others."""
        return Block(self.program)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "program" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.program, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and other.program is self.program

    def __hash__(self) -> int:
        return id(self.program)

    def __str__(self) -> str:
        return str(self.program)


class Block:
    """The outermost block of a program, in which values are found by name as in fluid."""

    def __init__(self, program: Any) -> None:
        """Stand for that of one of Paddle's programs."""
        self._program = program

    def var(self, name: str) -> Any:
        """Return the input or the parameter of a name."""
        for value in self._program.list_vars():
            if value.has_name and value.name == name:
                return value
        raise InvalidOptionError(
            f"var got {name!r}, which is no input or parameter of the program; accepted: their names. Use the value "
            f"that the layer returned: other values have no names in Paddle 3."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_program" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._program.global_block(), name)


class CompiledProgram(Program):
    """The same program: Paddle 3 compiles every one."""

    def __init__(self, program: Any, build_strategy: Any = None) -> None:
        """Stand for a program of fluid or Paddle; the strategy is Paddle's own choice."""
        values = program._values if isinstance(program, Program) else None
        super().__init__(raw(program), values)

    def with_data_parallel(
        self,
        loss_name: str | None = None,
        build_strategy: Any = None,
        exec_strategy: Any = None,
        share_vars_from: Any = None,
        places: Any = None,
    ) -> CompiledProgram:
        """Return the same program, for one device."""
        if isinstance(places, (list, tuple)) and len(places) > 1:
            raise UnsupportedByBackendError(
                f"with_data_parallel got {len(places)} places; accepted: one. Leave `places` out, and start one "
                f"process a device with paddle.distributed.launch for more."
            )
        return self


def widened(value: Any) -> Any:
    """Return the float32 that the program makes of a value which `decorate` has cast; others as they are."""
    if value.dtype not in (paddle.float16, paddle.bfloat16):
        return value
    casts = [operation.result(0) for operation in value.all_used_ops() if operation.name() == "pd_op.cast"]
    return next((wide for wide in casts if wide.dtype == paddle.float32), value)


def raw(program: Any) -> Any:
    """Return Paddle's program for one of these; others, and None, are returned as they are."""
    return program.program if isinstance(program, Program) else program


def default_main_program() -> Program:
    """Return the program that is built."""
    return Program(paddle.static.default_main_program())


def default_startup_program() -> Program:
    """Return the program that initialises parameters."""
    return Program(paddle.static.default_startup_program())


@contextmanager
def program_guard(main_program: Any, startup_program: Any = None) -> Iterator[None]:
    """Build these programs inside."""
    with paddle.static.program_guard(raw(main_program), raw(startup_program)):
        yield


Scope = paddle.base.core.Scope
global_scope = paddle.static.global_scope
scope_guard = paddle.static.scope_guard
name_scope = paddle.static.name_scope

__getattr__ = refuse_missing(__name__)
