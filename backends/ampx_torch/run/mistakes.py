"""Mistakes with loss scales in a script that uses ampx by itself, named with their line.

Only a run that is looked at pays for this (`ampx diagnose`, `ampx compare`): a step never guesses what a script means.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ampx.callers import script_line
from ampx.run.recorder import Observer
from ampx_torch import unwrapped_steps
from ampx_torch.provenance import wrapped_optimizers

from .manager import TorchManager

_CLIPS: Final = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
# All numbers of float16 are multiples of the first number, and so are sums of them. Numbers below the second one that
# float32 has mostly are not.
_SPACING: Final = 2.0**-24
_TINY: Final = 2.0**-14
_ENOUGH: Final = 16
_ELEMENTS: Final = 4096  # of each gradient


@contextmanager
def mistakes_named(manager: TorchManager) -> Iterator[None]:
    """Report clipped gradients of a scaled loss, and missing loss scales, to the observer of a run, if any."""
    observer = manager.run.recorder.observer
    if observer is None:
        yield
        return

    def look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if manager.stood_down and not unwrapped_steps.is_wrapped(optimizer):
            _name_unscaled(observer, manager.run.amp, optimizer)

    with ExitStack() as stack:
        for module in (torch.nn.utils, torch.nn.utils.clip_grad):
            for name in _CLIPS:
                if hasattr(module, name):  # the last one since torch 2.6
                    clip = _named(getattr(module, name), manager, observer)
                    stack.enter_context(mock.patch.object(module, name, clip))
        stack.callback(register_optimizer_step_pre_hook(look).remove)
        yield


def _named(clip: Callable[..., Any], manager: TorchManager, observer: Observer) -> Callable[..., Any]:
    """Return a function that clips gradients, and names the line that clips scaled ones."""

    @functools.wraps(clip)
    def named(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if manager.stood_down and _carry_scale(parameters):
            observer.mistake(
                f"{script_line()}: torch.nn.utils.{clip.__name__} clips gradients that carry the loss scale: every "
                f"update is too small by it. Call ampx.unscale(opt) before it, after the scale_loss block; or leave "
                f"clipping to ampx: wrap_optimizer(opt, max_grad_norm=…)."
            )
        return clip(parameters, *args, **kwargs)

    return named


def _carry_scale(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether gradients of some parameters wait for a step that will divide them by a loss scale."""
    keys = {id(parameter) for parameter in parameters if parameter.grad is not None}
    for optimizer in wrapped_optimizers():
        member = optimizer.ampx_member
        scaled = member.stage in ("inside", "scaled") and any(factor != 1.0 for factor in member.factors.values())
        if scaled and any(id(leaf) in keys for leaf in optimizer.leaves()):
            return True
    return False


def _name_unscaled(observer: Observer, amp: Any, optimizer: torch.optim.Optimizer) -> None:
    """Name a step on gradients that seem to come from float16 without a loss scale."""
    if amp is None or amp.effective.dtype != "float16":
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if _from_float16([parameter.grad for parameter in parameters if parameter.grad is not None]):
        observer.mistake(
            f"{script_line()}: {type(optimizer).__name__}, which wrap_optimizer was never given, may have been stepped "
            f"on gradients that were computed in float16 without a loss scale: those below {_SPACING:.1g} are zero "
            f"then. Call opt = ampx.wrap_optimizer(opt), and backward inside `with ampx.scale_loss(loss, opt) as "
            f"scaled:`; or compute what it trains inside `with ampx.autocast(enabled=False):`."
        )


def _from_float16(gradients: Iterable[torch.Tensor]) -> bool:
    """Return whether gradients of some matrix have the spacing of float16, which no other dtype's have by chance.

    Sync: one a gradient.
    """
    for gradient in gradients:
        if gradient.dim() < 2 or gradient.dtype is not torch.float32 or type(gradient) is not torch.Tensor:
            continue
        if gradient.layout is not torch.strided:
            continue
        values = gradient.detach().reshape(-1)[:_ELEMENTS]
        tiny = (values != 0) & (values.abs() < _TINY)
        spaced = (values / _SPACING).frac() == 0
        if tiny.sum() >= _ENOUGH and (spaced | ~tiny).all():
            return True
    return False
