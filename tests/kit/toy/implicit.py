"""A backend with optional abilities: gradients hang on the parameters, every loss may have its own scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import ampx
from ampx.backend import CastPlan, Contract, Unscaled, is_module, reject_unknown
from ampx.optimizer import GenericOptimizer
from ampx.policy import Dtype
from ampx.protocol import Member
from toy.framework import Optimizer, Tensor
from toy.verbs import ToyVerbs

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
        clipping=True,
        per_loss_scales=True,
        sees_backward=True,
    )
    offers: ClassVar[Mapping[str, str | type[Contract]]] = {
        "probe": "toy.numerics:ToyProbe",
        "converter": "toy.inference:ToyConverter",
        "automation": "toy.automation:ToyAutomation",
    }

    def check_plan(self, plan: CastPlan) -> CastPlan:
        """Check the op lists."""
        modules = super().check_plan(replace(plan, allow=(), deny=tuple(filter(is_module, plan.deny))))
        for entry in (*plan.allow, *plan.deny):
            if entry not in OPERATIONS and (entry in plan.allow or not is_module(entry)):
                raise ampx.UnsupportedOpError(
                    f"{entry!r} is no operation of the toy; accepted: {', '.join(OPERATIONS)}. Pass one of these."
                )
        return replace(plan, float32_modules=modules.float32_modules)

    def widest(self, tree: Any, at_least: Dtype) -> Dtype:
        """Return float32 if any floating tensor of the tree has it."""
        if isinstance(tree, dict):
            return self.widest(list(tree.values()), at_least)
        if isinstance(tree, (list, tuple)):
            dtypes = {self.widest(value, at_least) for value in tree}
            return "float32" if "float32" in dtypes else at_least
        return "float32" if isinstance(tree, Tensor) and tree.dtype == "float32" else at_least

    def watch_backward(self, loss: Tensor, scaled: Tensor) -> Callable[[], bool | None]:
        """Note whose `backward` is called."""
        called: list[bool] = []
        for tensor in (loss, scaled):
            backward = tensor.backward

            def noted(backward: Callable[[], None] = backward, answer: bool = tensor is scaled) -> None:
                called.append(answer)
                backward()

            tensor.backward = noted  # type: ignore[method-assign]
        return lambda: max(called, default=None)

    def gradients(self, optimizer: Optimizer) -> list[Tensor | None]:
        """List the gradients; empty where no parameter has one."""
        gradients = [parameter.grad for parameter in optimizer.parameters]
        return gradients if any(grad is not None for grad in gradients) else []

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
        """Return the wrapper that keeps several losses apart."""
        reject_unknown(self.name, options, ())
        if any(parameter.dtype != "float32" for parameter in optimizer.parameters):
            raise ampx.LowPrecisionParametersError(
                "wrap_optimizer got low-precision parameters; accepted: float32. Keep the parameters in float32."
            )
        return ToyOptimizer(self, optimizer, member, options)

    def nonfinite_parameters(self, optimizer: Any, model: Any | None) -> list[tuple[str, int, int]]:
        """List the parameters with non-finite gradients by position."""
        rows = []
        for position, parameter in enumerate(optimizer.parameters):
            bad = 0 if parameter.grad is None else sum(not math.isfinite(v) for v in parameter.grad.data)
            if bad:
                rows.append((str(position), bad, len(parameter.data)))
        return rows


def _overwrite(grads: Sequence[Tensor | None], new: Sequence[Tensor | None]) -> list[Tensor | None]:
    for grad, other in zip(grads, new, strict=True):
        if grad is not None and other is not None:
            grad.data = other.data
    return list(grads)


class ToyOptimizer(GenericOptimizer):
    """Makes gradients true and puts them aside while another loss, with a scale of its own, runs backward."""

    def __init__(self, backend: ImplicitToy, optimizer: Optimizer, member: Member, options: Mapping[str, Any]) -> None:
        super().__init__(backend, optimizer, member, options)
        self._forget_losses()

    def _forget_losses(self) -> None:
        # Finiteness by loss id, once there are several; and the true gradients while another loss runs backward.
        self._finite: dict[int, bool] = {}
        self._aside: list[Tensor | None] = [None] * len(self.optimizer.parameters)

    def ampx_before_backward(self, loss_id: int, scale: Any) -> None:
        """Put the gradients of other losses aside."""
        super().ampx_before_backward(loss_id, scale)
        member = self.ampx_member
        if not self._finite:
            if not member.factors or loss_id in member.factors:
                return
            if not self._backend.gradients(self.optimizer):  # cleared behind the wrapper's back
                member.drop_factors()
                return
            first = next(iter(member.factors))
            self.ampx_unscale()
            self._finite[first] = self._pending.unscaled is None or bool(self._pending.unscaled.finite)
            member.mixes = True
        member.begin_change()
        self._aside = self._take()

    def ampx_after_backward(self, loss_id: int) -> None:
        """Make the new gradients true, and add those put aside."""
        super().ampx_after_backward(loss_id)
        if not self._finite:
            return
        if grads := self._backend.gradients(self.optimizer):
            finite = bool(self._backend.unscale(grads, self.ampx_member.factors[loss_id]).finite)
            self._finite[loss_id] = finite and self._finite.get(loss_id, True)
        self._bring_back()
        self._pending.unscaled = Unscaled(self._backend.gradients(self.optimizer), all(self._finite.values()))
        self.ampx_member.note_unscaled()

    def ampx_abandon_backward(self, loss_id: int) -> None:
        """Drop what an unfinished backward left, and bring back what was put aside."""
        super().ampx_abandon_backward(loss_id)
        if self._finite:
            self._take()
            self._bring_back()

    def step(self, grads: Any = None) -> None:
        """Step, and start afresh."""
        try:
            super().step(grads)
        finally:
            if self.ampx_member.stage == "idle":  # so even if a listener raised, which comes last
                self._start_afresh()

    def zero_grad(self) -> None:
        """Forget the gradients, those put aside included."""
        super().zero_grad()
        self._start_afresh()

    def ampx_finite_by_loss(self, finite: bool) -> dict[int, bool]:
        """Return which loss overflowed."""
        return dict(self._finite) or super().ampx_finite_by_loss(finite)

    def _start_afresh(self) -> None:
        self._forget_losses()
        self.ampx_member.mixes = False

    def ampx_culprits(self) -> tuple[str, ...]:
        """Name the parameters whose gradients are not finite."""
        return tuple(name for name, *_ in self._backend.nonfinite_parameters(self.optimizer, None))

    def _take(self) -> list[Tensor | None]:
        taken = [parameter.grad for parameter in self.optimizer.parameters]
        self.optimizer.zero_grad()
        return taken

    def _bring_back(self) -> None:
        aside, self._aside = self._aside, [None] * len(self._aside)
        for parameter, kept in zip(self.optimizer.parameters, aside, strict=True):
            if kept is not None:
                parameter.grad = kept if parameter.grad is None else parameter.grad + kept
