"""The script sees true gradients, wherever it looks: in `.grad` between backward and step, and in hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from .manager import TorchManager


@contextmanager
def gradients_true(manager: TorchManager) -> Iterator[None]:
    """Patch `.grad` and the calls that register hooks on gradients."""
    with ExitStack() as stack:
        stack.enter_context(_grad_watched(manager))
        for owner, name in ((torch.Tensor, "register_hook"), (torch.nn.Module, "register_full_backward_hook")):
            stack.enter_context(_hooks_true(manager, owner, name))
        stack.enter_context(_hooks_true(manager, torch.nn.Module, "register_full_backward_pre_hook"))
        stack.enter_context(_accumulated_refused(manager))
        yield


@contextmanager
def _grad_watched(manager: TorchManager) -> Iterator[None]:
    """Make the gradients of an optimizer true as soon as the script reads or replaces one of them.

    So `clip_grad_norm_`, gradient statistics and whatever a script does by hand need no knowledge of their own.
    """
    native: Any = torch.Tensor.grad
    get = native.__get__

    def read(self: torch.Tensor) -> Any:
        value = get(self)
        if manager.pending and not manager.quiet and value is not None:
            manager.reveal(self)
        return value

    def write(self: torch.Tensor, value: Any) -> None:
        if value is not None and manager.pending and not manager.quiet:
            manager.reveal(self)
        native.__set__(self, value)

    def forget(self: torch.Tensor) -> None:
        native.__delete__(self)

    def install() -> None:
        torch.Tensor.grad = property(read, write, forget, native.__doc__)

    manager.watch_gradients = install  # every read of a gradient takes longer then, so not before it must
    try:
        yield
    finally:
        if "grad" in vars(torch.Tensor):
            del torch.Tensor.grad  # torch's own is the base class's


@contextmanager
def _hooks_true(manager: TorchManager, owner: Any, name: str) -> Iterator[None]:
    """Divide what a hook sees by the loss scale, and multiply what it gives back."""
    true = getattr(owner, name)

    def register(self: Any, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def hook_on_true_gradients(*values: Any) -> Any:
            factor = manager.factor
            if isinstance(factor, float) and factor == 1.0:
                return hook(*values)
            module, gradients = (values[:1], values[1:]) if owner is torch.nn.Module else ((), values)
            result = hook(*module, *(_divided(gradient, factor) for gradient in gradients))
            return None if result is None else _multiplied(result, factor, gradients[0])

        return true(self, hook if _from_torch(hook) else hook_on_true_gradients, *args, **kwargs)

    with mock.patch.object(owner, name, register):
        yield


@contextmanager
def _accumulated_refused(manager: TorchManager) -> Iterator[None]:
    """Refuse hooks that look at `.grad` while backward still adds to others: there is nothing to make true yet."""
    true = torch.Tensor.register_post_accumulate_grad_hook

    def register(self: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
        def refuse_scaled(parameter: torch.Tensor) -> None:
            if not isinstance(manager.factor, float) or manager.factor != 1.0:
                manager.run.refuse(
                    "a hook registered with register_post_accumulate_grad_hook would see gradients multiplied by the "
                    "loss scale; accepted: register_hook, or --dtype bfloat16, which needs no loss scale"
                )
            hook(parameter)

        return true(self, hook if _from_torch(hook) else refuse_scaled)

    with mock.patch.object(torch.Tensor, "register_post_accumulate_grad_hook", register):
        yield


def _from_torch(hook: object) -> bool:
    """Return whether a hook is none of the script's: torch's, or that of a watch, which sees what was computed."""
    return str(getattr(hook, "__module__", "")).partition(".")[0] in ("torch", "ampx_torch")


def _divided(tree: Any, factor: Any) -> Any:
    """Return gradients without the loss scale; low precision becomes float32, where nothing underflows."""
    if isinstance(tree, tuple):
        return tuple(_divided(part, factor) for part in tree)
    if not isinstance(tree, torch.Tensor):
        return tree
    return (tree.float() if tree.dtype in (torch.float16, torch.bfloat16) else tree) / factor


def _multiplied(result: Any, factor: Any, like: Any) -> Any:
    if isinstance(result, tuple):
        before = like if isinstance(like, tuple) else (like,) * len(result)
        return tuple(_multiplied(part, factor, old) for part, old in zip(result, before, strict=True))
    if not isinstance(result, torch.Tensor):
        return result
    return (result * factor).to(like.dtype)
