"""The script sees true gradients between backward and step, wherever it looks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import paddle

from ampx.run import asked_by_script

from .manager import PaddleManager
from .native import OWN, THROUGH


@contextmanager
def gradients_true(manager: PaddleManager) -> Iterator[None]:
    """Patch `Tensor.grad`, and refuse hooks on gradients that carry a loss scale."""
    native: Any = paddle.Tensor.grad
    register = paddle.Tensor.register_hook

    def look(tensor: Any) -> None:
        if not manager.multiplied or manager.quiet or manager.stood_down or tensor._grad_ivar() is None:
            return
        managed = manager.owner(tensor)
        if managed is None:
            manager.run.refuse(
                "the script reads a gradient of a tensor that no optimizer holds, which carries the loss scale; "
                "accepted: gradients of what optimizers hold, paddle.grad, or --dtype bfloat16, which needs no loss "
                "scale"
            )
        manager.reveal(managed)

    def read(self: Any) -> Any:
        look(self)
        return native.__get__(self)

    def write(self: Any, value: Any) -> None:
        look(self)
        native.__set__(self, value)

    def registered(self: Any, hook: Any) -> Any:
        if manager.scales and not manager.stood_down and asked_by_script(OWN, THROUGH):
            manager.run.refuse(
                "a hook on a gradient would see it multiplied by the loss scale; accepted: reading gradients after "
                "backward, or --dtype bfloat16, which needs no loss scale"
            )
        return register(self, hook)

    paddle.Tensor.grad = property(read, write, None, native.__doc__)
    try:
        with mock.patch.object(paddle.Tensor, "register_hook", registered):
            yield
    finally:
        paddle.Tensor.grad = native
