"""Which optimizers a backward reaches, and one loss scale for what it adds to their gradients.

For loops in which nobody names the optimizers: `ampx run`, and the trainers of other libraries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from ampx.backend import Backend

from .gradients import unscale_into
from .step import AmpOptimizer

_LEAF: Final[Any] = torch._C._functions.AccumulateGrad
_HIDES: Final = "CheckpointFunctionBackward"  # its parameters are reached by a backward of its own


class _Hides(dict[type, bool]):
    """Whether a kind of node hides a part of the graph, looked up by name once a kind."""

    def __missing__(self, kind: type) -> bool:
        hides = self[kind] = kind.__name__ == _HIDES
        return hides


_hides: Final = _Hides()


def leaves_of(losses: list[torch.Tensor]) -> tuple[dict[int, torch.Tensor], bool]:
    """Walk the graph; return the tensors that gradients are added to, and whether some part of it is hidden."""
    # In every step of `ampx run` that scales: asks nodes for nothing but their edges, and the ends for their tensors.
    leaves: dict[int, torch.Tensor] = {}
    nodes: list[Any] = []
    for loss in losses:
        if loss.grad_fn is None:
            leaves[id(loss)] = loss
        else:
            nodes.append(loss.grad_fn)
    seen = set(nodes)  # holds the nodes, whose ids would otherwise be used again
    for node in nodes:  # grows on the way
        edges = node.next_functions
        if not edges and type(node) is _LEAF:
            leaf = node.variable
            leaves[id(leaf)] = leaf
        for after, _ in edges:
            if after not in seen and after is not None:
                seen.add(after)
                nodes.append(after)
    return leaves, any(map(_hides.__getitem__, set(map(type, nodes))))


def bring_together(backend: Backend, optimizers: Sequence[AmpOptimizer]) -> Any:
    """Have the gradients that wait carry one loss scale, the smallest of all that a backward serves; return it."""
    scales = []
    for optimizer in optimizers:
        member = optimizer.ampx_member
        if member.stage != "idle" and not optimizer.collect():
            optimizer.forget()  # they were cleared, by model.zero_grad() say
        scales.append(member.factors[0] if member.factors else member.group.ledger.factor(member.group, 0))
    factor = scales[0] if len(scales) == 1 else backend.smallest(scales)
    for optimizer in optimizers:
        rescale(optimizer, factor)
    return factor


def rescale(optimizer: AmpOptimizer, factor: Any) -> None:
    """Multiply the gradients that wait so that they carry this loss scale, and further ones may be added.

    Loss scales are powers of two, as far as they move by themselves, so no digit is lost.
    """
    member = optimizer.ampx_member
    if member.stage == "idle":
        return
    carried = member.factors.get(0, 1.0) if member.stage == "scaled" else 1.0
    buckets = optimizer.collect()
    if not buckets:
        optimizer.forget()
        return
    if carried is not factor and carried != factor:
        for bucket in buckets:
            # What is not finite stays so, and is found again.
            flag = torch.zeros((), dtype=torch.float32, device=bucket[0].device)
            unscale_into(bucket, flag, torch.as_tensor(factor / carried, dtype=torch.float32, device=flag.device))
    optimizer.findings.take()
    member.note_scaled(factor)
