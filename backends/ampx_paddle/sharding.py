"""Sharding is refused: a process sees the gradients of its own shard only, so that processes would not skip alike."""

from __future__ import annotations

from typing import NoReturn

import paddle

from ampx.errors import UnsupportedByBackendError


def refuse(what: str) -> NoReturn:
    """Raise for a sharded optimizer."""
    raise UnsupportedByBackendError(
        f"{what}; accepted: optimizers that hold all parameters in every process. Use paddle.DataParallel, or fleet "
        f"with data parallelism only (sharding_degree=1), and wrap the optimizer before fleet sees it."
    )


def refuse_partition() -> None:
    """Raise where one of several processes replaces the parameters of an optimizer: it keeps its shard only."""
    if paddle.distributed.get_world_size() > 1:
        refuse("the parameters of a wrapped optimizer were replaced in one of several processes, as sharding does")
