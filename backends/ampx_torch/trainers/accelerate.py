"""Hugging Face Accelerate, and Trainer, which trains by it."""

from __future__ import annotations

from typing import Any, Final

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from ampx.errors import InvalidOptionError, ProtocolError, UnsupportedByBackendError
from ampx.session import Amp

from .scaler import TrainerScaler

_DTYPES: Final = {"fp16": "float16", "bf16": "bfloat16"}


class _AcceleratorScaler(TrainerScaler):
    """Finds the optimizers that the Accelerator has prepared, whenever it is asked."""

    def __init__(self, accelerator: Accelerator, amp: Amp, **options: Any) -> None:
        super().__init__(amp, **options)
        self._accelerator = accelerator

    def _look(self) -> None:
        prepared = [_raw(optimizer) for optimizer in self._accelerator._optimizers]
        if [*map(id, prepared)] != [*self._wrapped]:  # a Trainer that trains a second time prepares others
            self._wrapped = {key: self._wrapped[key] for key in map(id, prepared) if key in self._wrapped}
            self.manage(prepared)

    def _reached(self, loss: torch.Tensor) -> Any:
        self._look()
        return super()._reached(loss)

    def wrapped(self, optimizer: Any) -> Any:
        self._look()
        return super().wrapped(_raw(optimizer))

    def state_dict(self) -> dict[str, Any]:
        self._look()
        return super().state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._look()
        super().load_state_dict(state)


def attach(trainer: Any, amp: Amp, **options: Any) -> TrainerScaler:
    """Have an Accelerator, or a Trainer of transformers, scale and step by ampx; call it before anything is prepared.

    Accelerate goes on to cast by its own regions, to clip, to tell schedulers of skipped steps, and to save and load
    the scaler. Native defect: on a CPU its fp16 computes in float32 and says nothing; here it computes in float16.

    Args:
        trainer: An `Accelerator`, or what has one as `accelerator`: a `Trainer`.
        amp: What `ampx.init` returned, with the dtype of the Accelerator's `mixed_precision`; with
            `process_wide=False` casting is on in Accelerate's regions only.
        **options: For `amp.wrap_optimizer`.

    Returns:
        What stands in the place of its GradScaler; `wrapped(optimizer)` tells `last_step` and `loss_scale`.

    Raises:
        InvalidOptionError: It is no Accelerator, or its `mixed_precision` is another dtype than the session's.
        ProtocolError: Optimizers were prepared before.
        UnsupportedByBackendError: The optimizers are not torch's: DeepSpeed, Megatron-LM and XLA have their own.
    """
    accelerator = getattr(trainer, "accelerator", trainer)
    if not isinstance(accelerator, Accelerator):
        raise InvalidOptionError(
            f"attach got {type(trainer).__name__}; accepted: an accelerate.Accelerator, or a transformers.Trainer. "
            f"Pass one of these."
        )
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise UnsupportedByBackendError(
            f"attach got an Accelerator of {kind.value}, which has loss scaling of its own; accepted: one process, "
            f"DDP, FSDP. Leave ampx out, or choose another of Accelerate's distributed types."
        )
    wanted = _DTYPES.get(accelerator.mixed_precision)
    if amp.enabled and wanted != amp.effective.dtype:
        raise InvalidOptionError(
            f"attach got an Accelerator with mixed_precision={accelerator.mixed_precision!r} and a session for "
            f"{amp.effective.dtype}; accepted: 'fp16' with float16, 'bf16' with bfloat16. Change one of them (a "
            f"Trainer has fp16=True and bf16=True)."
        )
    if accelerator._optimizers:
        raise ProtocolError(
            "attach got an Accelerator that has prepared optimizers already, with a scaler of its own; accepted: one "
            "that has prepared none. Call attach right after making it."
        )
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:  # each process sees its own shard only
        options.setdefault("process_group", torch.distributed.group.WORLD)
    # Accelerate asks on the host whether a step was skipped; its own answer is wrong for fused optimizers.
    options.setdefault("device_scale", False)
    scaler = _AcceleratorScaler(accelerator, amp, **options)
    accelerator.native_amp = amp.enabled
    accelerator.scaler = scaler if amp.enabled else None
    return scaler


def _raw(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's."""
    while hasattr(optimizer, "accelerator_state"):
        optimizer = optimizer.optimizer
    return optimizer
