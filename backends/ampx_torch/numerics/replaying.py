"""A batch computed and differentiated without a step, after which everything is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import backward  # the function itself: `ampx run` has another in its place

from ampx.backend import Backend, CastPlan, Replayed, Step
from ampx.errors import DetachedLossError, LossDtypeError, LossShapeError
from ampx.numerics.randomness import random_numbers_kept
from ampx_torch import casting
from ampx_torch.casting.module_rules import plain_name

from .reductions import Limits, read, reduce, stored


def replay(backend: Backend, model: nn.Module, step: Step, plan: CastPlan | None, scale: float) -> Replayed:
    """Compute the loss of a batch and its gradients: see `ampx.Backend.replay`."""
    named = [(plain_name(name), parameter) for name, parameter in model.named_parameters()]
    with ExitStack() as stack:
        stack.enter_context(_random_state_kept())
        stack.enter_context(_model_kept(model))
        trained = {name: parameter for name, parameter in named if parameter.requires_grad}
        limits = Limits.of("float16")
        weights = read([reduce([parameter], limits) for parameter in trained.values()])
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        with _casting(plan):
            loss = step(model)
        _check(backend, loss)
        with _casting(None):
            backward(backend.scale(loss, scale))
        gradients = {
            name: _true(parameter.grad, scale) for name, parameter in trained.items() if parameter.grad is not None
        }
        value = float(loss.detach().float())
    return Replayed(value, gradients, dict(zip(trained, weights, strict=True)))


def _check(backend: Backend, loss: Any) -> None:
    """Raise where a step did not return a loss."""
    got = "replay got from its step a loss"
    remedy = "Return the loss of the batch, as a tensor of one element that was computed from the model"
    if not isinstance(loss, torch.Tensor):
        raise LossDtypeError(f"{got} of type {type(loss).__name__}; accepted: a torch tensor. {remedy}.")
    info = backend.inspect_loss(loss, False)
    if not info.floating:
        raise LossDtypeError(f"{got} of dtype {loss.dtype}; accepted: floating dtypes. {remedy}.")
    if info.elements != 1:
        raise LossShapeError(f"{got} of shape {tuple(loss.shape)}; accepted: one element. {remedy}.")
    if not info.attached:
        raise DetachedLossError(f"{got} from which no gradient flows; accepted: one that requires grad. {remedy}.")


@contextmanager
def _casting(plan: CastPlan | None) -> Iterator[None]:
    """Cast as a plan says, or not at all, whatever a session has switched on."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            stack.enter_context(casting.off(device))
        if plan is not None:
            stack.enter_context(casting.region(casting.check_plan(plan), True))
        torch.clear_autocast_cache()
        stack.callback(torch.clear_autocast_cache)
        yield


def _true(gradient: torch.Tensor, scale: float) -> Any:
    """Return a gradient without the loss scale, as an array of float32."""
    dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
    return (stored(dense).float() / scale).cpu().numpy()


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Put random numbers back: torch's, on every device, Python's, and NumPy's where it is in use."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    with random_numbers_kept(), torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def _model_kept(model: nn.Module) -> Iterator[None]:
    """Put weights, buffers, gradients and modes back."""
    modules = list(model.modules())
    modes = [module.training for module in modules]
    holders = [(holder, dict(holder)) for module in modules for holder in (module._parameters, module._buffers)]
    tensors = {id(tensor): tensor for _, held in holders for tensor in held.values() if tensor is not None}
    values = {key: tensor.detach().clone() for key, tensor in tensors.items()}
    parameters = list(model.parameters())
    before = [(parameter, parameter.grad) for parameter in parameters]
    hooks = [parameter._post_accumulate_grad_hooks for parameter in parameters]
    taken = [dict(registered or {}) for registered in hooks]
    for parameter, registered in zip(parameters, hooks, strict=True):
        parameter.grad = None
        if registered:
            registered.clear()  # an optimizer may step in one
    try:
        yield
    finally:
        for holder, held in holders:
            for name in [name for name in holder if name not in held]:
                del holder[name]
            holder.update(held)
        for key, tensor in tensors.items():
            tensor.data.copy_(values[key])  # a graph of the user's that waits for its backward does not notice
        for parameter, gradient in before:
            parameter.grad = gradient
        for registered, hook in zip(hooks, taken, strict=True):
            if hook:
                registered.update(hook)
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
