"""Run a script or module as `python` does: same arguments, same `__main__`, same traceback."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType, TracebackType
from typing import Any, Final

from ampx.errors import InvalidOptionError


@dataclass(frozen=True)
class Program:
    """What to run."""

    name: str  # a file, a folder with a `__main__.py`, `-` for the standard input, or the name of a module
    is_module: bool = False  # it is the name of a module, as after `python -m`
    arguments: tuple[str, ...] = ()  # what the program finds in `sys.argv[1:]`

    def command(self, through: Sequence[str] = ()) -> list[str]:
        """Return the command line that runs it without ampx, or `through` a module with arguments."""
        return [sys.executable, *through, *(["-m"] if self.is_module else []), self.name, *self.arguments]


# Options of `ampx run`, `compare`, `diagnose` and `tune`, but those of one letter.
OPTIONS: Final = frozenset(
    {
        *("--at", "--color", "--device", "--dtype", "--for", "--force", "--framework", "--from", "--json", "--level"),
        *(
            "--log",
            "--log-every",
            "--out",
            "--policy",
            "--quiet",
            "--repeats",
            "--replace-native",
            "--report",
            "--seed",
            "--steps",
        ),
        *("--sweep", "--tolerance", "--unchanged-if-refused", "--what-if"),
    }
)
# How `argparse` and others like it end a program that got an option which it does not know.
WRONG_OPTIONS: Final = 2


def misplaced(program: Program) -> str:
    """Return a sentence where a program that refuses its arguments got an option of ampx's commands; "" for none."""
    names = [word.partition("=")[0] for word in program.arguments]
    option = next((name for name in names if name in OPTIONS), None)
    if option is None:
        return ""
    return (
        f"What stands behind {program.name} is its own: if {option} was meant for ampx, write it before {program.name}."
    )


@dataclass(frozen=True)
class _Loaded:
    code: CodeType
    origin: str
    search: str
    attributes: dict[str, Any]


def run_program(program: Program) -> BaseException | None:
    """Run a program to its end, as `__main__`; return None, or what it ended with: its traceback begins in the program.

    `sys.argv`, `sys.path[0]` and `sys.modules["__main__"]` stay as the program had them, because functions that it
    registered with `atexit` run later.

    Raises:
        InvalidOptionError: There is no such program.
    """
    main = ModuleType("__main__")
    sys.argv = [program.name, *program.arguments]
    if program.is_module:
        _put_first(os.getcwd())
    try:
        loaded = _load(program)
    except SyntaxError as error:
        return error.with_traceback(None)
    if program.is_module:
        sys.argv[0] = loaded.origin
    _put_first(loaded.search)
    main.__dict__.update(__builtins__=__builtins__, **loaded.attributes)
    sys.modules["__main__"] = main
    try:
        exec(loaded.code, main.__dict__)
    except BaseException as error:
        _hide_own_frames(error)
        return error
    return None


def _put_first(folder: str) -> None:
    """Put a folder first on `sys.path`, as `python` does with the program's, unless `-P` was given."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _load(program: Program) -> _Loaded:
    if program.is_module:
        return _load_module(program.name)
    if program.name == "-":
        code = compile(sys.stdin.buffer.read(), "<stdin>", "exec", dont_inherit=True)
        return _Loaded(code, "<stdin>", "", {"__file__": "<stdin>", "__package__": None})
    return _load_file(program.name)


def _load_file(name: str) -> _Loaded:
    target = os.path.abspath(name)
    folder = target if os.path.isdir(target) else os.path.dirname(os.path.realpath(target))
    if os.path.isdir(target):
        target = os.path.join(target, "__main__.py")
        if not os.path.exists(target):
            raise InvalidOptionError(
                f"the folder {name!r} cannot be run: it has no __main__.py; accepted: a Python file, a folder with a "
                f"__main__.py, or -m and the name of a module. Name the file to run."
            )
    if target.lower().endswith(".ipynb"):
        raise InvalidOptionError(
            f"{name!r} is a notebook, which Python cannot run; accepted: a Python file. Convert it: "
            f"jupyter nbconvert --to script {name}"
        )
    try:
        with io.open_code(target) as file:
            source = file.read()
    except OSError as error:
        raise InvalidOptionError(
            f"the script {name!r} cannot be read: {error.strerror}; accepted: a Python file, or -m and the "
            f"name of a module. Check the path."
        ) from error
    code = compile(source, target, "exec", dont_inherit=True)
    return _Loaded(code, target, folder, {"__file__": target, "__cached__": None, "__package__": None})


def _load_module(name: str) -> _Loaded:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as error:
        raise _no_module(name, str(error)) from error
    code = None if spec is None or spec.loader is None else getattr(spec.loader, "get_code", lambda _: None)(spec.name)
    if spec is None or code is None:
        raise _no_module(name, "there is none that can be run")
    attributes = {
        "__file__": spec.origin,
        "__spec__": spec,
        "__loader__": spec.loader,
        "__package__": spec.parent,
        "__cached__": spec.cached,
    }
    return _Loaded(code, spec.origin or name, os.getcwd(), attributes)


def _no_module(name: str, problem: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"-m {name!r} names no module to run: {problem}; accepted: a module, or a package with a __main__ module. "
        f"Check the name, or leave -m out for a file."
    )


def _hide_own_frames(error: BaseException) -> None:
    """Cut the frames of ampx out of a traceback: those above the program, and those within it."""
    seen: set[int] = set()
    chain: Sequence[BaseException | None] = [error]
    while chain:
        causes = []
        for raised in chain:
            if raised is None or id(raised) in seen:
                continue
            seen.add(id(raised))
            raised.__traceback__ = _without_ampx(raised.__traceback__)
            causes += [raised.__cause__, raised.__context__]
        chain = causes


def _without_ampx(trace: TracebackType | None) -> TracebackType | None:
    kept = []
    while trace is not None:
        package = str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        if package != "ampx" and not package.startswith("ampx_"):
            kept.append(trace)
        trace = trace.tb_next
    result = None
    for frame in reversed(kept):
        result = TracebackType(result, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return result
