"""Half-precision networks whose norms stay in float32, and master weights kept by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ampx.errors import InvalidOptionError, ProtocolError
from ampx_apex.apex.apex_c import flatten, unflatten


class ToFP16(nn.Module):
    """Gives its input in float16."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Round."""
        return input.half()


class FP16Model(nn.Module):
    """A network in float16 with its batch norms in float32; it rounds the inputs that it is called with."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=torch.half)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Round the inputs and call the network."""
        return self.network(*(input.half() for input in inputs))


def bn_convert_float(module: nn.Module) -> nn.Module:
    """Put the affine batch norms of a network back to float32, in place; gives the network."""
    for own in module.modules():
        if isinstance(own, _BatchNorm) and own.affine:
            own.float()
    return module


def network_to_half(network: nn.Module) -> nn.Sequential:
    """Return a float16 network with its batch norms in float32, that rounds its input."""
    return nn.Sequential(ToFP16(), bn_convert_float(network.half()))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Put the floating parameters, gradients and buffers of a module, not of its children, to a dtype."""
    for parameter in module.parameters(recurse=False):
        if parameter.is_floating_point():
            gradient, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.to(dtype)
            parameter.grad = None if gradient is None else gradient.to(dtype)
    for buffer in module.buffers(recurse=False):
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Put a network to a dtype in place, except its affine batch norms; gives the network."""
    for module in network.modules():
        if isinstance(module, _BatchNorm) and module.affine:
            continue
        convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
    """Return the parameters that are trained and their float32 masters, or one flat master of all.

    Raises:
        InvalidOptionError: The parameters are of several dtypes, and one flat master is asked for.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not flat_master:
        return parameters, [parameter.detach().clone().float().requires_grad_() for parameter in parameters]
    dtypes = sorted({str(parameter.dtype) for parameter in parameters})
    if len(dtypes) != 1:
        raise InvalidOptionError(
            f"prep_param_lists(flat_master=True) got parameters of the dtypes {dtypes}; accepted: one dtype. Use "
            f"flat_master=False, or FP16_Optimizer."
        )
    master = nn.Parameter(flatten([parameter.detach() for parameter in parameters]).float())
    master.grad = torch.zeros_like(master)
    return parameters, [master]


def model_grads_to_master_grads(
    model_params: Sequence[torch.Tensor], master_params: Sequence[torch.Tensor], flat_master: bool = False
) -> None:
    """Copy the gradients of a model to its masters, in float32.

    Raises:
        ProtocolError: A parameter has no gradient, and there is one flat master.
    """
    if flat_master:
        gradients = [parameter.grad for parameter in model_params if parameter.grad is not None]
        if len(gradients) != len(model_params):
            raise ProtocolError(
                f"model_grads_to_master_grads got {len(model_params) - len(gradients)} parameters without a gradient; "
                f"accepted with flat_master=True: a gradient for each. Use flat_master=False."
            )
        flat = flatten(gradients)
        master_params[0].grad = flat.float() if flat.dtype != torch.float32 else flat
        return
    for own, master in zip(model_params, master_params, strict=True):
        if own.grad is None:
            master.grad = None
        elif master.grad is None:
            master.grad = own.grad.detach().to(master.dtype, copy=True)
        else:
            master.grad.detach_().copy_(own.grad)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[torch.Tensor], master_params: Sequence[torch.Tensor], flat_master: bool = False
) -> None:
    """Round the masters into the model's parameters."""
    masters = unflatten(master_params[0], model_params) if flat_master else list(master_params)
    if masters:
        torch._foreach_copy_(list(model_params), masters)


def to_python_float(t: Any) -> float:
    """Return the number in a tensor of one element. Sync: one."""
    number: float = t.item() if hasattr(t, "item") else t[0]
    return number


tofp16 = ToFP16
BN_convert_float = bn_convert_float
clip_grad_norm = nn.utils.clip_grad_norm_
