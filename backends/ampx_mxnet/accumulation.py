"""Accumulate gradients where MXNet cannot: in bfloat16 on the CPU with `grad_req='add'`.

Native defect: there the backward of MXNet's cast forgets to add, and the gradients of cast parameters stay zero. So
such parameters get `grad_req='write'`, and every backward in a `scale_loss` body is given what was there before it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from ampx.errors import ProtocolError

from .compat import mx
from .losses import check_second_derivative


class _Body(threading.local):
    """Those who accumulate in the calling thread's `scale_loss` bodies; one whose optimizer is gone has ended."""

    running: tuple[weakref.ref[Accumulation], ...] = ()


_body = _Body()
_originals: dict[Any, Callable[..., Any]] = {}
# Parameters that accumulate here, whichever trainer was wrapped first; MXNet thinks that it overwrites them.
_adopted: weakref.WeakSet[Any] = weakref.WeakSet()


class Accumulation:
    """Parameters that MXNet thinks it overwrites, and the gradients they had before the running body."""

    def __init__(self) -> None:
        self.parameters: list[Any] = []
        self._before: list[tuple[Any, Any, bool, Any]] = []
        self._began = False

    def adopt(self, parameters: Iterable[Any]) -> None:
        """Take over the parameters that add."""
        for parameter in parameters:
            if parameter.grad_req == "add" or parameter in _adopted:
                parameter.grad_req = "write"
                _adopted.add(parameter)
                self.parameters.append(parameter)

    def give_back(self) -> None:
        """Let MXNet add again."""
        for parameter in self.parameters:
            parameter.grad_req = "add"
            _adopted.discard(parameter)
        self.parameters = []

    def begin(self) -> None:
        """Keep the gradients as they are before a backward."""
        if not self.parameters:
            return
        self.reset()
        _body.running = (*_body.running, weakref.ref(self))
        self._keep()

    def _keep(self) -> None:
        self._began = False
        with mx.autograd.pause():
            for parameter in self.parameters:
                if parameter._grad is None:
                    continue  # not initialized yet
                for data, gradient in zip(parameter._data, parameter._grad, strict=True):
                    self._before.append((data, gradient, data._fresh_grad, gradient.copy()))
                    data._fresh_grad = False  # after it was kept: `reset` puts it back

    def reset(self) -> None:
        """Undo what an exception left of `begin`: no backward has run since."""
        if not self.parameters:
            return
        self._leave()
        for data, _, fresh, _ in self._before:
            data._fresh_grad = data._fresh_grad or fresh
        self._before = []

    def part(self) -> None:
        """Add up before another backward of the same body begins."""
        if self._began:
            self._add()
            self._keep()
        self._began = True

    def end(self) -> None:
        """Add the kept gradients to those that a backward wrote."""
        if not self.parameters:
            return
        self._leave()
        self._add()

    def _leave(self) -> None:
        _body.running = tuple(entry for entry in _body.running if entry() not in (self, None))

    def _add(self) -> None:
        kept, self._before = self._before, []
        with mx.autograd.pause():
            for data, gradient, fresh, before in kept:
                if data._fresh_grad:
                    gradient += before
                else:
                    data._fresh_grad = fresh


def check_adds(parameters: Iterable[Any]) -> None:
    """Raise for parameters that began to add after they were wrapped."""
    adding = [parameter.name for parameter in parameters if parameter._grad_req == "add"]
    if adding:
        raise ProtocolError(
            f"{len(adding)} parameters ({', '.join(adding[:5])}) have grad_req='add', which MXNet computes wrongly in "
            f"bfloat16 on the CPU; accepted: set before wrap_optimizer, which then accumulates by itself. Set grad_req "
            f"first, or to 'write'."
        )


def follow() -> None:
    """Have every backward keep apart what it writes, so that a body may run several."""
    for place in (mx.autograd, mx.nd.NDArray):
        _originals[place] = place.backward
        place.backward = _apart(place.backward)


def unfollow() -> None:
    """Undo `follow`."""
    for place, original in list(_originals.items()):
        place.backward = original
        del _originals[place]


def _apart(backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backward)
    def apart(*args: Any, **kwargs: Any) -> Any:
        for entry in _body.running:
            if (accumulation := entry()) is not None:
                accumulation.part()
        try:
            return backward(*args, **kwargs)
        except mx.MXNetError as error:
            check_second_derivative(error)
            raise

    return apart
