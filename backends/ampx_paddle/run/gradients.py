"""The script sees unscaled gradients: between backward and step, in hooks, and in backwards of its own."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import PurePath
from typing import Any, Final
from unittest import mock

import paddle

from ampx.run import asked_by_script, is_script_function, script_line
from ampx_paddle import casting

from .manager import PaddleManager
from .native import OWN, THROUGH

_WAYS: Final = ("grad", "grad_")  # by the second Paddle's `clip_grad_norm_` comes
# Where a backward of the script's own becomes a part of a program: a function of that name hides the module.
_GRAPHS: Final = "paddle.static.nn.static_pylayer"


@contextmanager
def gradients_unscaled(manager: PaddleManager) -> Iterator[None]:
    """Patch the ways to a tensor's gradient, hooks, backwards of the script's own, and what prints gradients."""
    with ExitStack() as stack:
        for name in _WAYS:
            stack.enter_context(mock.patch.object(paddle.Tensor, name, _looking(manager, name)))
        stack.enter_context(mock.patch.object(paddle.Tensor, "register_hook", _registering(manager)))
        backwards = paddle.autograd.py_layer.PyLayerBackward
        stack.enter_context(mock.patch.object(backwards, "backward", _running(manager, backwards.backward)))
        graphs = sys.modules[_GRAPHS].PyLayerBackwardFunction
        stack.enter_context(mock.patch.object(graphs, "__init__", _noting_graphs(manager, graphs.__init__)))
        for place, name in ((paddle.static, "Print"), (paddle.amp.debugging, "enable_tensor_checker")):
            stack.enter_context(mock.patch.object(place, name, _naming(manager, place, name)))
        yield


# -- gradients that hang on tensors ------------------------------------------------------------------------------------


def _looking(manager: PaddleManager, name: str) -> Any:
    native: Any = getattr(paddle.Tensor, name)
    return property(
        lambda self: native.__get__(_look(manager, self)),
        lambda self, value: native.__set__(_look(manager, self), value),
        None,
        native.__doc__,
    )


def _look(manager: PaddleManager, tensor: Any) -> Any:
    if not manager.multiplied or manager.quiet or manager.stood_down or tensor._grad_ivar() is None:
        return tensor
    if manager.inside:  # recompute looks whether there is one
        if asked_by_script(OWN, THROUGH):
            manager.run.refuse(
                "the script reads a tensor's gradient while a backward runs, which adds gradients that carry the loss "
                "scale to it; accepted: reading it after backward, the gradient that a hook or a PyLayer gets, "
                "paddle.grad, or --dtype bfloat16, which needs no loss scale"
            )
        return tensor
    managed = manager.owner(tensor)
    if managed is None:
        manager.run.refuse(
            "the script reads a gradient of a tensor that no optimizer holds, which carries the loss scale; "
            "accepted: gradients of what optimizers hold, paddle.grad, or --dtype bfloat16, which needs no loss "
            "scale"
        )
    managed.kept = True
    manager.reveal(managed)
    return tensor


# -- gradients that backward hands out ---------------------------------------------------------------------------------


def _registering(manager: PaddleManager) -> Callable[..., Any]:
    native = paddle.Tensor.register_hook

    def register(self: Any, hook: Callable[[Any], Any]) -> Any:
        if not asked_by_script(OWN, THROUGH):
            return native(self, hook)
        manager.hooked = True
        return native(self, lambda gradient: manager.call_unscaled(hook, [gradient], _divided, _multiplied))

    return register


def _running(manager: PaddleManager, native: Callable[..., Any]) -> Callable[..., Any]:
    def backward(self: Any, *gradients: Any) -> Any:
        if not is_script_function(self._forward_cls.backward):
            return native(self, *gradients)
        return manager.call_unscaled(functools.partial(native, self), gradients, _divided, _multiplied)

    return backward


@paddle.no_grad()
def _divided(gradient: Any, factor: float) -> Any:
    """Return a gradient unscaled, in float32 where it was in low precision."""

    def divide(tensor: Any) -> Any:
        wide = tensor.astype("float32") if tensor.dtype in casting.LOW else tensor
        unscaled = wide / factor if tensor.is_dense() else paddle.scale(wide, 1.0 / factor)
        unscaled.stop_gradient = tensor.stop_gradient
        return unscaled

    return _each(gradient, divide)


@paddle.no_grad()
def _multiplied(result: Any, factor: float, gradients: Sequence[Any]) -> Any:
    """Return the product, in the low precision that the gradients had, where they had one."""
    low = [gradient.dtype for gradient in gradients if gradient is not None and gradient.dtype in casting.LOW]

    def multiply(tensor: Any) -> Any:
        scaled = paddle.scale(tensor, factor)
        return scaled.astype(low[0]) if low and scaled.dtype == paddle.float32 else scaled

    return _each(result, multiply)


def _each(tree: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, (list, tuple)):
        return type(tree)(_each(part, change) for part in tree)
    return change(tree) if isinstance(tree, paddle.Tensor) else tree


# -- gradients in programs ---------------------------------------------------------------------------------------------


def _noting_graphs(manager: PaddleManager, native: Callable[..., None]) -> Callable[..., None]:
    def make(self: Any, backward: Any, *args: Any, **kwargs: Any) -> None:
        native(self, backward, *args, **kwargs)
        manager.compiled_backward = True

    return make


def _naming(manager: PaddleManager, place: Any, name: str) -> Callable[..., Any]:
    native = getattr(place, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        manager.prints[f"{place.__name__}.{name} ({PurePath(script_line()).name})"] = None
        return native(*args, **kwargs)

    return call
