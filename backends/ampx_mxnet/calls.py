"""Interceptors of block calls: `gluon.Block.__call__` is replaced while there are any."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any, Final

from ampx.backend import leaves
from ampx.modules import CallInterceptors

from .compat import mx


def _install() -> None:
    native = mx.gluon.Block.__call__

    @functools.wraps(native)
    def called(block: Any, *inputs: Any) -> Any:
        return calls.run(block, functools.partial(native, block), *inputs)

    mx.gluon.Block.__call__ = called


def _uninstall() -> None:
    mx.gluon.Block.__call__ = mx.gluon.Block.__call__.__wrapped__


calls: Final = CallInterceptors(_install, _uninstall)


def is_traced(inputs: Any) -> bool:
    """Return whether a block is called to be traced: with symbols, not arrays."""
    return any(isinstance(leaf, mx.sym.Symbol) for leaf in leaves(inputs))


def in_backward() -> bool:
    """Return whether this is a thread of MXNet, which run the backward of custom functions only."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def named(block: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Return the blocks in a block with their names, itself included as ""."""
    yield name, block
    for child, inner in block._children.items():
        yield from named(inner, f"{name}.{child}" if name else child)
