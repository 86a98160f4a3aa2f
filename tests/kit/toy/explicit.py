"""Backends whose gradients are values: one that casts and clips, and one with the abstract verbs only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import ampx
from ampx.backend import Device
from toy.framework import Optimizer, Tensor
from toy.numerics import ToyNumerics


class ExplicitToy(ToyNumerics):
    """The toy framework used like JAX: `opt.step(grads)`."""

    name: ClassVar[str] = "toy-explicit"
    capabilities: ClassVar[ampx.Capabilities] = ampx.Capabilities(
        dtypes=frozenset({"float16", "bfloat16"}),
        levels=frozenset({"O0", "O1"}),
        gradients="explicit",
        autocast="scoped",
        clipping=True,
        watches=True,
        forces=True,
        replays=True,
    )

    def apply(self, optimizer: Optimizer, grads: Sequence[Tensor | None]) -> None:
        """Run the framework's update."""
        optimizer.update(grads)


class BareToy(ExplicitToy):
    """Loss scaling and nothing else."""

    name: ClassVar[str] = "toy-bare"
    capabilities: ClassVar[ampx.Capabilities] = ampx.Capabilities(gradients="explicit")
    watch, force, replay = ampx.Backend.watch, ampx.Backend.force, ampx.Backend.replay  # which refuse

    def device(self, name: str) -> Device:
        """Describe a device that computes float32."""
        return Device(super().device(name).name, reason="this toy casts nothing")

    def clip(
        self, grads: Sequence[Tensor | None], max_norm: float | None, max_value: float | None
    ) -> tuple[list[Tensor | None], float | None]:
        """Refuse."""
        self.refuse("gradient clipping")
