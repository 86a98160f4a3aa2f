"""The script's backward: the loss is scaled for the trainers whose parameters it reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ampx.errors import AmpxError
from ampx.run import ScriptBackward, patched
from ampx_mxnet import gradients
from ampx_mxnet.calls import in_backward
from ampx_mxnet.casting import switch
from ampx_mxnet.compat import mx
from ampx_mxnet.dtypes import cast_tensor, is_floating
from ampx_mxnet.losses import check_second_derivative

from .manager import ManagedTrainer, TrainerManager


@contextmanager
def backward_scaled(manager: TrainerManager) -> Iterator[None]:
    """Patch `autograd.backward` and the arrays' own `backward`."""
    script = _Backward(manager)

    def scaling(native: Callable[..., None]) -> Callable[..., None]:
        def backward(heads: Any, head_grads: Any = None, retain_graph: bool = False, train_mode: bool = True) -> None:
            script.run(heads, lambda scaled: native(scaled, head_grads, retain_graph, train_mode))

        return backward

    def scaling_one(native: Callable[..., None]) -> Callable[..., None]:
        def backward(self: Any, out_grad: Any = None, retain_graph: bool = False, train_mode: bool = True) -> None:
            script.run(self, lambda scaled: native(scaled, out_grad, retain_graph, train_mode))

        return backward

    with patched((mx.autograd, "backward", scaling), (mx.nd.NDArray, "backward", scaling_one)):
        yield


class _Backward(ScriptBackward[TrainerManager]):
    def is_inside(self) -> bool:  # a custom function runs one of its own, in a thread of MXNet
        return bool(in_backward())

    def optimizers(self) -> list[ManagedTrainer]:
        return self.manager.trainers()

    def is_loss(self, value: Any) -> bool:
        return isinstance(value, mx.nd.NDArray) and is_floating(value)

    def reader_of(self, losses: Sequence[Any]) -> Callable[[], float]:
        values = [loss.detach() for loss in losses]  # gluon's losses have one element a sample
        return lambda: sum(cast_tensor(value, "float32").mean().asnumpy().item() for value in values)

    def run_inside(self, losses: Any, native: Callable[[Any], None]) -> None:
        self.manager.run_inner(losses, native)

    def run_scaled(self, optimizers: list[ManagedTrainer], losses: Any, native: Callable[[Any], None]) -> None:
        manager = self.manager
        for trainer in optimizers:
            trainer.ampx_hide()
        factor = _choose_factor(manager, optimizers)
        manager.multiplied = manager.multiplied or factor != 1
        manager.check_backward(factor)
        with _entered(manager, optimizers, factor), switch.Region(None):
            try:
                native(losses if factor == 1 else manager.scaled(losses, factor))
                manager.wait()
            except mx.MXNetError as error:
                check_second_derivative(error)
                raise
        for trainer in optimizers:
            # MXNet does not say what a loss depends on, but which gradients were written.
            if gradients.any_fresh(trainer.trainer):
                trainer.ampx_member.note_scaled(factor)
                trainer.ampx_after_backward(0)
            else:
                trainer.ampx_abandon_backward(0)
        if manager.kept:
            manager.reveal(lambda trainer: True)


@contextmanager
def _entered(manager: TrainerManager, trainers: list[ManagedTrainer], factor: float) -> Iterator[None]:
    """Have the trainers see to gradients that are left; an error of ampx inside is a refusal."""
    prepared: list[ManagedTrainer] = []
    try:
        manager.wait()
        with manager.differentiating(factor):
            for trainer in trainers:
                trainer.ampx_before_backward(0, factor)
                prepared.append(trainer)
            yield
    except BaseException as error:
        for trainer in prepared:
            trainer.ampx_abandon_backward(0)
        if isinstance(error, AmpxError):
            manager.run.refuse_for(error)
        if isinstance(error, mx.MXNetError) and manager.run.refusal is not None:  # in a thread of MXNet
            raise manager.run.refusal from None
        raise


def _choose_factor(manager: TrainerManager, trainers: list[ManagedTrainer]) -> float:
    """Return the scale that waiting gradients carry, or else the smallest; unscaled ones that wait are scaled again."""
    members = [trainer.ampx_member for trainer in trainers]
    for trainer in trainers:
        if trainer.ampx_member.stage == "unscaled" and trainer.ampx_is_cleared():
            trainer.ampx_notice_cleared()
    carried = {float(member.factor) for member in members if member.stage == "scaled"}
    if len(carried) > 1:
        manager.run.refuse(
            "backward is called while the gradients of several trainers wait for their steps with different loss "
            "scales; accepted: one trainer, or --dtype bfloat16, which needs no loss scale"
        )
    factor = next(iter(carried), None)
    if factor is None:
        factor = min(float(member.group.ledger.factor(member.group, 0)) for member in members)
    for trainer in trainers:
        if trainer.ampx_member.stage == "unscaled":
            trainer.rescale(factor)
    return factor
