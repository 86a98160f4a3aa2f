"""The `FP16_Optimizer` that early versions of apex had beside `FusedAdam(max_grad_norm=...)`."""

from __future__ import annotations

from typing import Any

from ampx_apex.apex.fp16_utils.fp16_optimizer import FP16Optimizer


class FusedFP16Optimizer(FP16Optimizer):
    """The one of `apex.fp16_utils`, whose dynamic scale starts at 2**16 and whose gradients are dropped by default."""

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        arguments = {"init_scale": 2.0**16, **(dynamic_loss_args or {})}
        super().__init__(init_optimizer, static_loss_scale, dynamic_loss_scale, arguments, verbose)

    @property
    def cur_scale(self) -> float:
        """The current loss scale."""
        return self.loss_scale

    def zero_grad(self, set_grads_to_none: bool = True, **old_spelling: bool) -> None:
        """Forget all gradients; see `FP16Optimizer.zero_grad`."""
        super().zero_grad(set_grads_to_none, **old_spelling)


FP16_Optimizer = FusedFP16Optimizer
