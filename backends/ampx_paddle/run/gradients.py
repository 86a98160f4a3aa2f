"""The script sees true gradients between backward and step, wherever it looks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import paddle

from ampx.run import asked_by_script

from .manager import PaddleManager
from .native import OWN, THROUGH

_WAYS: Final = ("grad", "grad_")  # by the second Paddle's `clip_grad_norm_` comes


@contextmanager
def gradients_true(manager: PaddleManager) -> Iterator[None]:
    """Patch the ways to a tensor's gradient, and refuse hooks on gradients that carry a loss scale."""
    register = paddle.Tensor.register_hook

    def look(tensor: Any) -> Any:
        if not manager.multiplied or manager.quiet or manager.stood_down or tensor._grad_ivar() is None:
            return tensor
        if manager.in_backward and not asked_by_script(OWN, THROUGH):  # recompute looks whether there is one
            return tensor
        managed = manager.owner(tensor)
        if managed is None:
            manager.run.refuse(
                "the script reads a gradient of a tensor that no optimizer holds, which carries the loss scale; "
                "accepted: gradients of what optimizers hold, paddle.grad, or --dtype bfloat16, which needs no loss "
                "scale"
            )
        manager.reveal(managed)
        return tensor

    def looking(name: str) -> Any:
        native: Any = getattr(paddle.Tensor, name)
        return property(
            lambda self: native.__get__(look(self)),
            lambda self, value: native.__set__(look(self), value),
            None,
            native.__doc__,
        )

    def registered(self: Any, hook: Any) -> Any:
        if manager.scales and not manager.stood_down and asked_by_script(OWN, THROUGH):
            manager.run.refuse(
                "a hook on a gradient would see it multiplied by the loss scale; accepted: reading gradients after "
                "backward, or --dtype bfloat16, which needs no loss scale"
            )
        return register(self, hook)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(paddle.Tensor, "register_hook", registered))
        for name in _WAYS:
            stack.enter_context(mock.patch.object(paddle.Tensor, name, looking(name)))
        yield
