"""The script's backward: the loss is scaled for the optimizers whose parameters it reaches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import torch
from torch.amp.grad_scaler import GradScaler

from ampx.run import asked_by_script
from ampx.run.recorder import Recorder
from ampx_torch.backend import TorchBackend
from ampx_torch.reach import bring_together, leaves_of
from ampx_torch.trees import LOW

from .manager import TorchManaged, TorchManager
from .native import OWN

_THROUGH: Final = ("torch._tensor", "torch.autograd")
_TRUE: Final = "_ampx_true_loss"  # on a scaled loss: the loss


@contextmanager
def backward_scaled(manager: TorchManager) -> Iterator[None]:
    """Patch `torch.autograd.backward`, which `Tensor.backward` calls."""
    true = torch.autograd.backward

    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        weights = grad_tensors if grad_variables is None else grad_variables
        if manager.held:
            manager.decide()
        recorder = manager.run.recorder
        if recorder.wants_losses and not manager.inside and asked_by_script(OWN, _THROUGH):
            _report_loss(recorder, tensors, weights)
        if manager.stood_down:
            with manager.records_only("backward"):
                true(tensors, weights, retain_graph, create_graph, inputs=inputs)
            return
        if manager.native.scales:
            with manager.backward_phase:
                manager.note_scaler(tensors)
                true(tensors, weights, retain_graph, create_graph, inputs=inputs)
            return
        losses = None if manager.inside else _losses(tensors, weights)
        optimizers = manager.all() if losses else []
        if losses and not optimizers and manager.employ():
            optimizers = manager.all()
        if losses is None or not optimizers:
            true(tensors, weights, retain_graph, create_graph, inputs=inputs)
            return
        options = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
        with manager.backward_phase:
            if manager.scales:
                _backward_scaled(manager, true, losses, optimizers, options)
            else:
                if recorder.sampling:  # the first steps tell; walking the graph takes time
                    manager.owners.sort(optimizers)
                    _refuse_by_hand(manager, leaves_of(losses)[0])
                with manager.working():
                    _backward(manager, true, losses, _ready(optimizers), options)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.autograd, "backward", backward))
        if manager.run.recorder.wants_losses:
            for owner in (TorchBackend, GradScaler):
                stack.enter_context(mock.patch.object(owner, "scale", _remembering(owner.scale)))
        yield


def _remembering(scale: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that scales a loss and notes on the result what it was."""

    @functools.wraps(scale)
    def remember(self: Any, loss: Any, *rest: Any) -> Any:
        scaled = scale(self, loss, *rest)
        if isinstance(scaled, torch.Tensor) and isinstance(loss, torch.Tensor):
            setattr(scaled, _TRUE, loss.detach())
        return scaled

    return remember


def _report_loss(recorder: Recorder, tensors: Any, weights: Any) -> None:
    """Report the loss of a backward as it is not scaled, whoever scales it."""
    losses = _losses(tensors, weights)
    if losses:
        values = [getattr(loss, _TRUE, loss).detach().clone() for loss in losses]  # the script may write to its own
        recorder.saw_loss(lambda: sum(map(float, values)))


def _backward_scaled(
    manager: TorchManager,
    true: Any,
    losses: list[torch.Tensor],
    optimizers: list[TorchManaged],
    options: dict[str, Any],
) -> None:
    """Find out what the loss reaches, bring gradients that wait to the same scale, and run."""
    leaves, hidden = leaves_of(losses)
    inputs = options["inputs"]
    if inputs is not None:
        wanted = list(inputs.values()) if isinstance(inputs, dict) else _listed(inputs)
        leaves = {id(leaf): leaf for leaf in wanted if leaf.is_leaf}
    owners = manager.owners
    owners.sort(optimizers)
    if manager.sampler.counts:
        _refuse_by_hand(manager, leaves)
    reached = owners.reached(leaves)
    if None in reached and manager.employ(leaves):
        optimizers = manager.all()
        owners.sort(optimizers)
        reached = owners.reached(leaves)
    if not hidden:
        optimizers = [managed for managed in optimizers if managed.reference in reached]
    if not optimizers:
        true(losses, None, **options)
        return
    optimizers = _ready(optimizers)
    if options["create_graph"]:
        manager.run.refuse(
            "backward(create_graph=True) makes gradients that are differentiated again, which a loss scale would "
            "multiply twice; accepted: torch.autograd.grad for these, or --dtype bfloat16, which needs no loss scale"
        )
    strangers: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    factor = None
    try:
        with manager.working():
            if len(optimizers) > 1 or optimizers[0].wrapped.ampx_member.stage != "idle":
                bring_together(manager.run.session().backend, [managed.wrapped for managed in optimizers])
            if None in reached:
                strangers = [(leaf, leaf.grad) for key, leaf in leaves.items() if owners.of(key) is None]
                for leaf, _ in strangers:
                    leaf.grad = None
            try:
                factor = _backward(manager, true, losses, optimizers, options)
                manager.pending = True
            finally:
                for leaf, before in strangers:  # of what no optimizer holds the script gets true gradients at once
                    after = None if factor is None or leaf.grad is None else leaf.grad / factor
                    leaf.grad = after if before is None else before if after is None else before.add_(after)
    except BaseException:
        manager.look()
        raise


