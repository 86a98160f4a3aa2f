"""Which gradients of a low-precision model its masters have already.

As in apex the model's own gradients stay, scaled, after a block. The next block must not count them again, nor must a
step without a block take them for true ones, as it takes those of a backward outside any block.
"""

from __future__ import annotations

import torch

from ampx_torch.prepare.masters import MasterWeights

_MARK = "_ampx_pulled"


def mark_pulled(masters: MasterWeights) -> None:
    """Remember that the masters have all gradients that are on the model now."""
    for own in masters.model_parameters():
        if own.grad is not None:
            setattr(own.grad, _MARK, True)


def pull_foreign(masters: MasterWeights) -> None:
    """Add to the masters' gradients what a backward outside any block left on the model: it is true."""
    for own, master in masters.pairs:
        if own.grad is not None and not hasattr(own.grad, _MARK):
            foreign = own.grad.to(torch.float32, copy=True)
            master.grad = foreign if master.grad is None else master.grad + foreign
    mark_pulled(masters)
