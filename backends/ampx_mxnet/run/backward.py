"""The script's backward: the loss is scaled for the trainers whose parameters it reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from ampx.errors import AmpxError
from ampx_mxnet import gradients
from ampx_mxnet.calls import in_backward
from ampx_mxnet.casting import switch
from ampx_mxnet.compat import mx
from ampx_mxnet.dtypes import cast_tensor, is_floating
from ampx_mxnet.losses import second_derivatives_refused

from .manager import ManagedTrainer, TrainerManager


@contextmanager
def backward_scaled(manager: TrainerManager) -> Iterator[None]:
    """Patch `autograd.backward` and the arrays' own `backward`."""
    functions = mx.autograd.backward, mx.nd.NDArray.backward

    def backward(heads: Any, head_grads: Any = None, retain_graph: bool = False, train_mode: bool = True) -> None:
        options = {"head_grads": head_grads, "retain_graph": retain_graph, "train_mode": train_mode}
        _run(manager, heads, lambda scaled: functions[0](scaled, **options))

    def backward_of(self: Any, out_grad: Any = None, retain_graph: bool = False, train_mode: bool = True) -> None:
        options = {"out_grad": out_grad, "retain_graph": retain_graph, "train_mode": train_mode}
        _run(manager, self, lambda scaled: functions[1](scaled, **options))

    with (
        mock.patch.object(mx.autograd, "backward", backward),
        mock.patch.object(mx.nd.NDArray, "backward", backward_of),
    ):
        yield


def _run(manager: TrainerManager, heads: Any, true: Callable[[Any], None]) -> None:
    if in_backward():  # a custom function runs one of its own
        manager.run_inner(heads, true)
        return
    listed = list(heads) if isinstance(heads, (list, tuple)) else [heads]
    if manager.stood_down:
        with manager.records_only("backward"):
            true(heads)
        return
    trainers = manager.trainers()
    if not trainers or not all(isinstance(head, mx.nd.NDArray) and is_floating(head) for head in listed):
        true(heads)
        return
    if (recorder := manager.run.recorder).wants_losses:
        values = [head.detach() for head in listed]  # gluon's losses have one element a sample
        recorder.saw_loss(lambda: sum(cast_tensor(value, "float32").mean().asnumpy().item() for value in values))
    with manager.run.recorder.phase("backward"):
        for trainer in trainers:
            trainer.ampx_hide()
        factor = _choose_factor(manager, trainers)
        manager.multiplied = manager.multiplied or factor != 1
        if manager.multiplied and manager.attached:
            manager.refuse_unowned()
        if factor != 1 and manager.own_gradient:
            manager.run.refuse(
                f"the script uses {manager.own_gradient}, which makes its own gradient, and no loss scale reaches it; "
                f"accepted: losses of mxnet.gluon.loss, or --dtype bfloat16, which needs no loss scale"
            )
        prepared: list[ManagedTrainer] = []
        try:
            manager.wait()
            manager.factor = factor
            for trainer in trainers:
                trainer.ampx_before_backward(0, factor)
                prepared.append(trainer)
            with switch.Region(None), second_derivatives_refused():
                true(heads if factor == 1 else manager.scaled(heads, factor))
                manager.wait()
        except BaseException as error:
            for trainer in prepared:
                trainer.ampx_abandon_backward(0)
            if isinstance(error, AmpxError):
                manager.run.refuse_for(error)
            if isinstance(error, mx.MXNetError) and manager.run.refusal is not None:  # in a thread of MXNet
                raise manager.run.refusal from None
            raise
        finally:
            manager.factor = 1.0
        for trainer in trainers:
            # MXNet does not tell what a loss depends on, but which gradients were written.
            if gradients.any_fresh(trainer.trainer):
                trainer.ampx_member.note_scaled(factor)
                trainer.ampx_after_backward(0)
            else:
                trainer.ampx_abandon_backward(0)
        if manager.kept:
            manager.reveal(lambda trainer: True)


def _choose_factor(manager: TrainerManager, trainers: list[ManagedTrainer]) -> float:
    """Return the scale that waiting gradients carry, or else the smallest; true ones that wait are scaled again."""
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
