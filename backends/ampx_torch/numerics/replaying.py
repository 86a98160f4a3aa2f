"""A batch computed and differentiated without a step, after which everything is as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import backward  # the function itself: `ampx run` has another in its place

from ampx.backend import Backend, CastPlan
from ampx.numerics.probe import Replayed, Step
from ampx.numerics.randomness import random_numbers_kept
from ampx.numerics.timing import timed
from ampx.scaling import check_loss
from ampx_torch import casting
from ampx_torch.casting.module_rules import plain_name
from ampx_torch.folded_step import is_large, reads_finite
from ampx_torch.trees import stored

from .reductions import TENSORS


def replay(backend: Backend, model: nn.Module, step: Step, plan: CastPlan | None, scale: float = 1.0) -> Replayed:
    """Compute the loss of a batch and its gradients: see `Probe.replay`."""
    trained = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    with _kept(model):
        weights = TENSORS.stats(trained, "float16")
        with _casting(plan):
            loss = _computed(backend, model, step, scale)
        gradients = {
            name: _true(parameter.grad, scale) for name, parameter in trained.items() if parameter.grad is not None
        }
        value = float(loss.detach().float())
    return Replayed(value, gradients, weights)


def clock(backend: Backend, model: nn.Module, step: Step, plan: CastPlan | None) -> Callable[[], float]:
    """Return what times a batch and its gradients: see `Probe.clock`.

    Where something is cast, gradients are looked at, as the optimizer will do.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    devices = {parameter.device for parameter in trained if parameter.is_cuda}

    def wait() -> None:
        for device in devices:
            torch.cuda.synchronize(device)

    def compute() -> None:
        for parameter in trained:
            parameter.grad = None
        _computed(backend, model, step, 1.0)
        if plan is not None:
            _look([parameter.grad for parameter in trained])

    def seconds() -> float:
        with _kept(model), _casting(plan):
            torch.set_autocast_cache_enabled(False)  # as in training, where weights change
            compute()
            wait()
            return timed(compute, wait)

    return seconds


def _computed(backend: Backend, model: nn.Module, step: Step, scale: float) -> torch.Tensor:
    """Return the loss of a batch, after its backward."""
    loss: torch.Tensor = step(model)
    check_loss(backend, loss, False, "replay")
    with casting.off("cpu"), casting.off("cuda"):
        backward(backend.scale(loss, scale))
    return loss


def _look(gradients: list[torch.Tensor | None]) -> None:
    """Read gradients to see whether they are finite."""
    dense = [gradient for gradient in gradients if gradient is not None and gradient.layout is torch.strided]
    large = [gradient for gradient in dense if is_large(gradient)]
    small = [gradient for gradient in dense if not is_large(gradient)]
    for bucket in filter(None, (large, small)):
        if bucket[0].is_cpu:
            reads_finite(bucket)
        else:
            torch._foreach_norm(bucket)


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Compute gradients, whatever is around, and put everything back."""
    with _random_state_kept(), _model_kept(model), torch.inference_mode(False), torch.enable_grad():
        yield


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
