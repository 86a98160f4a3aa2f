"""What the levels that cast a model do to it: parameters, inputs, outputs, checkpoints."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ampx_torch.prepare import low_precision_models
from ampx_torch.trees import LOW


def cast_model(model: nn.Module, dtype: torch.dtype, keep_norms: bool) -> None:
    """Cast floating parameters, gradients and buffers in place; batch and instance norms may stay in float32."""
    for module in model.modules():
        if keep_norms and _is_norm(module):
            low_precision_models.keep_float32(module, dtype)
            continue
        for table in (module._parameters, module._buffers):
            for tensor in table.values():
                if tensor is not None and tensor.is_floating_point() and tensor.dtype != dtype:
                    low_precision_models.convert(tensor, dtype)
    low_precision_models.flatten_recurrent(model.modules())


def make_masters(
    optimizers: Iterable[torch.optim.Optimizer], models: Sequence[nn.Module], dtype: torch.dtype | None, keep: bool
) -> dict[nn.Parameter, nn.Parameter]:
    """Return a float32 copy of every trained parameter that is or will be of low precision, before it is rounded."""
    lowered = _lowered(models, keep) if dtype in LOW else set()
    copies = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and (parameter in lowered or parameter.dtype in LOW):
                    copies[parameter] = nn.Parameter(parameter.detach().to(torch.float32, copy=True))
    return copies


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase)


def _lowered(models: Sequence[nn.Module], keep: bool) -> set[nn.Parameter]:
    """Return the parameters of models but those of norms that stay in float32."""
    norms = [module for model in models for module in model.modules() if keep and _is_norm(module)]
    staying = {parameter for norm in norms for parameter in norm.parameters(recurse=False)}
    return {parameter for model in models for parameter in model.parameters()} - staying


def guard_checkpoints(models: Iterable[nn.Module], copies: Mapping[nn.Parameter, nn.Parameter], all_of: bool) -> None:
    """Have `state_dict` save float32, exact where there are masters, and `load_state_dict` load the masters.

    With `all_of` of all modules, not only of those whose parameters have masters.
    """
    for module in {module: None for model in models for module in model.modules()}:
        own = {name: copies[p] for name, p in module._parameters.items() if p is not None and p in copies}
        if own or (all_of and any(True for _ in low_precision_models.tensors(module))):
            module.register_state_dict_post_hook(low_precision_models.SaveFloat32(own))
            module.register_load_state_dict_pre_hook(low_precision_models.LoadFloat32(own))


class CastForward:
    """A model's `forward` that casts floating inputs and outputs. Copies and pickles go with their model.

    It sits on the instance and not in hooks, because scripts call `model.forward(...)`, too.
    """

    def __init__(
        self, module: nn.Module, inputs: torch.dtype | None, outputs: torch.dtype | None, before: Any = None
    ) -> None:
        self.module = module
        self.before = before
        self.inputs = inputs
        self.outputs = outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Cast, call, cast."""
        if self.inputs is not None:
            args, kwargs = cast_batch(args, self.inputs), cast_batch(kwargs, self.inputs)
        output = self._forward(*args, **kwargs)
        return output if self.outputs is None else cast_batch(output, self.outputs)

    @property
    def _forward(self) -> Any:
        return type(self.module).forward.__get__(self.module) if self.before is None else self.before

    @property
    def __signature__(self) -> inspect.Signature:
        """The model's own: trainers look for the names of the arguments."""
        return inspect.signature(self._forward)


class _Replicate:
    """The method by which DataParallel copies a model for another device."""

    def __init__(self, module: nn.Module, inputs: torch.dtype | None, outputs: torch.dtype | None) -> None:
        self.module = module
        self.casts = (inputs, outputs)

    def __call__(self) -> nn.Module:
        """Copy as torch does; the copy's `forward` then is its own."""
        replica: nn.Module = type(self.module)._replicate_for_data_parallel(self.module)
        vars(replica)["forward"] = CastForward(replica, *self.casts, vars(self.module)["forward"].before)
        return replica


def cast_calls(model: nn.Module, inputs: torch.dtype | None, outputs: torch.dtype | None) -> None:
    """Cast the inputs and outputs of a model."""
    model.forward = CastForward(model, inputs, outputs, vars(model).get("forward"))
    model._replicate_for_data_parallel = _Replicate(model, inputs, outputs)


def cast_batch(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating tensors of a batch, and batches of the script's own classes by their method `to`."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (str, bytes, nn.Module, torch.device, type(None))):
        return value
    if callable(getattr(value, "to", None)):
        return value.to(dtype)
    return _cast_items(value, dtype) if isinstance(value, (Mapping, list, tuple, set, Iterator)) else value


def _cast_items(values: Any, dtype: torch.dtype) -> Any:
    kind = type(values)
    if isinstance(values, Mapping):
        items = {key: cast_batch(item, dtype) for key, item in values.items()}
        return items if kind is dict else kind(items)
    cast = [cast_batch(item, dtype) for item in values]
    if isinstance(values, Iterator):
        return iter(cast)
    return kind(*cast) if hasattr(values, "_fields") else kind(cast)


def lower_state(optimizer: torch.optim.Optimizer) -> None:
    """Cast optimizer state that has the shape of its parameter to the parameter's dtype."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == parameter.shape:
                state[key] = value.to(parameter.dtype)
