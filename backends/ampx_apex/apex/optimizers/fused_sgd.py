"""Stochastic gradient descent with momentum."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch.optim.optimizer import required

from ampx.errors import AmpxWarning, InvalidOptionError
from ampx_apex.apex import amp_c

from .base import FusedOptimizer, Group, Lists, State, state_tensors


class FusedSGD(FusedOptimizer):
    """SGD as `torch.optim.SGD` computes it, and with weight decay after momentum where asked for.

    Master gradients are always made: `materialize_master_grads=False` warns.

    Raises:
        InvalidOptionError: A value is out of range.
        ValueError: Neither `lr` nor a group's own is passed.
    """

    multi_tensor_sgd = staticmethod(amp_c.multi_tensor_sgd)

    def __init__(
        self,
        params: Any,
        lr: Any = required,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if value is not required and value < 0:
                raise InvalidOptionError(f"FusedSGD({name}={value!r}) is out of range; accepted: 0 or more. Change it.")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise InvalidOptionError(
                f"FusedSGD(nesterov=True, momentum={momentum!r}, dampening={dampening!r}) is not accepted; Nesterov's "
                f"momentum needs momentum above 0 and dampening=0. Change one of them."
            )
        if not materialize_master_grads:
            warnings.warn(
                "FusedSGD(materialize_master_grads=False) has no effect: master gradients are made, and the update is "
                "the same. Leave it out.",
                AmpxWarning,
                stacklevel=2,
            )
        options = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, {**options, "nesterov": nesterov})
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self.set_grad_none = set_grad_none

    def _update(self, group: Group, lists: Lists, states: Sequence[State]) -> None:
        gradients, parameters = lists
        # The momentum of all starts together or of none, so parameters that come later are updated apart.
        everything = range(len(parameters))
        new = [index for index in everything if states[index].get("momentum_buffer") is None]
        for chosen in (new, [index for index in everything if index not in set(new)]):
            first_run = chosen is new
            own = [parameters[index] for index in chosen]
            momenta = own  # of no meaning without momentum
            if group["momentum"]:
                momenta = state_tensors([states[index] for index in chosen], "momentum_buffer", own)
            self.multi_tensor_sgd(
                0,
                None,
                [[gradients[index] for index in chosen], own, momenta],
                group["weight_decay"],
                group["momentum"],
                group["dampening"],
                group["lr"],
                group["nesterov"],
                first_run,
                self.wd_after_momentum,
            )
