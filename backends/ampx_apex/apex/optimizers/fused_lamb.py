"""LAMB: Adam whose step is scaled layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ampx_apex.apex import amp_c
from ampx_apex.apex.amp_c import in_float32

from .base import FusedOptimizer, Group, Lists, State, refuse_amsgrad


class FusedLAMB(FusedOptimizer):
    """LAMB, with the gradients of all groups clipped together first, to `max_grad_norm`.

    `grad_averaging` lets the gradient enter its average times 1 - beta1 rather than whole; `use_nvlamb` scales the step
    of every parameter, also without weight decay.

    Raises:
        UnsupportedByBackendError: `amsgrad` is asked for.
    """

    state_names = ("exp_avg", "exp_avg_sq")
    multi_tensor_l2norm = staticmethod(amp_c.multi_tensor_l2norm)
    multi_tensor_lamb = staticmethod(amp_c.multi_tensor_lamb)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        refuse_amsgrad("FusedLAMB", amsgrad)
        options = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        more = {"weight_decay": weight_decay, "grad_averaging": grad_averaging, "max_grad_norm": max_grad_norm}
        super().__init__(params, {**options, **more})
        self.adam_w_mode = adam_w_mode
        self.set_grad_none = set_grad_none
        self.use_nvlamb = use_nvlamb
        self._norm: Any = 0.0

    def _prepare(self, tensors: list[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> None:
        gradients = [in_float32(grad) for _, gradients in tensors for grad in gradients]
        if gradients:
            self._norm = torch.nn.utils.get_total_norm(gradients)

    def _update(self, group: Group, lists: Lists, states: Sequence[State]) -> None:
        self.multi_tensor_lamb(
            0,
            None,
            lists,
            group["lr"],
            *group["betas"],
            group["eps"],
            group["step"],
            group["bias_correction"],
            group["weight_decay"],
            group["grad_averaging"],
            self.adam_w_mode,
            self._norm,
            self.defaults["max_grad_norm"],
            self.use_nvlamb,
        )


class FusedMixedPrecisionLamb(FusedLAMB):
    """LAMB that keeps float32 masters of parameters of `reduced_precision_dtype`, after `step` steps.

    torch's GradScaler unscales and checks before its step, as for any optimizer.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        step: int = 0,
        *options: Any,
        reduced_precision_dtype: torch.dtype | None = None,
        **more: Any,
    ) -> None:
        super().__init__(params, lr, *options, **more)
        self.reduced_precision_dtype = reduced_precision_dtype
        for group in self.param_groups:
            group["step"] = step

    def _work(self, parameters: list[torch.Tensor], states: list[dict[str, Any]]) -> list[torch.Tensor]:
        work = super()._work(parameters, states)
        for place, (own, state) in enumerate(zip(parameters, states, strict=True)):
            if own.dtype == self.reduced_precision_dtype:
                work[place] = state.setdefault("master", work[place])
        return work
