"""Low-precision models: which modules stay in float32, and the hooks that keep dtypes and checkpoints right.

The hooks are objects of module-level classes, so that models can be copied and pickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from ampx_torch.trees import LOW, cast

NORMS: Final = (
    nn.modules.batchnorm._NormBase,  # BatchNorm, SyncBatchNorm, InstanceNorm
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)


def tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Walk over the module's own parameters and buffers that have a low-precision counterpart."""
    for table in (module._parameters, module._buffers):
        for name, tensor in table.items():
            if tensor is not None and tensor.dtype in (torch.float32, *LOW):
                yield name, tensor


def inside(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Return modules and all that are in them."""
    return {part for module in modules for part in module.modules()}


def flatten_recurrent(modules: Iterable[nn.Module]) -> None:
    """Put the new weights of recurrent modules in one piece, as cuDNN wants them."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def convert(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Change a tensor's dtype in place, its gradient's too."""
    gradient, tensor.grad = tensor.grad, None
    tensor.data = tensor.data.to(dtype)
    if gradient is not None:
        tensor.grad = gradient.to(dtype)


class _Cast:
    def __init__(
        self, dtype: torch.dtype, only: tuple[torch.dtype, ...] = (torch.float32, torch.float64, *LOW)
    ) -> None:
        self.dtype = dtype
        self.only = only


class CastArguments(_Cast):
    """Hook before a forward: casts floating arguments of some dtypes, by position and by keyword."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cast."""
        return cast((args, kwargs), self.dtype, only=self.only)


class CastOutputs(_Cast):
    """Hook after a forward: casts floating outputs of some dtypes."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Cast."""
        return cast(output, self.dtype, only=self.only)


def keep_float32(module: nn.Module, returns: torch.dtype | None) -> None:
    """Hook a module that stays in float32: it casts low inputs up, and returns a low dtype if asked to."""
    module.register_forward_pre_hook(CastArguments(torch.float32, only=LOW), prepend=True, with_kwargs=True)
    if returns is not None:
        module.register_forward_hook(CastOutputs(returns, only=(torch.float32,)))


class SaveFloat32:
    """Hook after `state_dict`: puts float32 values in place of a module's low-precision ones.

    Where a parameter is what its master rounds to, that is the master's value. Where it was changed by hand (a
    copy that averages weights, for instance) it is the parameter's.
    """

    def __init__(self, masters: Mapping[str, nn.Parameter]) -> None:
        self.masters = dict(masters)

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Replace."""
        for name, tensor in tensors(module):
            if tensor.dtype not in LOW or prefix + name not in state:
                continue
            master = self.masters.get(name)
            value = tensor.detach().to(torch.float32)
            if master is not None:
                exact = master.detach().to(value.device)
                value = torch.where(exact.to(tensor.dtype) == tensor.detach(), exact, value)
            state[prefix + name] = value


class LoadFloat32:
    """Hook before `load_state_dict`: loads a module's masters with the exact values."""

    def __init__(self, masters: Mapping[str, nn.Parameter]) -> None:
        self.masters = dict(masters)

    def __call__(
        self,
        module: nn.Module,
        state: Mapping[str, Any],
        prefix: str,
        metadata: Mapping[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Copy; shapes that do not fit are reported by torch itself."""
        if metadata.get("assign_to_params_buffers", False):
            errors.append(
                "load_state_dict(assign=True) would cut a prepared model off its master weights; load without assign"
            )
            return
        for name, master in self.masters.items():
            value = state.get(prefix + name)
            if isinstance(value, torch.Tensor) and value.shape == master.shape:
                with torch.no_grad():
                    master.copy_(value)
