"""Interceptors of layer calls: `paddle.nn.Layer.__call__` is replaced while there are any."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Final

import paddle

from ampx.modules import CallInterceptors


def _install() -> None:
    native = paddle.nn.Layer.__call__

    @functools.wraps(native)
    def called(layer: Any, *inputs: Any, **options: Any) -> Any:
        forward = functools.partial(native, layer)
        if not paddle.in_dynamic_mode():
            return forward(*inputs, **options)
        return calls.run(layer, forward, *inputs, **options)

    paddle.nn.Layer.__call__ = called


def _uninstall() -> None:
    paddle.nn.Layer.__call__ = paddle.nn.Layer.__call__.__wrapped__


calls: Final = CallInterceptors(_install, _uninstall)


def named(layer: Any) -> Iterator[tuple[str, Any]]:
    """Return the layers in a layer with their names, itself included as ""."""
    return iter(layer.named_sublayers(include_self=True))
