"""Whole steps under `paddle.jit.to_static`."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import paddle

_PACKAGES: Final = ("ampx", "ampx_paddle")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def run_as_written() -> None:
    """Have Paddle's bytecode translator run the functions of ampx as they are, as it does with Paddle's own.

    Native defect: it breaks a `with` block and what is called in it into pieces that use variables which are not set.
    """
    folders = [os.path.dirname(str(sys.modules[name].__file__)) + os.sep for name in _PACKAGES]
    paddle.framework.core.eval_frame_skip_file_prefix(tuple(folders))


def untranslated(function: _Function) -> _Function:
    """Return a function in which, and below which, Paddle's bytecode translator is off.

    It goes by files, and what Python generates for dataclasses is in none: Paddle breaks it as it breaks `with` blocks.
    """

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        translator = paddle.framework.core.set_eval_frame(None)
        try:
            return function(*args, **options)
        finally:
            paddle.framework.core.set_eval_frame(translator)

    return cast(_Function, run)
