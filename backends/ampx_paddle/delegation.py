"""A Paddle optimizer that delegates everything to another."""

from __future__ import annotations

from typing import Any

import paddle

from ampx.optimizer import delegate


class DelegatingOptimizer(paddle.optimizer.Optimizer):
    """Looks to Paddle like the raw optimizer it holds: parameters, state and learning rate are that one's.

    The base class's `__init__` is never called: it would make a second set of accumulators.
    """

    optimizer: Any


delegate(DelegatingOptimizer, paddle.optimizer.Optimizer, "optimizer")
