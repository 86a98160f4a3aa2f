"""The script reads numbers where its network returns bfloat16, of which Paddle hands NumPy the bits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import paddle

from .manager import PaddleManager

_SAVES: Final = "paddle.framework.io"  # files hold the bits, and the dtype beside them
_THROUGH: Final = "paddle.base.dygraph"  # where `np.array(tensor)` comes by


@contextmanager
def numbers_read(manager: PaddleManager) -> Iterator[None]:
    """Patch the ways from a tensor to NumPy: a script's accuracy, and Paddle's own metrics, would be made of bits."""
    with ExitStack() as stack:
        for name in ("numpy", "tolist"):
            stack.enter_context(mock.patch.object(paddle.Tensor, name, _reading(manager, name)))
        yield


def _reading(manager: PaddleManager, name: str) -> Any:
    native = getattr(paddle.Tensor, name)

    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.dtype == paddle.bfloat16 and not manager.stood_down and not _asked_by_save():
            return native(self.detach().astype("float32"), *args, **kwargs)
        return native(self, *args, **kwargs)

    return read


def _asked_by_save() -> bool:
    """Return whether Paddle saves a tensor, and nobody computes with its numbers."""
    frame: Any = sys._getframe(2)
    while str(frame.f_globals.get("__name__")).startswith(_THROUGH):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).startswith(_SAVES)
