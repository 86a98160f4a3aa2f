"""Named modules in a dtype of their own: casting switched while they run, or values rounded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import nn

from ampx.backend import CastPlan
from ampx.errors import UnsupportedDtypeError
from ampx.formats import FORMATS, find_digits, to_digits
from ampx.modules import check_patterns, last_match
from ampx_torch.casting import lstm
from ampx_torch.lent_hooks import lend
from ampx_torch.names import Names, each_model
from ampx_torch.trees import DTYPES, LOW, cast, convert

from .reductions import floating

SIMULATED: Final[dict[str, torch.dtype]] = {
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
_COMPUTED: Final[dict[str, torch.dtype]] = {str(name): dtype for name, dtype in DTYPES.items()}


@contextmanager
def force(model: nn.Module | None, dtypes: Mapping[str, str]) -> Iterator[None]:
    """Compute named modules in a dtype of their own: see `Probe.force`."""
    accepted = (*_COMPUTED, *SIMULATED)
    for dtype in dtypes.values():
        if dtype not in accepted and find_digits(dtype) is None:
            raise UnsupportedDtypeError(
                f"force got the dtype {dtype!r}, which PyTorch can neither compute in nor simulate here; accepted: "
                f"{', '.join(accepted)}. Choose one of these."
            )
    forced: set[nn.Module] = set()  # by the name that they have, or a former one
    with ExitStack() as stack:

        def take(names: Names) -> None:
            if model is not None:
                check_patterns("force", dtypes, list(names.values()))
            for module, name in names.items():
                dtype = last_match(name, dtypes)
                if dtype is not None and module not in forced:
                    forced.add(module)
                    stack.callback(lend(module, _attach(module, dtype)))

        for name in DTYPES:
            if name != "float32" and name in dtypes.values():
                plan = CastPlan("cpu", name)
                lstm.install(plan, owner=plan)
                stack.callback(lstm.uninstall, plan)
        stack.enter_context(each_model(model, take))
        yield


def _attach(module: nn.Module, dtype: str) -> list[Any]:
    """Put hooks on a module: inside those of `allow` and `deny`, which are entered before and left after."""
    region = _Computed(_COMPUTED[dtype]) if dtype in _COMPUTED else _Rounded(dtype)
    return [
        module.register_forward_pre_hook(_Enter(region), with_kwargs=True),
        module.register_forward_hook(_Leave(region), with_kwargs=True, prepend=True, always_call=True),
    ]


class _Calls(threading.local):
    """What ends the calls of one module under way."""

    stack: tuple[Callable[[Any], Any], ...] = ()


class _Computed:
    """A module that computes in a dtype: autocast as it wants it, its inputs cast."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._calls = _Calls()

    def enter(self, module: nn.Module, tree: Any) -> Any:
        """Switch; return the arguments that it computes with."""
        device = _device_of(module, tree)
        before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
        swapped = _Widened(module) if self._dtype is torch.float32 else None

        # Where nothing is cast, float32 weights do not take what this module returns.
        wide = not before[0] and any(tensor.dtype is torch.float32 for tensor in floating(tree))

        def end(output: Any) -> Any:
            torch.set_autocast_enabled(device, before[0])
            torch.set_autocast_dtype(device, before[1])
            torch.set_autocast_cache_enabled(before[2])
            if swapped is not None:
                swapped.restore()
            return cast(output, torch.float32, device, (self._dtype,)) if wide else output

        self._calls.stack = (*self._calls.stack, end)
        low = self._dtype is not torch.float32
        torch.set_autocast_enabled(device, low)
        if low:
            # torch's cache does not tell a weight in one low precision from the same in another.
            torch.set_autocast_cache_enabled(False)
            torch.set_autocast_dtype(device, self._dtype)
        return cast(tree, self._dtype, device)

    def leave(self, output: Any) -> Any:
        """Switch back."""
        if not self._calls.stack:
            return output
        *outer, end = self._calls.stack
        self._calls.stack = tuple(outer)
        return end(output)


class _Rounded:
    """A module whose inputs, outputs and gradients of outputs are rounded to a dtype, and keep theirs."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype

    def enter(self, module: nn.Module, tree: Any) -> Any:
        """Round the inputs."""
        return convert(tree, lambda tensor: _Round.apply(tensor, self._dtype, False))

    def leave(self, output: Any) -> Any:
        """Round the outputs."""
        return convert(output, lambda tensor: _Round.apply(tensor, self._dtype, True))


class _Round(torch.autograd.Function):
    """Rounds forward, and backward where it is asked to."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dtype: str, backward: bool) -> torch.Tensor:
        ctx.dtype = dtype if backward else None
        return rounded(tensor, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        return gradient if ctx.dtype is None else rounded(gradient, ctx.dtype), None, None


def rounded(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Round to nearest even; what is too large becomes infinite, or NaN where a dtype has no infinity."""
    bits = find_digits(dtype)
    if bits is not None:
        nearest = to_digits(tensor.float(), bits).to(tensor.dtype)
        return torch.where(nearest.isfinite(), nearest, tensor)
    limits = FORMATS[dtype]
    low = tensor.to(SIMULATED[dtype]).to(tensor.dtype)
    if limits.infinite:
        return low
    # Which of NaN and the largest number comes out differs between versions of torch.
    return torch.where(tensor.abs() > limits.halfway, torch.nan, low)


class _Widened:
    """Low-precision parameters and buffers of a module in float32, while it computes."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters: list[tuple[nn.Module, str, Any]] = []
        self._buffers: list[tuple[nn.Module, str, Any]] = []
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter.dtype in LOW:
                    self._parameters.append((part, name, parameter))
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.dtype in LOW:
                    self._buffers.append((part, name, buffer))
        for part, name, parameter in self._parameters:
            part._parameters[name] = parameter.float()
        for part, name, buffer in self._buffers:
            part._buffers[name] = buffer.float()
        self._flatten()

    def restore(self) -> None:
        """Put them back; what the module wrote to buffers, such as running statistics, is rounded to their dtype."""
        for part, name, parameter in self._parameters:
            part._parameters[name] = parameter
        for part, name, buffer in self._buffers:
            wide, part._buffers[name] = part._buffers[name], buffer
            if wide is not None:
                with torch.no_grad():
                    buffer.copy_(wide)
        self._flatten()

    def _flatten(self) -> None:
        """Renew the list of weights that recurrent modules keep beside."""
        for part in {part for part, _, _ in self._parameters if isinstance(part, nn.RNNBase)}:
            part._flat_weights = [getattr(part, name, None) for name in part._flat_weights_names]


def _device_of(module: nn.Module, tree: Any) -> str:
    tensor = next(floating(tree), None)
    tensor = next(module.parameters(), None) if tensor is None else tensor
    return "cpu" if tensor is None else tensor.device.type


class _Enter:
    """Hook before a module's forward."""

    def __init__(self, region: _Computed | _Rounded) -> None:
        self._region = region

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Begin."""
        return self._region.enter(module, (args, kwargs))


class _Leave:
    """Hook after a module's forward, also after an exception."""

    def __init__(self, region: _Computed | _Rounded) -> None:
        self._region = region

    def __call__(self, module: nn.Module, *rest: Any) -> Any:
        """End."""
        return self._region.leave(rest[-1])
