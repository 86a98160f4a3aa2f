"""Trained models in low precision: a copy whose weights are cast, with hooks that keep dtypes together.

A module whose own weights are low casts its floating inputs to them. What stays in float32 casts low inputs up;
normalization returns the low dtype again, so that what follows moves half the bytes, and what is denied returns
float32, so that nothing of it is lost. Hooks are objects of module-level classes: models can be copied, pickled and
exported.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ampx.backend import Array, Backend, is_module
from ampx.errors import ConversionError, InvalidOptionError
from ampx.shipping import layers as shipping
from ampx.shipping.converter import Conversion, Converted, Converter

from .names import named
from .prepare.low_precision_models import NORMS, CastArguments, flatten_recurrent, inside, keep_float32
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
    exempt = inside(kept)
    return Converted(copied, shipping.leaves_first([name for module, name in names.items() if module not in exempt]))


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
    _check_weights(_weights(inner))
    return inner


def _check_weights(weights: Mapping[str, torch.Tensor]) -> None:
    """Raise where weights are in low precision already, or not all here."""
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


def _denied(model: nn.Module, deny: tuple[Any, ...]) -> frozenset[str]:
    names = {plain: module for module, plain in named(model).items()}
    classes = tuple(entry for entry in deny if inspect.isclass(entry) and issubclass(entry, nn.Module))
    by_name = shipping.denied_names([entry for entry in deny if is_module(entry) or entry not in classes], names)
    return by_name | {name for name, module in names.items() if isinstance(module, classes)}


def _kept(names: Mapping[nn.Module, str], denied: frozenset[str]) -> dict[nn.Module, bool]:
    """Return the modules that stay in float32, with whether because they are denied; those inside are not listed."""
    kept = {module: name in denied for module, name in names.items() if name in denied or isinstance(module, NORMS)}
    # A weight that a kept module shares with others is float32 for all of them.
    while more := _sharing(kept, names):
        kept |= dict.fromkeys(more, True)
    inner = {part for module in kept for part in module.modules() if part is not module and kept[module]}
    return {module: reason for module, reason in kept.items() if module not in inner}


def _sharing(kept: Iterable[nn.Module], names: Iterable[nn.Module]) -> list[nn.Module]:
    """List the modules outside of kept ones that share a weight with them."""
    exempt = inside(kept)
    shared = {tensor for part in exempt for tensor in _own(part).values()}
    return [module for module in names if module not in exempt and shared & set(_own(module).values())]


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    tables = (module._parameters, module._buffers)
    return {name: tensor for table in tables for name, tensor in table.items() if tensor is not None}


def _full(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a module itself that have more than 16 bits, by name."""
    return {key: tensor for key, tensor in _own(module).items() if tensor.dtype in (torch.float32, torch.float64)}


def _fits(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a dtype can hold all finite numbers of a tensor."""
    return not bool((tensor.abs() > torch.finfo(dtype).max).logical_and(tensor.isfinite()).any())


def _tensors_to_lower(names: Mapping[nn.Module, str], dtype: torch.dtype) -> dict[torch.Tensor, str]:
    """Return the tensors of modules that a dtype can hold, with their names."""
    lowered: dict[torch.Tensor, str] = {}
    for module, name in names.items():
        for key, tensor in _full(module).items():
            # A buffer that the dtype cannot hold, such as a mask of the lowest number, stays as it is.
            if key in module._parameters or _fits(tensor, dtype):
                lowered.setdefault(tensor, f"{name}.{key}" if name else key)
    return lowered


def _lower(model: nn.Module, names: Mapping[nn.Module, str], kept: Mapping[nn.Module, bool], how: Conversion) -> None:
    dtype = DTYPES[how.dtype]
    exempt = inside(kept)
    computing = {module: name for module, name in names.items() if module not in exempt and _full(module)}
    lowered = _tensors_to_lower(computing, dtype)
    shipping.check_fits(how.dtype, {name: _largest(tensor) for tensor, name in lowered.items()})
    for tensor in lowered:
        tensor.data = tensor.data.to(dtype)
    for module in computing:
        module.register_forward_pre_hook(CastArguments(dtype), prepend=True, with_kwargs=True)
    flatten_recurrent(module for module in model.modules() if module not in exempt)
    for module, is_denied in kept.items():
        keep_float32(module, None if is_denied else dtype)
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
