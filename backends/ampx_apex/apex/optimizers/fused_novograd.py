"""NovoGrad: gradients are normalised layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from ampx.errors import InvalidOptionError
from ampx_apex.apex import amp_c

from .base import FusedOptimizer, Group, Lists, State, refuse_amsgrad

_NORMS: Final = {2: 2.0, 0: float("inf")}


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad, with one average of the gradient's norm a parameter.

    `norm_type` is 2, or 0 for the largest value. `reg_inside_moment` normalises and decays the gradient before it
    enters its average; `init_zero` starts the average of the norm at 0 rather than at the first norm.

    Raises:
        UnsupportedByBackendError: `amsgrad` is asked for.
        InvalidOptionError: The norm is neither.
    """

    state_names = ("exp_avg",)
    multi_tensor_novograd = staticmethod(amp_c.multi_tensor_novograd)

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
        """Load a state, also one that apex saved, where a group kept the norms of all its parameters."""
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

    def _update(self, group: Group, lists: Lists, states: Sequence[State]) -> None:
        self._start_norms(group, lists[0], states)
        norms = torch.stack([state["exp_avg_sq"].to(lists[1][0].device) for state in states])
        self.multi_tensor_novograd(
            0,
            None,
            lists,
            norms,
            group["lr"],
            *group["betas"],
            group["eps"],
            group["step"],
            group["bias_correction"],
            group["weight_decay"],
            group["grad_averaging"],
            self.moment_mode,
            group["norm_type"],
        )
        for state, norm in zip(states, norms.unbind(), strict=True):
            state["exp_avg_sq"] = norm.to(state["exp_avg_sq"].device, copy=True)

    def _start_norms(self, group: Group, gradients: list[torch.Tensor], states: Sequence[State]) -> None:
        """Start the average norms of parameters in their first step."""
        new = [place for place, state in enumerate(states) if "exp_avg_sq" not in state]
        norms = torch._foreach_norm([gradients[place] for place in new], _NORMS[group["norm_type"]]) if new else []
        for place, norm in zip(new, norms, strict=True):
            states[place]["exp_avg_sq"] = torch.zeros_like(norm) if group["init_zero"] else norm
