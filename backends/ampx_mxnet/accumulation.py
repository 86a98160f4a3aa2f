"""Accumulate gradients where MXNet cannot: in bfloat16 on the CPU with `grad_req='add'`.

Native defect: there the backward of MXNet's cast forgets to add, and the gradients of cast parameters stay zero. So
such parameters get `grad_req='write'`, and every `scale_loss` body adds what was there before it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from ampx.errors import ProtocolError

from .compat import mx


class _Body(threading.local):
    """The contexts of the losses in the running `scale_loss` body, where gradients are accumulated here."""

    contexts: list[Any] | None = None


_body = _Body()


class Accumulation:
    """Parameters that MXNet thinks it overwrites, and the gradients they had before the running body."""

    def __init__(self) -> None:
        """Start with none."""
        self.parameters: list[Any] = []
        self._before: list[tuple[Any, Any, bool, Any]] = []

    def adopt(self, parameters: Iterable[Any]) -> None:
        """Take over the parameters that add. Sync: none."""
        for parameter in parameters:
            if parameter.grad_req == "add":
                parameter.grad_req = "write"
                self.parameters.append(parameter)

    def give_back(self) -> None:
        """Let MXNet add again. Sync: none."""
        for parameter in self.parameters:
            parameter.grad_req = "add"
        self.parameters = []

    def begin(self) -> None:
        """Keep the gradients as they are before a backward. Sync: none."""
        if not self.parameters:
            return
        _body.contexts = []
        with mx.autograd.pause():
            for parameter in self.parameters:
                if parameter._grad is None:
                    continue  # not initialized yet
                for data, gradient in zip(parameter._data, parameter._grad, strict=True):
                    self._before.append((data, gradient, data._fresh_grad, gradient.copy()))
                    data._fresh_grad = False

    def end(self) -> None:
        """Add the kept gradients to those that a backward wrote. Sync: none."""
        kept, self._before = self._before, []
        _body.contexts = None
        with mx.autograd.pause():
            for data, gradient, fresh, before in kept:
                if data._fresh_grad:
                    gradient += before
                else:
                    data._fresh_grad = fresh


def check_adds(parameters: Iterable[Any]) -> None:
    """Raise for parameters that began to add after they were wrapped.

    Raises:
        ProtocolError: There are some.

    Sync: none.
    """
    adding = [parameter.name for parameter in parameters if parameter.grad_req == "add"]
    if adding:
        raise ProtocolError(
            f"{len(adding)} parameters ({', '.join(adding[:5])}) have grad_req='add', which MXNet computes wrongly in "
            f"bfloat16 on the CPU; accepted: set before wrap_optimizer, which then accumulates by itself. Set grad_req "
            f"first, or to 'write'."
        )


def check_alone(context: Any) -> None:
    """Raise for a second loss of one context: its own backward would overwrite the gradients of the first.

    Raises:
        ProtocolError: The running body has one already, and gradients are accumulated here.

    Sync: none.
    """
    if _body.contexts is None:
        return
    if context in _body.contexts:
        raise ProtocolError(
            f"scale_loss got several losses on {context} for parameters with grad_req='add', which MXNet computes "
            f"wrongly in bfloat16 on the CPU; accepted: one loss a context. Add them up, or scale each by itself."
        )
    _body.contexts.append(context)
