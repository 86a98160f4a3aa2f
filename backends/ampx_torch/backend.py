"""The verbs of ampx in PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import torch

import ampx
from ampx.backend import LossInfo
from ampx.errors import LossDtypeError
from ampx.optimizer import WrappedOptimizer

from . import casting, debug, devices, prepare, unwrapped_steps
from .reach import leaves_of
from .trees import LOW, gradient_of
from .wrapping import make_wrapper


class TorchBackend(ampx.Backend):
    """PyTorch: torch.autocast for casting, torch's own check-and-unscale kernels for loss scaling."""

    name: ClassVar[str] = "torch"
    capabilities: ClassVar[ampx.Capabilities] = ampx.Capabilities(
        devices=("cuda", "cpu"),
        dtypes=frozenset({"float16", "bfloat16"}),
        levels=frozenset({"O0", "O1", "O2", "O3"}),
        gradients="implicit",
        autocast="scoped",
        op_lists=True,
        clipping=True,
        per_loss_scales=True,
        sees_backward=True,
    )
    prepare_finds_modules: ClassVar[bool] = True
    offers: ClassVar[Mapping[str, str]] = {
        "probe": "ampx_torch.numerics.probe:TorchProbe",
        "converter": "ampx_torch.inference:TorchConverter",
        "automation": "ampx_torch.run:TorchAutomation",
        "demo": "ampx_torch.demo:TorchTrainer",
    }

    # Verbs that stand in modules of their own; those that take the backend are methods as they are.
    device = staticmethod(devices.describe)
    autocast = staticmethod(casting.region)
    check_plan = staticmethod(casting.check_plan)
    enter_thread = staticmethod(casting.enter_thread)
    cast = staticmethod(casting.cast)
    widest = staticmethod(casting.widest)
    activate = staticmethod(casting.activate)
    deactivate = staticmethod(casting.deactivate)
    wrap_optimizer = staticmethod(make_wrapper)
    prepare = staticmethod(prepare.prepare)
    nonfinite_parameters = staticmethod(debug.nonfinite_parameters)

    def is_optimizer(self, candidate: object) -> bool:
        return isinstance(candidate, torch.optim.Optimizer) and not isinstance(candidate, WrappedOptimizer)

    def inspect_loss(self, loss: Any, check_nan: bool | None) -> LossInfo:
        """Return what `scale_loss` has to know about a loss; it looks for NaN on the CPU, elsewhere if asked to."""
        if not isinstance(loss, torch.Tensor):
            raise LossDtypeError(
                f"scale_loss got a loss of type {type(loss).__name__}; accepted: a torch tensor. Pass the tensor that "
                f"the loss function returned, not loss.item()."
            )
        elements = loss.numel()
        floating = loss.is_floating_point()
        nan: bool | None = None
        if elements == 1 and floating and check_nan is not False and (check_nan or loss.is_cpu) and not _traced(loss):
            value = loss.item()
            nan = value != value
        # Only a message would need the name of a floating dtype, and spelling it takes as long as all of the above.
        attached = loss.requires_grad and torch.is_grad_enabled()  # what multiplies it would be detached
        if attached and nan is False:
            return _SOUND
        return LossInfo(elements, "floating" if floating else str(loss.dtype), floating, attached, nan)

    def scale(self, loss: Any, scale: Any) -> Any:
        """Return the loss in float32 times the scale.

        In float16 the product would overflow long before the gradients do (native defect 4: a one-element 1-d
        float16 loss stays float16 in torch's own scaler).

        Sync: none, unless the scale is on an accelerator and the loss is not.
        """
        if loss.dtype in LOW:
            loss = loss.float()
        if not isinstance(scale, torch.Tensor):
            if scale == 1.0:  # as bfloat16 has it: another tensor of the same value, and no kernel in backward
                return loss.view_as(loss)
            scale = _scalar(scale)
        elif scale.device != loss.device:
            # A copy to the host must be waited for before the product is taken.
            scale = scale.to(device=loss.device, non_blocking=loss.device.type != "cpu")
        return loss * scale

    def watch_backward(self, loss: Any, scaled: Any) -> Callable[[], bool | None]:
        if _traced(loss):  # whose gradients are values: nobody calls backward on it
            return lambda: None
        if unwrapped_steps.follows():
            unwrapped_steps.follow(leaves_of([loss])[0].values())
        loss.retain_grad()
        scaled.retain_grad()

        def answer() -> bool | None:
            return gradient_of(scaled) is not None or (None if gradient_of(loss) is None else False)

        return answer

    def smallest(self, scales: Sequence[Any]) -> Any:
        if not any(isinstance(scale, torch.Tensor) for scale in scales):
            return min(scales)
        on_device = next(scale for scale in scales if isinstance(scale, torch.Tensor))
        options: dict[str, Any] = {"dtype": torch.float32, "device": on_device.device}
        return torch.stack([torch.as_tensor(scale, **options) for scale in scales]).amin()


_SOUND: Final = LossInfo(1, "floating", True, True, False)  # nearly every loss
# Whether a tensor stands for values inside a function that torch.func differentiates or maps.
_traced: Final[Callable[[torch.Tensor], bool]] = torch._C._functorch.is_functorch_wrapped_tensor


@functools.lru_cache(maxsize=32)
def _scalar(scale: float) -> torch.Tensor:
    """Return a number as a tensor on the host, which torch multiplies by on any device; a Python float costs more."""
    with torch.inference_mode(False):  # kept for later backwards, which could not save an inference tensor
        return torch.tensor(scale, dtype=torch.float32, device="cpu")
