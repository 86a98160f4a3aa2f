"""Casting in PyTorch: torch's own autocast, without what goes wrong when it is on for the whole process.

The flags of autocast are kept by thread. ampx sets them with torch's setters and keeps the weight cache off:
nothing would ever empty it, so that training would go on with the weights of the first step. Inside an
`autocast` region the cache is on as in torch; an optimizer step empties it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, cast as type_as

import torch

from ampx.contract import CastPlan
from ampx.policy import Dtype

DTYPES: Final[dict[Dtype, torch.dtype]] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
_WIDTH: Final[dict[torch.dtype, int]] = {torch.float16: 1, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}

is_on = torch.is_autocast_enabled
switch = torch.set_autocast_enabled


class _Thread(threading.local):
    """What autocast was in this thread before ampx switched it on."""

    before: tuple[bool, torch.dtype, bool] | None = None
    device: str = ""


_thread = _Thread()
# Counts activations: a region that outlives its session must not switch casting on again.
_generation = 0


def check_plan(plan: CastPlan) -> CastPlan:
    """Resolve the op lists; see `oplists`. Sync: none."""
    return plan


def check_resolved(plan: CastPlan) -> None:
    """Raise where module-name patterns were given and `prepare` never looked for them. Sync: none."""


def activate(plan: CastPlan) -> None:
    """Switch autocast on for the calling thread and install the op rules for the process. Sync: none."""
    global _generation
    _generation += 1
    enter_thread(plan)


def deactivate(plan: CastPlan) -> None:
    """Take the op rules away and give the calling thread back the autocast it had. Sync: none."""
    global _generation
    _generation += 1
    before, _thread.before = _thread.before, None
    if before is None:
        return
    enabled, dtype, cache = before
    switch(_thread.device, enabled)
    torch.set_autocast_dtype(_thread.device, dtype)
    torch.set_autocast_cache_enabled(cache)
    torch.clear_autocast_cache()


def enter_thread(plan: CastPlan) -> None:
    """Switch autocast on in the calling thread, the weight cache off. Sync: none."""
    device = plan.device
    if _thread.before is None:
        _thread.before = (is_on(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled())
        _thread.device = device
    torch.set_autocast_dtype(device, DTYPES[plan.dtype])
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    switch(device, True)


class Off:
    """Casting off inside; costs two flag reads where it is off already. Entered once at a time."""

    __slots__ = ("_device", "_generation", "_was_on")

    def __init__(self, device: str) -> None:
        """Remember the device type."""
        self._device = device

    def __enter__(self) -> None:
        """Switch off."""
        self._generation = _generation
        self._was_on = is_on(self._device)
        if self._was_on:
            switch(self._device, False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore."""
        if self._was_on and self._generation == _generation:
            switch(self._device, True)


def off(device: str) -> AbstractContextManager[None]:
    """Give a region with casting off. Sync: none."""
    return Off(device)


def region(plan: CastPlan, enabled: bool) -> AbstractContextManager[Any]:
    """Give a region with casting on (and the weight cache on) or off. Sync: none."""
    if not enabled:
        return Off(plan.device)
    return torch.autocast(plan.device, DTYPES[plan.dtype], cache_enabled=True)


def forget_weights() -> None:
    """Drop cached casts of weights that an optimizer has just changed. Sync: none."""
    if torch.is_autocast_cache_enabled():
        torch.clear_autocast_cache()


def cast(tree: Any, dtype: Dtype | torch.dtype) -> Any:
    """Cast the floating tensors of a tree; the rest, None included, is returned as it is. Sync: none."""
    target = dtype if isinstance(dtype, torch.dtype) else DTYPES[dtype]
    return _cast(tree, target)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        items = {key: _cast(value, dtype) for key, value in tree.items()}
        return items if type(tree) is dict else type_as("Any", type(tree))(items)
    if isinstance(tree, (list, tuple)):
        values = [_cast(value, dtype) for value in tree]
        return type_as("Any", type(tree))(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree


def floating(tree: Any) -> Iterator[torch.Tensor]:
    """Walk over the floating tensors of a tree. Sync: none."""
    if isinstance(tree, torch.Tensor):
        if tree.is_floating_point():
            yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from floating(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from floating(value)


def widest(tree: Any, at_least: Dtype) -> Dtype:
    """Give float32 where a floating tensor of the tree is float32 or wider, else `at_least`. Sync: none."""
    wide = any(_WIDTH.get(tensor.dtype, 2) > 1 for tensor in floating(tree))
    return "float32" if wide else at_least
