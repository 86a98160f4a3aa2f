"""The script sees true gradients between backward and step, wherever it looks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from ampx_mxnet.calls import in_backward
from ampx_mxnet.compat import mx

from .manager import TrainerManager


@contextmanager
def gradients_true(manager: TrainerManager) -> Iterator[None]:
    """Patch the ways to a gradient: by its parameter, and by the array it belongs to."""
    with ExitStack() as stack:
        for name in ("grad", "list_grad"):
            stack.enter_context(mock.patch.object(mx.gluon.Parameter, name, _by_parameter(manager, name)))
        for kind in (mx.nd.NDArray, mx.np.ndarray):
            stack.enter_context(mock.patch.object(kind, "grad", _by_array(manager, kind.grad)))
            stack.enter_context(mock.patch.object(kind, "attach_grad", _attaching(manager, kind.attach_grad)))
        yield


def _by_parameter(manager: TrainerManager, name: str) -> Any:
    native = getattr(mx.gluon.Parameter, name)

    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        manager.reveal(lambda trainer: any(parameter is self for parameter in trainer._params))
        if manager.multiplied and not (manager.quiet or manager.stood_down or manager.owns(self)):
            manager.refuse_unowned()
        return native(self, *args, **kwargs)

    return read


def _by_array(manager: TrainerManager, native: Any) -> Any:
    def read(self: Any) -> Any:
        # An array does not know whose parameter it is.
        manager.reveal(lambda trainer: True)
        return native.__get__(self)

    return property(read, doc=native.__doc__)


def _attaching(manager: TrainerManager, native: Any) -> Any:
    @functools.wraps(native)
    def attach(self: Any, *args: Any, **kwargs: Any) -> Any:
        manager.attached = manager.attached or not in_backward()
        return native(self, *args, **kwargs)

    return attach
