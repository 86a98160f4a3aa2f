"""LAMB: Adam whose step is scaled layer by layer."""

from __future__ import annotations

from typing import Any

import torch

from .base import FusedOptimizer, in_float32, refuse_amsgrad, state_tensors


class FusedLAMB(FusedOptimizer):
    """LAMB, with the gradients of all groups clipped together first.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        bias_correction: Whether the averages are corrected for their start at zero.
        betas: Decay of the averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Factor of the decay.
        amsgrad: Not supported.
        adam_w_mode: True decays weights apart from the gradient, False adds the decay to the gradient.
        grad_averaging: Whether the gradient enters its average times 1 - beta1, or whole.
        set_grad_none: Whether `zero_grad` drops the gradients.
        max_grad_norm: Bound of the norm over the gradients of all groups.
        use_nvlamb: True scales the step of every parameter, False only where the weight decay is not 0.

    Raises:
        UnsupportedByBackendError: `amsgrad` is asked for.
    """

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
        self._divisor: Any = 1.0

    def _prepare(self, tensors: list[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> None:
        gradients = [in_float32(grad) for _, gradients in tensors for grad in gradients]
        if gradients:
            norm = torch.nn.utils.get_total_norm(gradients)
            self._divisor = (norm / self.defaults["max_grad_norm"]).clamp_(min=1.0)

    def _update(
        self,
        group: dict[str, Any],
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        states: list[dict[str, Any]],
    ) -> None:
        (beta1, beta2), decay, step = group["betas"], group["weight_decay"], group["step"]
        corrected = group["bias_correction"]
        averages = state_tensors(states, "exp_avg", parameters)
        squares = state_tensors(states, "exp_avg_sq", parameters)
        gradients = [grad / self._divisor.to(grad.device) for grad in gradients]
        if decay and not self.adam_w_mode:
            torch._foreach_add_(gradients, parameters, alpha=decay)
        torch._foreach_mul_(averages, beta1)
        torch._foreach_add_(averages, gradients, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        denominators = torch._foreach_div(squares, 1 - beta2**step if corrected else 1.0)
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, group["eps"])
        updates = torch._foreach_div(averages, 1 - beta1**step if corrected else 1.0)
        torch._foreach_div_(updates, denominators)
        if decay and self.adam_w_mode:
            torch._foreach_add_(updates, parameters, alpha=decay)
        if decay or self.use_nvlamb:
            norms = zip(torch._foreach_norm(parameters), torch._foreach_norm(updates), strict=True)
            # A layer, or an update, that is all zeros is not scaled.
            ratios = [torch.where((own > 0) & (new > 0), own / new, 1.0) for own, new in norms]
            torch._foreach_mul_(updates, ratios)
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])
