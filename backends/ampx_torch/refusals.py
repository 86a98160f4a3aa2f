"""What a wrapped optimizer refuses to hold."""

from __future__ import annotations

from typing import Any

import torch

from ampx.errors import LowPrecisionParametersError

from .debug import name_parameters


def refuse_half(groups: list[dict[str, Any]]) -> None:
    """Raise where trainable float16 parameters would be updated in float16.

    Raises:
        LowPrecisionParametersError: There are some.
    """
    found = [
        name
        for name, parameter in name_parameters(groups, None)
        if parameter.dtype is torch.float16 and parameter.requires_grad
    ]
    if found:
        names = ", ".join(found[:5]) + (", …" if found[5:] else "")
        raise LowPrecisionParametersError(
            f"the optimizer holds {len(found)} float16 parameters ({names}); updates smaller than their "
            f"precision would be lost. Keep the parameters in float32 (remove .half(); "
            f"autocast computes in float16 all the same), or use ampx.init(level='O2') and "
            f"model, opt = ampx.prepare(model, opt)."
        )
