"""The script's backward: the loss is scaled for the optimizers whose parameters it reaches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

import torch

from ampx.errors import AmpxError
from ampx_torch.trees import LOW

from .managed import Managed
from .manager import Manager

_LEAF: Final = "AccumulateGrad"
_HIDES: Final = "CheckpointFunctionBackward"  # its parameters are reached by a backward of its own


@contextmanager
def backward_scaled(manager: Manager) -> Iterator[None]:
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
        given = grad_tensors if grad_variables is None else grad_variables
        if manager.held:
            manager.decide()
        if manager.stood_down:
            with manager.records_only("backward"):
                true(tensors, given, retain_graph, create_graph, inputs=inputs)
            return
        if manager.script_scales:
            with manager.run.recorder.phase("backward"):
                true(tensors, given, retain_graph, create_graph, inputs=inputs)
            return
        losses = None if manager.inside else _losses(tensors, given)
        managed = manager.all() if losses else []
        if losses is None or not managed:
            true(tensors, given, retain_graph, create_graph, inputs=inputs)
            return
        options = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
        with manager.run.recorder.phase("backward"):
            if manager.scales:
                _backward_scaled(manager, true, losses, managed, options)
            else:
                if manager.run.recorder.sampling:  # the first steps tell; walking the graph takes time
                    _refuse_by_hand(manager, managed, _leaves(losses)[0])
                _backward(manager, true, losses, managed, options)

    with mock.patch.object(torch.autograd, "backward", backward):
        yield


def _backward_scaled(
    manager: Manager, true: Any, losses: list[torch.Tensor], found: list[Managed], options: dict[str, Any]
) -> None:
    """Find out what the loss reaches, bring gradients that wait to the same scale, and run."""
    leaves, hidden = _leaves(losses)
    inputs = options["inputs"]
    if inputs is not None:
        wanted = list(inputs.values()) if isinstance(inputs, dict) else _listed(inputs)
        leaves = {id(leaf): leaf for leaf in wanted if leaf.is_leaf}
    if manager.run.recorder.sampling:
        _refuse_by_hand(manager, found, leaves)
    if not hidden:
        reached = {id(one) for key in leaves if (one := manager.owners.of(key)) is not None}
        found = [one for one in found if id(one) in reached]
    if not found:
        true(losses, None, **options)
        return
    if options["create_graph"]:
        manager.run.refuse(
            "backward(create_graph=True) makes gradients that are differentiated again, which a loss scale would "
            "multiply twice; accepted: torch.autograd.grad for these, or --dtype bfloat16, which needs no loss scale"
        )
    quiet, manager.quiet = manager.quiet, True
    try:
        _bring_together(manager, found)
        strangers = [(leaf, leaf.grad) for key, leaf in leaves.items() if manager.owners.of(key) is None]
        for leaf, _ in strangers:
            leaf.grad = None
        factor = None
        try:
            factor = _backward(manager, true, losses, found, options)
        finally:
            for leaf, before in strangers:  # of tensors that no optimizer holds the script gets true gradients at once
                after = None if factor is None or leaf.grad is None else leaf.grad / factor
                leaf.grad = after if before is None else before if after is None else before.add_(after)
    finally:
        manager.quiet = quiet
    manager.look()


def _refuse_by_hand(manager: Manager, managed: list[Managed], leaves: dict[int, torch.Tensor]) -> None:
    """Refuse parameters in low precision that no optimizer holds: the script keeps float32 copies of them by itself."""
    manager.owners.sort(managed)
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


def _bring_together(manager: Manager, found: Sequence[Managed]) -> None:
    """Have the gradients that wait carry one loss scale: the smallest of all that this backward serves."""
    scales = []
    for one in found:
        assert one.wrapped is not None
        member = one.wrapped.ampx_member
        if member.stage != "idle" and not one.wrapped.collect():
            one.wrapped.forget()
        scales.append(member.factors[0] if member.factors else member.group.ledger.factor(member.group, 0))
    amp = manager.run.amp
    assert amp is not None
    factor = scales[0] if len(scales) == 1 else amp.backend.smallest(scales)
    for one in found:
        one.rescale(factor)


def _backward(
    manager: Manager, true: Any, losses: list[torch.Tensor], found: Sequence[Managed], options: dict[str, Any]
) -> Any:
    """Run backward on the scaled losses; give the scale."""
    amp = manager.run.amp
    assert amp is not None
    wrapped = [one.wrapped for one in found]
    try:
        # One tensor is the fast way through; several come back as a list of the same length.
        region = amp.scale_loss(losses[0] if len(losses) == 1 else losses, wrapped[0] if len(wrapped) == 1 else wrapped)
        with region as scaled:
            member = wrapped[0].ampx_member  # type: ignore[union-attr]
            factor = manager.factor = member.factors.get(0, 1.0)
            manager.inside = True
            try:
                true(scaled, None, **options)
            finally:
                manager.inside, manager.factor = False, 1.0
    except AmpxError as error:
        manager.run.refuse_for(error)
    return factor


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _losses(tensors: Any, given: Any) -> list[torch.Tensor] | None:
    """Return scalars with the same gradients; None for what torch will not take, and shall refuse in its own words.

    What comes with a gradient is replaced by the sum of `tensor * gradient`.
    """
    if given is None and isinstance(tensors, torch.Tensor):  # what most scripts do
        usual = tensors.requires_grad and tensors.numel() == 1 and tensors.is_floating_point()
        return [tensors] if usual else None
    roots = _listed(tensors)
    if not roots or not all(
        isinstance(one, torch.Tensor) and one.requires_grad and one.is_floating_point() for one in roots
    ):
        return None
    weights = [None] * len(roots) if given is None else _listed(given)
    if len(weights) != len(roots) or any(
        one.numel() != 1 if weight is None else one.shape != weight.shape
        for one, weight in zip(roots, weights, strict=True)
    ):
        return None
    return [one if weight is None else _weighted(one, weight) for one, weight in zip(roots, weights, strict=True)]


def _weighted(root: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = root.float() if root.dtype in (torch.float16, torch.bfloat16) else root
    return torch.sum(wide * weight)


def _leaves(losses: list[torch.Tensor]) -> tuple[dict[int, torch.Tensor], bool]:
    """Walk the graph; give the tensors that gradients are added to, and whether some part of it is hidden."""
    leaves: dict[int, torch.Tensor] = {id(one): one for one in losses if one.grad_fn is None}
    nodes: list[Any] = [one.grad_fn for one in losses if one.grad_fn is not None]
    seen = set(nodes)  # holds the nodes, whose ids would otherwise be used again
    hidden = False
    for node in nodes:  # grows on the way
        name = type(node).__name__
        if name == _LEAF:
            leaf = node.variable
            leaves[id(leaf)] = leaf
            continue
        hidden = hidden or name == _HIDES
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                nodes.append(after)
    return leaves, hidden
