"""Which line of the user's own code is running: past ampx, installed libraries and generated code."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, FunctionType, TracebackType
from typing import Any, Final

from .plugins import default_registry

_STANDARD: Final = tuple({f"{Path(sysconfig.get_path(name)).resolve()}/" for name in ("stdlib", "platstdlib")})
_INSTALLED: Final = frozenset(("site-packages", "dist-packages"))
# Modules that import what others tell them to, by how their names begin.
_IMPORTERS: Final = ("importlib", "_frozen_importlib", "pkgutil", "pickle")


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return os.sep


_STARTED_IN: Final = _folder()  # a script may go to another one, and who reads what is said of it does not


def script_line() -> str:
    """Return the innermost line of the user's own code, as `"train.py:12"`; "" where there is none."""
    frame = _script_frame()
    return "" if frame is None else line_of(frame.f_code.co_filename, frame.f_lineno)


def line_of(file: str, number: int) -> str:
    """Return a line as `"train.py:12"`: the file as seen from where Python was started, where that is shorter."""
    return f"{_short(file)}:{number}"


@functools.cache
def _short(file: str) -> str:
    try:
        return min(file, os.path.relpath(file, _STARTED_IN), key=len)
    except (OSError, ValueError):  # it is on another drive of Windows, say
        return file


def script_line_of(trace: TracebackType | None) -> str:
    """Return the innermost line of the user's own code in a traceback, as `script_line` does."""
    place = ""
    while trace is not None:
        if _is_script(trace.tb_frame):
            place = line_of(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return place


def is_script_function(function: Any) -> bool:
    """Return whether a function is the user's own code, and not a library's: also where the framework rewrote it."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "python_function", function))
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):  # an object that is called, perhaps
        function = inspect.getattr_static(type(function), "__call__", None)
    if not isinstance(function, FunctionType):
        return False
    variables, file = function.__globals__, function.__code__.co_filename
    if _is_rewritten(file):  # with the variables of the module that it was written in
        file = str(variables.get("__file__", "<stdin>"))
    return is_script_code(file, str(variables.get("__name__", "")))


def is_script_code(file: str, module: str) -> bool:
    """Return whether code from a file, in a module, is the user's own."""
    top = module.partition(".")[0]
    if _is_ampx(module):
        return False
    if file == "<stdin>":
        return True
    if file.startswith("<"):
        return False
    path = Path(file).resolve()
    if not _INSTALLED.isdisjoint((*path.parts, *Path(file).parts)) or str(path).startswith(_STANDARD):
        return False
    if module == "__main__":
        return True
    # A framework may be on the path from its source tree, and libraries from a folder of any name (`pip --target`).
    return top not in _framework_modules() and not _holds_installed(path, module)


def warn(message: str, category: type[Warning]) -> None:
    """Issue a warning that names the user's own line, however deep below it ampx found the reason."""
    frame = _script_frame()
    if frame is None:
        warnings.warn(message, category, stacklevel=3)
        return
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = str(frame.f_globals.get("__name__", "<unknown>"))
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


def imported_by_script(through: tuple[str, ...] = ()) -> bool:
    """Return whether the import, or the search for a module, that is under way is the user's own, not a library's.

    Args:
        through: Modules beyond Python's own, by how their names begin, that import what others tell them to.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
        generated = file.startswith("<") and file != "<stdin>"
        if not (generated or _is_ampx(module) or module.startswith((*_IMPORTERS, *through))):
            return _is_script(frame)
        frame = frame.f_back
    return True  # the command imports what it was told to run


def is_search() -> bool:
    """Return whether the finder that asks was asked by `importlib.util.find_spec`, and not by an import."""
    return sys._getframe(3).f_globals.get("__name__") == "importlib.util"  # past the finder and what asks finders


def values_in_sight(kinds: tuple[type, ...]) -> Iterator[Any]:
    """Yield the values of some classes in variables of the user's own code, those of the innermost function first.

    The attributes of what is in a variable count, too, but not those of a value of these classes.
    """
    frame: FrameType | None = sys._getframe(1)
    seen: set[int] = set()
    while frame is not None:
        for variables in (frame.f_locals, frame.f_globals) if _is_script(frame) else ():
            for value in variables.values():
                if id(value) in seen:
                    continue
                seen.add(id(value))
                is_of_kind = issubclass(type(value), kinds)
                inside = () if is_of_kind else getattr(value, "__dict__", {}).values()
                yield from (held for held in (value, *inside) if issubclass(type(held), kinds))
        frame = frame.f_back


def _script_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not _is_script(frame):
        frame = frame.f_back
    return frame


def _is_script(frame: FrameType) -> bool:
    # TensorFlow runs functions from files that it wrote: the line that called them is one of the script.
    file = frame.f_code.co_filename
    return not _is_rewritten(file) and is_script_code(file, str(frame.f_globals.get("__name__", "")))


def _is_rewritten(file: str) -> bool:
    return Path(file).name.startswith("__autograph_generated_file")


def _is_ampx(module: str) -> bool:
    top = module.partition(".")[0]
    return top == "ampx" or top.startswith("ampx_")


def _framework_modules() -> set[str]:
    registry = default_registry()
    return {root for name in registry.names() for root in registry.registration(name).roots}


def _holds_installed(path: Path, module: str) -> bool:
    """Return whether the folder on the path that a module comes from is one that distributions are installed in."""
    depth = module.count(".") + (path.name == "__init__.py")
    folder = path.parents[min(depth, len(path.parents) - 1)]
    return next(folder.glob("*.dist-info"), None) is not None
