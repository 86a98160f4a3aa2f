"""A backend with optional abilities: gradients hang on the parameters, every loss may have its own scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import ampx
from ampx.backend import reject_unknown
from ampx.contract import CastPlan, Unscaled
from ampx.group import Member
from ampx.optimizer import GenericOptimizer
from ampx.policy import Dtype
from ampx.running import Run

from .automation import automate
from .framework import Optimizer, Tensor
from .verbs import ToyVerbs

OPERATIONS = ("product", "total")


class ImplicitToy(ToyVerbs):
    """The toy framework used like PyTorch: `loss.backward()`, `opt.step()`."""

    name: ClassVar[str] = "toy"
    capabilities: ClassVar[ampx.Capabilities] = ampx.Capabilities(
        dtypes=frozenset({"float16", "bfloat16"}),
        levels=frozenset({"O0", "O1"}),
        gradients="implicit",
        autocast="scoped",
        op_lists=True,
        promotes=True,
        clipping=True,
        per_loss_scales=True,
        names_gradients=True,
        automates=True,
    )

    def check_plan(self, plan: CastPlan) -> CastPlan:
        """Check the op lists."""
        for entry in (*plan.allow, *plan.deny):
            if entry not in OPERATIONS:
                raise ampx.UnsupportedOpError(
                    f"{entry!r} is no operation of the toy; accepted: {', '.join(OPERATIONS)}. Pass one of these."
                )
        return plan

    def widest(self, tree: Any, at_least: Dtype) -> Dtype:
        """Give float32 if any floating tensor of the tree has it."""
        if isinstance(tree, dict):
            return self.widest(list(tree.values()), at_least)
        if isinstance(tree, (list, tuple)):
            found = {self.widest(value, at_least) for value in tree}
            return "float32" if "float32" in found else at_least
        return "float32" if isinstance(tree, Tensor) and tree.dtype == "float32" else at_least

    def gradients(self, optimizer: Optimizer) -> list[Tensor | None]:
        """List the gradients; empty where no parameter has one."""
        found = [parameter.grad for parameter in optimizer.parameters]
        return found if any(grad is not None for grad in found) else []

    def zero_gradients(self, optimizer: Optimizer) -> None:
        """Forget the gradients."""
        optimizer.zero_grad()

    def unscale(self, grads: Sequence[Tensor | None], scale: float) -> Unscaled:
        """Divide gradients by the scale in place, and test them."""
        true, finite = super().unscale(grads, scale)
        return Unscaled(_overwrite(grads, true), finite)

    def clip(
        self, grads: Sequence[Tensor | None], max_norm: float | None, max_value: float | None
    ) -> tuple[list[Tensor | None], float | None]:
        """Clip in place."""
        clipped, norm = super().clip(grads, max_norm, max_value)
        return _overwrite(grads, clipped), norm

    def apply(self, optimizer: Optimizer, grads: Sequence[Tensor | None]) -> None:
        """Run the framework's update."""
        optimizer.step()

    def wrap_optimizer(self, optimizer: Optimizer, member: Member, options: Mapping[str, Any]) -> ToyOptimizer:
        """Give the wrapper that keeps several losses apart."""
        reject_unknown(self.name, options, ())
        if any(parameter.dtype != "float32" for parameter in optimizer.parameters):
            raise ampx.LowPrecisionParametersError(
                "wrap_optimizer got low-precision parameters; accepted: float32. Keep the parameters in float32."
            )
        return ToyOptimizer(self, optimizer, member, options)

    def nonfinite_parameters(self, optimizer: Any, model: Any | None) -> list[tuple[str, int, int]]:
        """List the parameters with non-finite gradients by position."""
        found = []
        for position, parameter in enumerate(optimizer.parameters):
            bad = 0 if parameter.grad is None else sum(not math.isfinite(v) for v in parameter.grad.data)
            if bad:
                found.append((str(position), bad, len(parameter.data)))
        return found

    def automate(self, run: Run) -> AbstractContextManager[None]:
        """Manage the optimizers of a script."""
        return automate(run)


def _overwrite(grads: Sequence[Tensor | None], new: Sequence[Tensor | None]) -> list[Tensor | None]:
    for grad, other in zip(grads, new, strict=True):
        if grad is not None and other is not None:
            grad.data = other.data
    return list(grads)


class ToyOptimizer(GenericOptimizer):
    """Parks the gradients of one loss while another, with a scale of its own, runs backward."""

    def __init__(self, backend: ImplicitToy, optimizer: Optimizer, member: Member, options: Mapping[str, Any]) -> None:
        super().__init__(backend, optimizer, member, options)
        member.group.culprits = self._culprits
        self._parked: dict[int, list[Tensor | None]] = {}
        self._current: int | None = None
        self._finite: dict[int, bool] = {}

    def ampx_before_backward(self, loss_id: int, scale: Any) -> None:
        """Park the gradients of another loss."""
        if self._current is not None and self._current != loss_id:
            self._parked[self._current] = self._take()
            self._give(self._parked.pop(loss_id, None))
        self._before = self._current
        self._current = loss_id

    def ampx_abandon_backward(self, loss_id: int) -> None:
        """Take back what was parked for the body that raised."""
        if self._before in self._parked and self._before is not None:
            self._give(self._parked.pop(self._before))
        self._current = self._before

    def step(self, grads: Any = None) -> None:
        """Merge the losses, then step."""
        if grads is None and self.ampx_member.stage == "scaled":
            self._merge()
        super().step(grads)
        self._clear()

    def ampx_unscale(self) -> None:
        """Merge the losses, then unscale."""
        if self.ampx_member.stage == "scaled":
            self._merge()
        super().ampx_unscale()

    def zero_grad(self) -> None:
        """Forget the gradients, parked ones included."""
        super().zero_grad()
        self._clear()

    def ampx_finite_by_loss(self, finite: bool) -> dict[int, bool]:
        """Tell which loss overflowed."""
        return self._finite or super().ampx_finite_by_loss(finite)

    def _merge(self) -> None:
        """Make true gradients of several losses and add them."""
        if self._current is None or not self._parked:
            return
        self._parked[self._current] = self._take()
        merged: list[Tensor | None] = [None] * len(self.optimizer.parameters)
        self.ampx_member.begin_change()
        for loss_id, grads in self._parked.items():
            true, self._finite[loss_id] = self._backend.unscale(grads, self.ampx_member.factors[loss_id])
            merged = [b if a is None else a if b is None else a + b for a, b in zip(merged, true, strict=True)]
        self._parked = {}
        self._give(merged)
        self._unscaled = Unscaled(self._backend.gradients(self.optimizer), all(self._finite.values()))
        self.ampx_member.note_unscaled()

    def _culprits(self) -> tuple[str, ...]:
        return tuple(name for name, *_ in self._backend.nonfinite_parameters(self.optimizer, None))

    def _take(self) -> list[Tensor | None]:
        taken = [parameter.grad for parameter in self.optimizer.parameters]
        self.optimizer.zero_grad()
        return taken

    def _give(self, grads: Sequence[Tensor | None] | None) -> None:
        for parameter, grad in zip(self.optimizer.parameters, grads or [], strict=grads is not None):
            parameter.grad = grad

    def _clear(self) -> None:
        if self.ampx_member.stage == "idle":
            self._parked, self._current, self._finite = {}, None, {}