def _ready(optimizers: list[TorchManaged]) -> list[TorchManaged]:
    """Leave out optimizers whose step was skipped: the script may clear their gradients later, before its own backward.

    As in adversarial training, where the other network's loss comes in between.
    """
    return [managed for managed in optimizers if not managed.wrapped.are_unknown()] or optimizers


def _refuse_by_hand(manager: TorchManager, leaves: dict[int, torch.Tensor]) -> None:
    """Refuse parameters in low precision that no optimizer holds: the script keeps float32 copies of them by itself."""
    for key, leaf in leaves.items():
        if leaf.dtype in LOW and isinstance(leaf, torch.nn.Parameter) and manager.owners.of(key) is None:
            apex = "" if not manager.run.provided else ", with the apex that it finds here"
            dtype = str(leaf.dtype).removeprefix("torch.")
            manager.run.refuse(
                f"backward reaches {dtype} parameters that no optimizer holds, so the script has mixed precision by "
                f"hand, with float32 copies of its own, and casting on top of it would compute in another dtype than "
                f"it says; accepted: parameters in float32. Run it with --unchanged-if-refused{apex}, or leave its "
                f"parameters in float32"
            )


def _backward(
    manager: TorchManager,
    true: Any,
    losses: list[torch.Tensor],
    optimizers: Sequence[TorchManaged],
    options: dict[str, Any],
) -> Any:
    """Run backward on the scaled losses; return the scale."""
    first = optimizers[0].wrapped
    # One tensor is the fast way through; several come back as a list of the same length.
    loss = losses[0] if len(losses) == 1 else losses
    optimizer = first if len(optimizers) == 1 else [managed.wrapped for managed in optimizers]
    with manager.run.session().scale_loss(loss, optimizer) as scaled:
        factor = manager.factor = first.ampx_member.factors.get(0, 1.0)
        manager.inside = True
        try:
            true(scaled, None, **options)
        finally:
            manager.inside, manager.factor = False, 1.0
    return factor


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _losses(tensors: Any, weights: Any) -> list[torch.Tensor] | None:
    """Return scalars with the same gradients; None for what torch will not take, and shall refuse in its own words.

    What comes with a gradient is replaced by the sum of `tensor * gradient`.
    """
    if weights is None and isinstance(tensors, torch.Tensor):  # what most scripts do
        usual = tensors.requires_grad and tensors.numel() == 1 and tensors.is_floating_point()
        return [tensors] if usual else None
    roots = _listed(tensors)
    if not roots or not all(
        isinstance(root, torch.Tensor) and root.requires_grad and root.is_floating_point() for root in roots
    ):
        return None
    weights = [None] * len(roots) if weights is None else _listed(weights)
    if len(weights) != len(roots):
        return None
    pairs = list(zip(roots, weights, strict=True))
    if any(root.numel() != 1 if weight is None else root.shape != weight.shape for root, weight in pairs):
        return None
    return [root if weight is None else _weighted(root, weight) for root, weight in pairs]


def _weighted(root: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = root.float() if root.dtype in (torch.float16, torch.bfloat16) else root
    return torch.sum(wide * weight)
