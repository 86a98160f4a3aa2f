"""The script's backward: the loss is scaled for the script's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import paddle

from ampx.run import ScriptBackward, patched
from ampx_paddle import casting
from ampx_paddle.gradients import collect
from ampx_paddle.losses import scale_loss
from ampx_paddle.sot import untranslated

from .manager import PaddleManaged, PaddleManager


@contextmanager
def backward_scaled(manager: PaddleManager) -> Iterator[None]:
    """Patch `Tensor.backward` and `paddle.autograd.backward`."""
    run = untranslated(_Backward(manager).run)

    def scaling(native: Callable[..., None]) -> Callable[..., None]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            run(tensors, lambda scaled: native(scaled, *args, **kwargs))

        return backward

    with patched((paddle.Tensor, "backward", scaling), (paddle.autograd, "backward", scaling)):
        yield


class _Backward(ScriptBackward[PaddleManager]):
    def is_loss(self, value: Any) -> bool:
        return isinstance(value, paddle.Tensor) and bool(value.is_floating_point())

    def reader_of(self, losses: Sequence[Any]) -> Callable[[], float]:
        values = [loss.detach() for loss in losses]
        return lambda: sum(float(value.astype("float32").sum()) for value in values)

    def run_inside(self, losses: Any, native: Callable[[Any], None]) -> None:
        manager = self.manager
        if manager.shows:  # the script's own code got unscaled gradients
            with manager.script_code.switched(False), paddle.enable_grad():
                self._scaled(losses, native)
        else:  # recompute runs one of its own, whose gradients carry the scale of the outer one
            native(losses)

    def run_scaled(self, optimizers: list[PaddleManaged], losses: Any, native: Callable[[Any], None]) -> None:
        manager = self.manager
        if not manager.scales:
            with manager.differentiating(1.0):
                native(losses)
        else:
            # Of an optimizer whose step was skipped the script may clear the gradients later, before its own backward.
            ready = [managed for managed in optimizers if not managed.wrapped.are_unknown()] or optimizers
            factor = _bring_together(manager, ready)
            manager.multiplied = True
            manager.check_programs()
            with _entered(manager, ready, factor), casting.off(), manager.differentiating(factor):
                self._scaled(losses, native)
            for managed in ready:
                self._note(managed, factor)
        for managed in optimizers:
            managed.zero = False

    def _scaled(self, losses: Any, native: Callable[[Any], None]) -> None:
        factor, run = self.manager.factor, self.manager.run
        several = isinstance(losses, (list, tuple))
        scaled = [scale_loss(loss, factor) for loss in losses] if several else scale_loss(losses, factor)
        try:
            native(scaled)
        except OSError:  # which Paddle makes of what is raised in hooks and PyLayers
            if run.refusal is None:
                raise
            raise run.refusal from None

    def _note(self, managed: PaddleManaged, factor: float) -> None:
        """Note the gradients that an optimizer has after a scaled backward."""
        self.manager.check_main_grads(managed)
        if collect(managed.raw):
            managed.wrapped.ampx_member.note_scaled(factor)
            if managed.kept:
                self.manager.reveal(managed)


@contextmanager
def _entered(manager: PaddleManager, optimizers: list[PaddleManaged], factor: float) -> Iterator[None]:
    """Have the wrappers see to gradients that are left, and know whose backward runs."""
    entered: list[PaddleManaged] = []
    try:
        for managed in optimizers:
            with manager.working(managed):
                managed.wrapped.ampx_before_backward(0, factor)
            entered.append(managed)
        yield
    except BaseException:
        for managed in entered:
            managed.wrapped.ampx_abandon_backward(0)
        raise
    for managed in optimizers:
        managed.wrapped.ampx_after_backward(0)


def _bring_together(manager: PaddleManager, optimizers: list[PaddleManaged]) -> float:
    """Have all gradients that wait carry one loss scale, the smallest: Paddle does not say what a loss reaches."""
    members = [managed.wrapped.ampx_member for managed in optimizers]
    factor = min(
        float(member.factor if member.stage == "scaled" else member.group.ledger.factor(member.group, 0))
        for member in members
    )
    for managed in optimizers:
        manager.rescale(managed, factor)
    return factor
