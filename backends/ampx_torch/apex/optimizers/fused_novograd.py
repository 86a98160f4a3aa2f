"""NovoGrad: gradients are normalised layer by layer."""

from __future__ import annotations

from typing import Any, Final

import torch

from ampx.errors import InvalidOptionError

from .base import FusedOptimizer, refuse_amsgrad, state_tensors

_NORMS: Final = {2: 2.0, 0: float("inf")}


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad, with one average of the gradient's norm a parameter.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        bias_correction: Whether the averages are corrected for their start at zero.
        betas: Decay of the averages of the gradient and of its norm.
        eps: Added to the denominator.
        weight_decay: Factor of the decay.
        amsgrad: Not supported.
        reg_inside_moment: Whether the gradient is normalised and decayed before it enters its average, or after.
        grad_averaging: Whether the gradient enters its average times 1 - beta1, or whole.
        norm_type: 2 for the L2 norm, 0 for the largest value.
        init_zero: Whether the average of the norm starts at 0, or at the norm of the first gradient.
        set_grad_none: Whether `zero_grad` drops the gradients.

    Raises:
        UnsupportedByBackendError: `amsgrad` is asked for.
        InvalidOptionError: The norm is neither.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        refuse_amsgrad("FusedNovoGrad", amsgrad)
        if norm_type not in _NORMS:
            raise InvalidOptionError(
                f"FusedNovoGrad(norm_type={norm_type!r}) is not a norm; accepted: 2 (L2), 0 (largest value). Change it."
            )
        options = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        more = {"weight_decay": weight_decay, "grad_averaging": grad_averaging, "norm_type": norm_type}
        super().__init__(params, {**options, **more, "init_zero": init_zero})
        self.moment_mode = 0 if reg_inside_moment else 1
        self.set_grad_none = set_grad_none

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also one that apex saved, where a group kept the norms of all its parameters. Sync: none."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            by_dtype = group.pop("exp_avg_sq", None)
            if by_dtype is None:
                continue
            low = iter([] if by_dtype[0] is None else by_dtype[0].unbind())
            full = iter([] if by_dtype[1] is None else by_dtype[1].unbind())
            for own in group["params"]:
                if own in self.state:
                    norm = next(full if own.dtype == torch.float32 else low)
                    self.state[own]["exp_avg_sq"] = norm.to(own.device, copy=True)

    def _update(
        self,
        group: dict[str, Any],
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        states: list[dict[str, Any]],
    ) -> None:
        (beta1, beta2), decay, step = group["betas"], group["weight_decay"], group["step"]
        first, second = (1 - beta1**step, 1 - beta2**step) if group["bias_correction"] else (1.0, 1.0)
        averages = state_tensors(states, "exp_avg", parameters)
        denominators = torch._foreach_div(self._average_norms(group, gradients, states), second**0.5)
        torch._foreach_add_(denominators, group["eps"])
        entering = 1 - beta1 if group["grad_averaging"] else 1.0
        torch._foreach_mul_(averages, beta1)
        if self.moment_mode == 0:
            gradients = list(torch._foreach_div(gradients, denominators))
            torch._foreach_add_(gradients, parameters, alpha=decay)
        torch._foreach_add_(averages, gradients, alpha=entering)
        updates = torch._foreach_div(averages, first)
        if self.moment_mode == 1:
            torch._foreach_div_(updates, denominators)
            torch._foreach_add_(updates, parameters, alpha=decay)
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])

    def _average_norms(
        self, group: dict[str, Any], gradients: list[torch.Tensor], states: list[dict[str, Any]]
    ) -> list[torch.Tensor]:
        """Let the norms of these gradients into their averages; gives the averages, one scalar a parameter."""
        beta2, squared = group["betas"][1], group["norm_type"] == 2
        norms = torch._foreach_norm(gradients, _NORMS[group["norm_type"]])
        found = []
        for state, norm in zip(states, norms, strict=True):
            before = state.get("exp_avg_sq")
            if before is None:
                before = torch.zeros_like(norm) if group["init_zero"] else norm
            if squared:
                state["exp_avg_sq"] = (beta2 * before.square() + (1 - beta2) * norm.square()).sqrt()
            else:
                state["exp_avg_sq"] = beta2 * before + (1 - beta2) * norm
            found.append(state["exp_avg_sq"])
        return found
