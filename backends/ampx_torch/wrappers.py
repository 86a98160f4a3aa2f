"""Functions of torch that are written in Python and consist of one operation, with that operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn import functional as F  # noqa: N812

_SAME_NAME: Final = (
    "alpha_dropout batch_norm binary_cross_entropy binary_cross_entropy_with_logits celu cosine_embedding_loss "
    "ctc_loss dropout elu embedding glu group_norm hardsigmoid hardswish hardtanh hinge_embedding_loss huber_loss "
    "instance_norm kl_div l1_loss layer_norm leaky_relu log_softmax margin_ranking_loss mish mse_loss "
    "multi_margin_loss poisson_nll_loss relu rms_norm rrelu selu silu smooth_l1_loss soft_margin_loss softmax "
    "triplet_margin_loss adaptive_avg_pool2d adaptive_avg_pool3d"
)

# Each is proved by a test: a rule for the operation must change what the function gives.
PYTHON_WRAPPERS: Final[dict[Callable[..., Any], tuple[str, ...]]] = {
    **{getattr(F, name): (name,) for name in _SAME_NAME.split()},
    F.cross_entropy: ("cross_entropy_loss",),
    F.grid_sample: ("grid_sampler",),
    F.nll_loss: ("nll_loss_nd",),
    torch.cdist: ("cdist",),
    torch.einsum: ("einsum",),
}
