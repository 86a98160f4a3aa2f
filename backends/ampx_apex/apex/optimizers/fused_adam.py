"""Adam and AdamW."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ampx.errors import UnsupportedByBackendError
from ampx_apex.apex import amp_c

from .base import FusedOptimizer, Group, Lists, State, refuse_amsgrad


class FusedAdam(FusedOptimizer):
    """Adam with decoupled weight decay, or with L2 regularisation where `adam_w_mode` is not set.

    The state has the names of torch's Adam; the number of steps is kept once a group, as apex kept it. `max_grad_norm`,
    which early versions of apex had, bounds the norm of the gradients of each group.

    Raises:
        UnsupportedByBackendError: `amsgrad`, `capturable` or `master_weights` is asked for.
    """

    state_names = ("exp_avg", "exp_avg_sq")
    multi_tensor_adam = staticmethod(amp_c.multi_tensor_adam)
    multi_tensor_adam_capturable = staticmethod(amp_c.multi_tensor_adam_capturable)
    multi_tensor_adam_capturable_master = staticmethod(amp_c.multi_tensor_adam_capturable_master)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        max_grad_norm: float = 0.0,
    ) -> None:
        refuse_amsgrad("FusedAdam", amsgrad)
        if capturable or master_weights:
            raise UnsupportedByBackendError(
                f"FusedAdam(capturable={capturable}, master_weights={master_weights}) is not supported; accepted: "
                f"False for both. Use torch.optim.AdamW(fused=True, capturable=True), or opt_level='O2' for master "
                f"weights."
            )
        options = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        bound = {"max_grad_norm": max_grad_norm} if max_grad_norm else {}
        super().__init__(params, {**options, "weight_decay": weight_decay, **bound})
        self.adam_w_mode = adam_w_mode
        self.set_grad_none = set_grad_none

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: None = None,
        output_params: None = None,
        scale: None = None,
        grad_norms: None = None,
        grad_scaler: None = None,
    ) -> Any:
        """Update the parameters that have gradients; see `FusedOptimizer.step`.

        Raises:
            UnsupportedByBackendError: One of the arguments is given that were of use in early versions of apex.
        """
        passed = [
            argument for argument in (grads, output_params, scale, grad_norms, grad_scaler) if argument is not None
        ]
        if passed:
            raise UnsupportedByBackendError(
                "FusedAdam.step() got grads, output_params, scale, grad_norms or grad_scaler; accepted: a closure or "
                "nothing. Unscale gradients before the step: amp.scale_loss does."
            )
        return super().step(closure)

    def _update(self, group: Group, lists: Lists, states: Sequence[State]) -> None:
        bound = group.get("max_grad_norm", 0)
        if bound > 0:
            factor = (bound / (torch.nn.utils.get_total_norm(lists[0]) + 1e-6)).clamp(max=1.0)
            lists = [[gradient * factor.to(gradient.device) for gradient in lists[0]], *lists[1:]]
        self.multi_tensor_adam(
            0,
            None,
            lists,
            group["lr"],
            *group["betas"],
            group["eps"],
            group["step"],
            self.adam_w_mode,
            group["bias_correction"],
            group["weight_decay"],
        )
