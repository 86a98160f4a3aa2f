"""A minimal backend: gradients are values, and nothing optional is declared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import ampx

from .framework import Optimizer, Tensor
from .verbs import ToyVerbs


class ExplicitToy(ToyVerbs):
    """The toy framework used like JAX: `opt.step(grads)`."""

    name: ClassVar[str] = "toy-explicit"
    capabilities: ClassVar[ampx.Capabilities] = ampx.Capabilities(
        dtypes=frozenset({"float16", "bfloat16"}),
        levels=frozenset({"O0", "O1"}),
        gradients="explicit",
        autocast="scoped",
    )

    def apply(self, optimizer: Optimizer, grads: Sequence[Tensor | None]) -> None:
        """Run the framework's update."""
        optimizer.update(grads)
