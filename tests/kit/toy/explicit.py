"""Backends whose gradients are values: one that casts and clips, and one with the abstract verbs only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import ampx
from ampx.backend import Contract, Device
from toy.framework import Optimizer, Tensor
from toy.verbs import ToyVerbs


class ExplicitToy(ToyVerbs):
    """The toy framework used like JAX: `opt.step(grads)`."""

    name: ClassVar[str] = "toy-explicit"
    capabilities: ClassVar[ampx.Capabilities] = ampx.Capabilities(
        dtypes=frozenset({"float16", "bfloat16"}),
        levels=frozenset({"O0", "O1"}),
        gradients="explicit",
        autocast="scoped",
        clipping=True,
    )
    offers: ClassVar[Mapping[str, str | type[Contract]]] = {"probe": "toy.numerics:ToyProbe"}

    def apply(self, optimizer: Optimizer, grads: Sequence[Tensor | None]) -> None:
        """Run the framework's update."""
        optimizer.update(grads)


class BareToy(ExplicitToy):
    """Loss scaling and nothing else."""

    name: ClassVar[str] = "toy-bare"
    capabilities: ClassVar[ampx.Capabilities] = ampx.Capabilities(gradients="explicit")
    offers: ClassVar[Mapping[str, str | type[Contract]]] = {}

    def device(self, name: str) -> Device:
        """Describe a device that computes float32."""
        return Device(super().device(name).name, reason="this toy casts nothing")

    def clip(
        self, grads: Sequence[Tensor | None], max_norm: float | None, max_value: float | None
    ) -> tuple[list[Tensor | None], float | None]:
        """Refuse."""
        self.refuse("gradient clipping")
