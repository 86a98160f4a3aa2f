"""Whole steps under `paddle.jit.to_static`."""

from __future__ import annotations

import os
import sys
from typing import Final

import paddle

_PACKAGES: Final = ("ampx", "ampx_paddle")


def run_as_written() -> None:
    """Have Paddle's bytecode translator run the functions of ampx as they are, as it does with Paddle's own.

    Native defect: it breaks a `with` block and what is called in it into pieces that use variables which are not set.
    """
    folders = [os.path.dirname(str(sys.modules[name].__file__)) + os.sep for name in _PACKAGES]
    paddle.framework.core.eval_frame_skip_file_prefix(tuple(folders))
