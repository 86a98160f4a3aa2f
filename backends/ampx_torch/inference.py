"""Trained models in low precision: a copy whose weights are cast, with hooks that keep dtypes together.

A module whose own weights are low casts its floating inputs to them. What stays in float32 casts low inputs up;
normalization returns the low dtype again, so that what follows moves half the bytes, and what is denied returns
float32, so that nothing of it is lost. Hooks are objects of module-level classes: models can be copied, pickled and
exported.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ampx.backend import Array, Backend, is_module
from ampx.errors import ConversionError, InvalidOptionError
from ampx.shipping import layers as shipping
from ampx.shipping.converter import Conversion, Converted, Converter

from .names import named
from .prepare.low_precision_models import NORMS, CastArguments, CastOutputs
from .trees import DTYPES, LOW, convert as convert_tree


def convert(backend: Backend, model: Any, conversion: Conversion) -> Converted:
    """Convert a module; entries of `deny` may be classes of modules, too."""
    inner = _checked(model)
    device = next((tensor.device.type for tensor in _weights(inner).values()), "cpu")
    shipping.check_computed(backend, device, conversion.dtype)
    denied = _denied(inner, conversion.deny)
    try:
        copied = copy.deepcopy(inner)
    except Exception as error:
        raise ConversionError(
            f"convert got {type(inner).__name__}, which cannot be copied ({error}); accepted: modules that "
            f"copy.deepcopy copies. Convert it before it is called, or remove what hangs on it."
        ) from error
    copied.eval()
    for parameter in copied.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    names = named(copied)
    kept = _kept(names, denied)
    if conversion.dtype != "float32":
        _lower(copied, names, kept, conversion)
    inside = {part for module in kept for part in module.modules()}
    return Converted(copied, shipping.leaves_first([name for module, name in names.items() if module not in inside]))


def infer(model: Any, batch: Any) -> Mapping[str, Array]:
    """Call a converted module; tensors of the batch are moved to its device."""
    device = next((tensor.device for tensor in _weights(model).values()), torch.device("cpu"))
    args, kwargs = _moved(shipping.arguments(batch), device)
    with torch.no_grad():
        outputs = model(*args, **kwargs)
    return shipping.named_outputs(outputs, _array)


def _array(value: Any) -> Array | None:
    if not isinstance(value, torch.Tensor):
        return None
    return (value.float() if value.is_floating_point() else value).cpu().numpy()


def _moved(tree: Any, device: torch.device) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.to(device)
    if isinstance(tree, Mapping):
        return {key: _moved(value, device) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        return type(tree)(_moved(value, device) for value in tree)
    return tree


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _checked(model: Any) -> nn.Module:
    inner = getattr(model, "_orig_mod", model)  # torch.compile's wrapper: compile what `convert` returns
    wrapper = isinstance(inner, (nn.parallel.DistributedDataParallel, nn.DataParallel))
    if not isinstance(inner, nn.Module) or isinstance(inner, torch.jit.ScriptModule) or wrapper:
        raise InvalidOptionError(
            f"convert got {type(inner).__name__} as the model; accepted: an nn.Module, neither scripted nor wrapped. "
            f"Pass the module itself{', model.module' if wrapper else ''}."
        )
    weights = _weights(inner)
    shipping.check_float32([name for name, tensor in weights.items() if tensor.dtype in LOW])
    unready = [
        name for name, tensor in weights.items() if tensor.is_meta or isinstance(tensor, nn.UninitializedParameter)
    ]
    sharded = [name for name, tensor in weights.items() if type(tensor).__name__ == "DTensor"]
    if unready or sharded:
        raise InvalidOptionError(
            f"convert got a model whose weights are not all here ({', '.join((unready or sharded)[:5])}); accepted: a "
            f"model with its whole weights. Load or gather them first."
        )
    return inner


def _denied(model: nn.Module, deny: tuple[Any, ...]) -> frozenset[str]:
    names = {plain: module for module, plain in named(model).items()}
    classes = tuple(entry for entry in deny if inspect.isclass(entry) and issubclass(entry, nn.Module))
    by_name = shipping.denied_names([entry for entry in deny if is_module(entry) or entry not in classes], names)
    return by_name | {name for name, module in names.items() if isinstance(module, classes)}


def _kept(names: Mapping[nn.Module, str], denied: frozenset[str]) -> dict[nn.Module, bool]:
    """Return the modules that stay in float32, with whether because they are denied; those inside are not listed."""
    kept = {module: name in denied for module, name in names.items() if name in denied or isinstance(module, NORMS)}
    # A weight that a kept module shares with others is float32 for all of them.
    while True:
        shared = {tensor for module in kept for part in module.modules() for tensor in _own(part).values()}
        inside = {part for module in kept for part in module.modules()}
        more = [module for module in names if module not in inside and shared & set(_own(module).values())]
        if not more:
            break
        kept |= dict.fromkeys(more, True)
    outer = {part for module in kept for part in module.modules() if part is not module and kept[module]}
    return {module: reason for module, reason in kept.items() if module not in outer}


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    tables = (module._parameters, module._buffers)
    return {name: tensor for table in tables for name, tensor in table.items() if tensor is not None}


def _lower(model: nn.Module, names: Mapping[nn.Module, str], kept: Mapping[nn.Module, bool], how: Conversion) -> None:
    dtype = DTYPES[how.dtype]
    limit = torch.finfo(dtype).max
    inside = {part for module in kept for part in module.modules()}
    lowered: dict[torch.Tensor, str] = {}
    for module, name in names.items():
        if module in inside:
            continue
        own = {key: tensor for key, tensor in _own(module).items() if tensor.dtype in (torch.float32, torch.float64)}
        for key, tensor in own.items():
            # A buffer that the dtype cannot hold, such as a mask of the lowest number, stays as it is.
            if key in module._parameters or not bool((tensor.abs() > limit).logical_and(tensor.isfinite()).any()):
                lowered.setdefault(tensor, f"{name}.{key}" if name else key)
        if own:
            module.register_forward_pre_hook(CastArguments(dtype), prepend=True, with_kwargs=True)
    shipping.check_fits(how.dtype, {name: _largest(tensor) for tensor, name in lowered.items()})
    for tensor in lowered:
        tensor.data = tensor.data.to(dtype)
    for module in model.modules():
        if isinstance(module, nn.RNNBase) and module not in inside:
            module.flatten_parameters()  # cuDNN wants them in one piece again
    for module, is_denied in kept.items():
        module.register_forward_pre_hook(CastArguments(torch.float32, only=LOW), prepend=True, with_kwargs=True)
        if not is_denied:
            module.register_forward_hook(CastOutputs(dtype, only=(torch.float32,)))
    model.register_forward_hook(_CastBorder(torch.float32 if how.keep_io else dtype))


def _largest(tensor: torch.Tensor) -> float:
    finite = tensor.detach().abs().nan_to_num(nan=0.0, posinf=0.0)
    return float(finite.amax()) if finite.numel() else 0.0


class _CastBorder:
    """Hook behind a whole model: casts floating outputs, in dataclasses too."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Cast what a model in float32 returns as float32; float64 stays."""
        return convert_tree(output, self._cast)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype) if tensor.dtype in (torch.float32, *LOW) else tensor


class TorchConverter(Converter):
    """Converts modules of torch."""

    infer = staticmethod(infer)

    def convert(self, model: Any, conversion: Conversion) -> Converted:
        return convert(self.backend, model, conversion)
