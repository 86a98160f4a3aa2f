"""Adagrad."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ampx_apex.apex import amp_c

from .base import FusedOptimizer, Group, Lists, State


class FusedAdagrad(FusedOptimizer):
    """Adagrad with L2 regularisation, or with decoupled weight decay where `adagrad_w_mode` is set."""

    state_names = ("sum",)
    multi_tensor_adagrad = staticmethod(amp_c.multi_tensor_adagrad)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})
        self.adagrad_w_mode = adagrad_w_mode
        self.set_grad_none = set_grad_none

    def _update(self, group: Group, lists: Lists, states: Sequence[State]) -> None:
        options = (group["lr"], group["eps"], self.adagrad_w_mode, group["weight_decay"])
        self.multi_tensor_adagrad(0, None, lists, *options)
