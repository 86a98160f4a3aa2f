"""Steps of optimizers that were not wrapped, while a session scales losses: what is certainly a mistake is reported.

They are seen by one step hook of the process, which is there only as long as such a session is, or a model that
`prepare` put in low precision without its optimizer. It looks at dtypes and at how often tensors were written, never at
values.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

from ampx import callers
from ampx.errors import PrecisionWarning, RawStepError
from ampx.provenance import GradientSnapshot, Provenance

from .provenance import SLOTS, wrapped_optimizers
from .trees import LOW, gradient_of

_WRAPPED: Final = "ampx_wrapped"  # on a raw optimizer
# Bodies of `scale_loss` in which leaves are looked at, once they are known.
_BODIES: Final = 100


class _Watch:
    """What is known of optimizers that are not wrapped, and of gradients that carry a loss scale."""

    def __init__(self) -> None:
        self.users: set[int] = set()
        self.handle: RemovableHandle | None = None
        self.with_leaves: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # whose leaves were followed
        self.bodies = 0
        self.before: list[GradientSnapshot] = []
        self.provenance = Provenance(SLOTS)
        self.lowered: dict[int, weakref.ref[torch.Tensor]] = {}  # parameters without the float32 copies of their level

    def stop(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        self.handle, self.before, self.provenance = None, [], Provenance(SLOTS)
        followed.clear()


# The leaves that `begin_body` looks at. Empty nearly always: every step asks, and would wait for a call.
followed: Final[list[weakref.ref[torch.Tensor]]] = []
_watch = _Watch()


def watch(user: object) -> None:
    """Look at steps until `end` was called for every user."""
    _watch.users.add(id(user))
    if _watch.handle is None:
        # Not by `register_optimizer_step_pre_hook`: interrupted as it returns, it leaves a hook without a handle.
        _watch.handle = RemovableHandle(_global_optimizer_pre_hooks)
        _global_optimizer_pre_hooks[_watch.handle.id] = _check


def end(user: object) -> None:
    """Look no more for this user."""
    _watch.users.discard(id(user))
    if not _watch.users:
        _watch.stop()


def note_lowered(parameters: Iterable[torch.Tensor]) -> None:
    """Look at steps as long as these parameters live, which a level with float32 copies gave none."""
    for parameter in parameters:
        key = id(parameter)
        _watch.lowered[key] = weakref.ref(parameter, partial(_forget_lowered, key))
    if _watch.lowered:
        watch(_watch.lowered)


def _forget_lowered(key: int, reference: weakref.ref[torch.Tensor]) -> None:
    _watch.lowered.pop(key, None)
    if not _watch.lowered:
        end(_watch.lowered)


def note_wrapped(optimizer: torch.optim.Optimizer, wrapped: bool = True) -> None:
    """Note whether a raw optimizer has a wrapper, whose guard looks after it; copies of it have none."""
    if wrapped:
        vars(optimizer)[_WRAPPED] = True
    else:
        vars(optimizer).pop(_WRAPPED, None)


def is_wrapped(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a raw optimizer has a wrapper, or is one."""
    return _WRAPPED in vars(optimizer) or optimizer in wrapped_optimizers()


def other_hooks() -> bool:
    """Return whether the process has step hooks that are not ours."""
    return len(_global_optimizer_pre_hooks) > (_watch.handle is not None)


# -- gradients that carry a loss scale -------------------------------------------------------------


def follows() -> bool:
    """Return whether a first body's leaves are wanted."""
    return _watch.handle is not None


def follow(leaves: Iterable[torch.Tensor]) -> None:
    """Look at leaves that no wrapped optimizer trains, in the next bodies of `scale_loss`, and that which runs."""
    others = _owned().union(id(reference()) for reference in followed)
    leaves = [leaf for leaf in leaves if id(leaf) not in others]
    followed.extend(map(weakref.ref, leaves))
    _watch.bodies = _BODIES
    _watch.before += SLOTS.snapshot(leaves)


def _owned() -> set[int]:
    """Return the ids of the leaves that wrapped optimizers train."""
    return {id(leaf) for optimizer in wrapped_optimizers() for leaf in optimizer.leaves()}


def begin_body() -> None:
    """Look at the gradients of the leaves that are followed, before a body."""
    _watch.before = SLOTS.snapshot(leaf for reference in followed if (leaf := reference()) is not None)


def end_body(scale: Any) -> None:
    """Note the gradients to which a body has written that had this loss scale."""
    if _watch.before:
        _watch.provenance.note_foreign(_watch.before, 1.0, scale)
        _watch.before = []
        _watch.bodies -= 1
        if _watch.bodies <= 0:
            followed.clear()


# -- the hook --------------------------------------------------------------------------------------


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise where gradients carry a loss scale; look at an optimizer's parameters at its first step."""
    if _WRAPPED in optimizer.__dict__ or torch.compiler.is_compiling():
        return
    followed_before = optimizer in _watch.with_leaves
    if followed_before and not _watch.provenance.notes:
        return
    owned = _owned()  # by an optimizer that this one is a part of
    parameters = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in owned]
    counted = list(filter(_has_counted_gradient, parameters))
    _refuse_scaled(optimizer, counted)
    if followed_before or not counted:
        return
    _watch.with_leaves.add(optimizer)
    follow(parameters)
    _watch.before = []  # no body runs
    _warn_of_lost_updates(optimizer, counted)


def _has_counted_gradient(parameter: torch.Tensor) -> bool:
    """Return whether there is a gradient; those of inference mode, which no backward makes, count no writes."""
    gradient = gradient_of(parameter)
    return gradient is not None and not gradient.is_inference()


def _refuse_scaled(optimizer: torch.optim.Optimizer, counted: list[torch.Tensor]) -> None:
    name = type(optimizer).__name__
    if any(_watch.provenance.scale_of(snapshot, 1.0) != 1.0 for snapshot in SLOTS.snapshot(counted)):
        raise RawStepError(
            f"{name}, which wrap_optimizer was never given, was stepped on gradients of a scaled loss; they would be "
            f"applied times the loss scale. Call opt = ampx.wrap_optimizer(opt) on it, too, and name all optimizers "
            f"that a loss trains: ampx.scale_loss(loss, [opt, other])."
        )


def _warn_of_lost_updates(optimizer: torch.optim.Optimizer, counted: list[torch.Tensor]) -> None:
    low = sum(id(parameter) in _watch.lowered and parameter.dtype in LOW for parameter in counted)
    if low:
        name = type(optimizer).__name__
        callers.warn(
            f"{name} was stepped on {low} low-precision parameters that ampx.prepare gave no float32 copies, "
            f"because it did not get the optimizer: small updates round to nothing, and no loss is scaled. Call "
            f"model, opt = ampx.prepare(model, opt), then opt = ampx.wrap_optimizer(opt); or use level='O3', "
            f"which has no copies.",
            PrecisionWarning,
        )
