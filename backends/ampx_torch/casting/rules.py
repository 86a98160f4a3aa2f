"""The rules in force in this process: those of one session, installed and taken away as a whole."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch

from ampx.backend import CastPlan

from . import kernels, lstm, module_rules
from .oplists import TorchPlan

_lock = threading.Lock()


class _Installed:
    """The owners of the rules, by id, and the functions that undo them."""

    def __init__(self) -> None:
        self.owners: set[int] = set()
        self.libraries: list[torch.library.Library] = []
        self.compiled: tuple[Any, ...] = ()
        self.tag: str | None = None  # the compiler's own tag, while ours is in its place


_installed = _Installed()


def install(plan: CastPlan, owner: object) -> None:
    """Put the rules of a plan in force, until `uninstall` was called for every owner."""
    if isinstance(plan, TorchPlan):
        with _lock:
            if not _installed.owners:
                try:
                    _put(plan)
                except BaseException:
                    _take_away()
                    raise
            _installed.owners.add(id(owner))
    lstm.install(plan, owner)


def uninstall(plan: CastPlan, owner: object, last: bool = False) -> None:
    """Undo the `install` of an owner, if that was not done yet; with the last, torch's own kernels are back.

    A plan that will not come back (`last`) is forgotten by the compiler, too.
    """
    lstm.uninstall(owner)
    if not isinstance(plan, TorchPlan):
        return
    with _lock:
        _installed.owners.discard(id(owner))
        if _installed.owners:
            return
        _take_away()
        if plan.operations and last:
            _forget_compiled(())


def _put(plan: TorchPlan) -> None:
    module_rules.install(plan)
    if plan.operations:
        _tell_compiler(plan.operations)
        _installed.libraries = kernels.register(plan.device, plan.operations)


def _take_away() -> None:
    module_rules.uninstall()
    for library in _installed.libraries:
        library._destroy()
    _installed.libraries = []
    if _installed.tag is not None:
        torch.compiler.config.cache_key_tag, _installed.tag = _installed.tag, None


def in_force(plan: CastPlan) -> bool:
    """Return whether a plan has no rules or some are installed, which are then those of its session."""
    return not isinstance(plan, TorchPlan) or bool(_installed.owners)


def _tell_compiler(operations: tuple[Any, ...]) -> None:
    """Keep the compiler, whose guards and cache on disk know nothing of our kernels, from using other code."""
    _installed.tag = torch.compiler.config.cache_key_tag
    torch.compiler.config.cache_key_tag = f"{_installed.tag}ampx:{operations}"
    _forget_compiled(operations)


def _forget_compiled(operations: tuple[Any, ...]) -> None:
    # Where there is a GPU, a reset imports the whole of inductor, seconds for nothing where nothing was compiled.
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if operations != _installed.compiled and frames is not None and frames.FRAME_COMPILE_COUNTER:
        torch.compiler.reset()
    _installed.compiled = operations
