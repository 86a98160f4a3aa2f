"""What apex kept on an optimizer as `_amp_stash`, for trainers that read it."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch

from ampx_apex.apex import amp_c
from ampx_torch.trees import LOW


class Stash:
    """The parameters of an optimizer by dtype, and flags. Trainers may set more on it.

    Attributes:
        lazy_init_called: The lists below are there; before the first block they are not.
        params_have_scaled_gradients: The last block was asked to leave the gradients scaled.
        already_patched: Of no meaning.
        all_fp16_params: The model's low-precision parameters.
        all_fp32_from_fp16_params: Their masters. Only with master weights, like the next.
        all_fp32_from_fp32_params: The parameters that need no master.
        all_fp32_params: All others. Only without master weights.
        fp16_groups, fp32_from_fp16_groups, fp32_from_fp32_groups: The same by parameter group.
    """

    def __init__(self, optimizer: Any) -> None:
        parameters = [own for group in optimizer.param_groups for own in group["params"]]
        device = parameters[0].device if parameters else "cpu"
        self.lazy_init_called = False
        self.params_have_scaled_gradients = False
        self.already_patched = False
        self.multi_tensor_scale = amp_c.multi_tensor_scale
        self.multi_tensor_l2norm = amp_c.multi_tensor_l2norm
        self.dummy_overflow_buf = torch.zeros(1, dtype=torch.int32, device=device)

    def fill(self, optimizer: Any) -> None:
        """Sort the parameters of an optimizer."""
        groups = [group["params"] for group in optimizer.param_groups]
        if optimizer.masters is None:
            everything = list(chain.from_iterable(groups))
            self.all_fp16_params = [own for own in everything if own.dtype in LOW]
            self.all_fp32_params = [own for own in everything if own.dtype not in LOW]
            self.all_fp16_grad_stash = [None] * len(self.all_fp16_params)
            self.all_fp32_grad_stash = [None] * len(self.all_fp32_params)
        else:
            self._fill_with_masters(groups, {master: own for own, master in optimizer.masters.pairs})

    def _fill_with_masters(self, groups: list[list[Any]], models: dict[Any, Any]) -> None:
        """Sort the trained parameters into masters, of parameters of the model, and others."""
        trained = [[own for own in group if own.requires_grad] for group in groups]
        self.fp32_from_fp16_groups = [list(filter(models.__contains__, group)) for group in trained]
        self.fp16_groups = [[models[own] for own in group] for group in self.fp32_from_fp16_groups]
        self.fp32_from_fp32_groups = [[own for own in group if own not in models] for group in trained]
        self.all_fp16_params = list(chain.from_iterable(self.fp16_groups))
        self.all_fp32_from_fp16_params = list(chain.from_iterable(self.fp32_from_fp16_groups))
        self.all_fp32_from_fp32_params = list(chain.from_iterable(self.fp32_from_fp32_groups))
        self.all_fp16_grad_stash = [None] * len(self.all_fp16_params)
        self.all_fp32_from_fp32_grad_stash = [None] * len(self.all_fp32_from_fp32_params)
