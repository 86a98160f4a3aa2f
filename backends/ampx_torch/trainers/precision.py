"""What ampx's precision plugins do, for the Trainer and for Fabric of whichever package has them.

Lightning comes as `lightning`, with all in it, and as `pytorch_lightning` with `lightning_fabric`: the same code twice,
of which neither takes the classes of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ampx.errors import UnsupportedByBackendError
from ampx.session import Amp
from ampx_torch.closures import evaluates_once

from .scaler import TrainerScaler

if TYPE_CHECKING:
    from lightning.fabric.plugins.precision import Precision as FabricBase
    from lightning.pytorch.plugins.precision import Precision as TrainerBase
else:
    FabricBase = TrainerBase = object  # each package adds its own


class _ByAmpx:
    """What both plugins are to their trainer: a region that casts, and loss scales in its checkpoints.

    Attributes:
        package: Whose plugin it is, for a sentence.
        scaler: The optimizers of ampx beside the trainer's.
        precision: The trainer's name of what the session computes in.
    """

    package: ClassVar[str]

    def __init__(self, amp: Amp, **options: Any) -> None:
        """Serve a session.

        Args:
            amp: What `ampx.init` returned; with `process_wide=False` casting is on in the trainer's regions only: those
                of Fabric, or the steps of Lightning's module.
            **options: For `amp.wrap_optimizer`.
        """
        self.scaler = TrainerScaler(amp, **options)
        names = {"float16": "16-mixed", "bfloat16": "bf16-mixed"}
        self.precision: Any = names.get(str(amp.effective.dtype), "32-true")

    def __repr__(self) -> str:
        """Say whose it is: the error of a trainer that does not take it shows this."""
        return f"<{type(self).__name__} of {type(self).__module__}, which is for {self.package}>"

    def wrapped(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return ampx's optimizer beside one of the trainer's, for `last_step`, `loss_scale` and `ampx.gate`."""
        return self.scaler.wrapped(_raw(optimizer))

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a region that casts."""
        return self.scaler.amp.autocast()

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scales."""
        return self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over loss scales, of another precision plugin's GradScaler too."""
        self.scaler.load_state_dict(state_dict)


class ForFabric(_ByAmpx, FabricBase):
    """Has Fabric cast, scale and step by ampx.

    Fabric does not tell a plugin of its optimizers: call `manage` with them. It does not save a plugin's state either:
    save the session, `fabric.save(path, {..., "amp": amp})`.

    Attributes:
        scaler: The optimizers of ampx beside Fabric's.
    """

    def manage(self, *optimizers: torch.optim.Optimizer) -> None:
        """Wrap optimizers, as `Fabric.setup` returned them or raw, in the order of their checkpoints."""
        self.scaler.manage(_raw(optimizer) for optimizer in optimizers)

    def backward(self, tensor: torch.Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward on the scaled loss."""
        with self.scaler.scaling(tensor) as scaled:
            super().backward(scaled, model, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Apply or skip."""
        return self.scaler.step(optimizer, **kwargs)

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale gradients, before they are clipped."""
        self.scaler.unscale_(_raw(optimizer))


class ForTrainer(_ByAmpx, TrainerBase):
    """Has Lightning's Trainer cast, scale and step by ampx.

    Loss scales are in the Trainer's checkpoints. Schedulers that move with the steps wait for skipped ones.

    Attributes:
        scaler: The optimizers of ampx beside the Trainer's.
    """

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Wrap the optimizers; have their schedulers wait for skipped steps.

        Native defect: Lightning moves a scheduler after a step that its GradScaler skipped.
        """
        self.scaler.manage(optimizers)
        for config in lr_schedulers:
            if config.interval == "step":
                optimizer = self.scaler.wrapped(config.scheduler.optimizer)
                config.scheduler = self.scaler.amp.gate(config.scheduler, optimizer)
        return super().connect(model, optimizers, lr_schedulers)

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward on the scaled loss."""
        with self.scaler.scaling(tensor) as scaled:
            super().backward(scaled, model, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, unscale gradients, call the hooks and clip, then apply or skip.

        Raises:
            UnsupportedByBackendError: The optimizer evaluates its closure several times.
        """
        if not evaluates_once(optimizer):
            raise UnsupportedByBackendError(
                f"{type(optimizer).__name__} evaluates its closure several times, between which Lightning would call "
                f"hooks and clip; accepted: optimizers that evaluate it once. Train it in a loop of your own."
            )
        result = closure()
        if result is None and model.automatic_optimization:  # the module's training_step asked to skip the batch
            return None
        self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        self.scaler.step(optimizer, **kwargs)
        return result


def _raw(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside Lightning's or Fabric's."""
    return getattr(optimizer, "_optimizer", optimizer)
