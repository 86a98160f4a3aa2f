"""Adam and AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from ampx.errors import UnsupportedByBackendError

from .base import FusedOptimizer, has_fused_kernel, refuse_amsgrad, state_tensors


class FusedAdam(FusedOptimizer):
    """Adam with decoupled weight decay, or with L2 regularisation.

    The state has the names of torch's Adam; the number of steps is kept once a group, as apex kept it.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        bias_correction: Whether the averages are corrected for their start at zero.
        betas: Decay of the averages of the gradient and of its square.
        eps: Added to the denominator.
        adam_w_mode: True decays weights apart from the gradient, False adds the decay to the gradient.
        weight_decay: Factor of the decay.
        amsgrad: Not supported.
        set_grad_none: Whether `zero_grad` drops the gradients.
        capturable: Not supported.
        master_weights: Not supported.

    Raises:
        UnsupportedByBackendError: One of the options is not supported.
    """

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
    ) -> None:
        refuse_amsgrad("FusedAdam", amsgrad)
        if capturable or master_weights:
            raise UnsupportedByBackendError(
                f"FusedAdam(capturable={capturable}, master_weights={master_weights}) is not supported; accepted: "
                f"False for both. Use torch.optim.AdamW(fused=True, capturable=True), or opt_level='O2' for master "
                f"weights."
            )
        options = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**options, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode
        self.set_grad_none = set_grad_none

    def step(  # type: ignore[override]
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

        Sync: none.
        """
        given = [one for one in (grads, output_params, scale, grad_norms, grad_scaler) if one is not None]
        if given:
            raise UnsupportedByBackendError(
                "FusedAdam.step() got grads, output_params, scale, grad_norms or grad_scaler; accepted: a closure or "
                "nothing. Unscale gradients before the step: amp.scale_loss does."
            )
        return super().step(closure)

    def _update(
        self,
        group: dict[str, Any],
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        states: list[dict[str, Any]],
    ) -> None:
        averages = state_tensors(states, "exp_avg", parameters)
        squares = state_tensors(states, "exp_avg_sq", parameters)
        if not group["bias_correction"]:
            self._update_uncorrected(group, parameters, gradients, averages, squares)
            return
        fused = has_fused_kernel(parameters)
        beta1, beta2 = group["betas"]
        apply = adamw if self.adam_w_mode else adam
        # The functions count the step themselves, in one tensor a parameter.
        before = torch.full(
            (len(parameters),), float(group["step"] - 1), device=parameters[0].device if fused else "cpu"
        )
        apply(
            parameters,
            gradients,
            averages,
            squares,
            [],
            list(before.unbind()),
            fused=fused,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _update_uncorrected(
        self,
        group: dict[str, Any],
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        averages: list[torch.Tensor],
        squares: list[torch.Tensor],
    ) -> None:
        """Update without bias correction, which torch's Adam does not have."""
        (beta1, beta2), decay, rate = group["betas"], group["weight_decay"], group["lr"]
        if decay and not self.adam_w_mode:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=decay))
        torch._foreach_lerp_(averages, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_add_(denominators, group["eps"])
        if decay and self.adam_w_mode:
            torch._foreach_mul_(parameters, 1 - rate * decay)
        torch._foreach_addcdiv_(parameters, averages, denominators, -rate)
