"""Casting in PyTorch: torch's own autocast, without its defects when it is on for the whole process.

The flags of autocast are kept by thread. ampx sets them with torch's setters and keeps the weight cache off:
nothing would ever empty it, so that training would go on with the weights of the first step. Inside an
`autocast` region the cache is on as in torch, because a weight that is used many times in one forward is then
cast once. Every optimizer step and every `scale_loss` empties it. Weights that are changed by hand inside a
region, after they were used and before either of these, need `forget_weights()` or a region of their own.
"""

from __future__ import annotations

import operator
import threading
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.hooks import RemovableHandle

from ampx.backend import CastPlan
from ampx.errors import UnsupportedOpError
from ampx.policy import Dtype
from ampx_torch import trees
from ampx_torch.trees import DTYPES, LOW

from . import compiled, loaders, module_rules, oplists, rules

# Names for callers that cannot afford a region: read the flag, switch off, restore in `finally`.
is_on = torch.is_autocast_enabled
switch = torch.set_autocast_enabled
_call: Final = operator.methodcaller("__call__")


class _Thread(threading.local):
    """What a thread's autocast was before ampx, and the level that it is at."""

    def __init__(self) -> None:
        self.device = "cpu"
        self.before: tuple[bool, torch.dtype, bool] | None = None
        self.level = _Level()


class _Level:
    """The flags that a region with casting on has found, and the level around it.

    The outermost, which has found none, is another one after ampx switched the thread as a whole.
    """

    def __init__(self, outer: _Level | None = None, device: str = "") -> None:
        self.outer = self if outer is None else outer
        if device:
            self._device, self._flags = device, _flags(device)
            self._nesting = _nesting()

    def restore(self) -> None:
        """Put back what the region has found."""
        _set_flags(self._device, self._flags)
        while _nesting() > self._nesting:
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()


def _nesting() -> int:
    """Return how many of torch's own regions the calling thread is in, which only a change tells.

    Both changes are made without a place between them at which an exception could be raised.
    """
    nesting: int
    _, nesting = map(_call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting))
    return nesting


_thread = _Thread()


# -- plans -----------------------------------------------------------------------------------------


def check_plan(plan: CastPlan) -> CastPlan:
    """Resolve the op lists of a plan."""
    return oplists.resolve(plan)


def check_resolved(plan: CastPlan | None) -> None:
    """Refuse rules that wait for `prepare`: name patterns, or at O2 and O3 classes."""
    if not isinstance(plan, oplists.TorchPlan):
        return
    rules_left = plan.patterns if plan.level == "O1" else plan.modules
    missing = [entry for _, entry in rules_left if entry not in plan.resolved]
    if missing:
        names = ", ".join(repr(entry) if isinstance(entry, str) else entry.__name__ for entry in missing)
        raise UnsupportedOpError(
            f"allow and deny name {names}, for no operation but for modules, and wrap_optimizer was called before a "
            f"model was searched for them; accepted: names of operations, and modules that ampx.prepare(model) found. "
            f"Call it before wrap_optimizer, or correct the name.{''.join(map(plan.meant, missing))}"
        )


# -- process and threads ---------------------------------------------------------------------------


def activate(plan: CastPlan) -> None:
    """Switch autocast on for the calling thread and put the rules in force for the process."""
    rules.install(plan, owner=plan)
    loaders.keep_uncast()
    enter_thread(plan)


def deactivate(plan: CastPlan) -> None:
    """Take the rules away and give the calling thread back the autocast it had.

    Other threads that called `enter_thread` keep their flags until they end: torch lets no thread set those of
    another.
    """
    rules.uninstall(plan, owner=plan, last=True)
    loaders.release()
    before, _thread.before = _thread.before, None
    _thread.level = _Level()
    if before is not None:
        _set_flags(_thread.device, before)
        compiled.release(_thread)
        torch.clear_autocast_cache()


def enter_thread(plan: CastPlan) -> None:
    """Switch autocast on in the calling thread, with the weight cache off."""
    module_rules.reset_thread()
    _thread.level = _Level()
    if _thread.before is not None and _thread.device != plan.device:
        # A thread of an earlier session that casted on another device.
        _set_flags(_thread.device, _thread.before)
        compiled.release(_thread)
        _thread.before = None
    if _thread.before is None:
        _thread.device, _thread.before = plan.device, _flags(plan.device)
        compiled.keep_backward_uncast(_thread)
    _set_flags(plan.device, (True, DTYPES[plan.dtype], False))
    torch.clear_autocast_cache()


def _flags(device: str) -> tuple[bool, torch.dtype, bool]:
    return is_on(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()


def _set_flags(device: str, flags: tuple[bool, torch.dtype, bool]) -> None:
    switch(device, flags[0])
    torch.set_autocast_dtype(device, flags[1])
    torch.set_autocast_cache_enabled(flags[2])


# -- regions ---------------------------------------------------------------------------------------
#
# Regions are written ahead, as the protocol is: what is to be put back is noted before it changes, and forgotten after
# it was put back. An exception at any line of `__exit__`, even before its first, leaves the note, and the region does
# the rest when it is dropped, which is when the exception is. It has a destructor only so long: in one that runs after
# every region, an interruption would be lost. By then a region around it may have been left, which has undone it:
# the level that it is to go back to is none of the thread's any more.


def _return_to(level: _Level) -> bool:
    """Undo regions inside that were not left; return whether the level still counts for the calling thread."""
    inner, present = [], _thread.level
    while present is not level:
        if present.outer is present:
            return False
        inner.append(present)
        present = present.outer
    for region in inner:
        region.restore()
    _thread.level = level
    return True


class Off:
    """Casting off inside. Costs one flag where it is off already. Not to be entered twice at a time."""

    _level: _Level | None = None  # the thread's, while casting is to be switched on again; None: it is not

    def __init__(self, device: str) -> None:
        self._device = device

    def __enter__(self) -> None:
        if is_on(self._device):
            self._level = _thread.level
            self.__class__ = _Switched
            switch(self._device, False)

    def __exit__(self, *error: object) -> None:
        """Restore, unless `init` or `shutdown` have decided anew inside; drop casts that backward has used up."""
        if self._level is not None:
            if self._level is _thread.level or _return_to(self._level):
                switch(self._device, True)
                if torch.is_autocast_cache_enabled():  # as `forget_weights`, without a call
                    torch.clear_autocast_cache()
            self._level = None
            self.__class__ = Off


class _Switched(Off):
    """A region that has switched casting off."""

    def __del__(self) -> None:
        self.__exit__()


class On:
    """Casting on inside, with the weight cache. Not to be entered twice at a time."""

    _handle: Any = None

    def __init__(self, plan: CastPlan) -> None:
        self._plan = plan

    def __enter__(self) -> None:
        self._region = torch.autocast(self._plan.device, DTYPES[self._plan.dtype], cache_enabled=True)
        self._level = _Level(_thread.level, self._plan.device)
        self.__class__ = _Entered  # which undoes what follows, wherever it is interrupted
        rules.install(self._plan, owner=self)
        compiled.keep_backward_uncast(self)
        _thread.level = self._level
        # Optimizers that are not wrapped call it, too. Not by `register_optimizer_step_post_hook`: interrupted as it
        # returns, it leaves a hook to which we hold no handle.
        self._handle = RemovableHandle(_global_optimizer_post_hooks)
        _global_optimizer_post_hooks[self._handle.id] = _forget_after_step
        self._region.__enter__()

    def __exit__(self, *error: Any) -> None:
        """Restore, unless `init` or `shutdown` have decided anew inside."""
        counts = self._level is _thread.level or _return_to(self._level)
        decided = None if counts else _flags(self._plan.device)
        self._region.__exit__(*error)
        if decided is None:
            _thread.level = self._level.outer
        else:
            _set_flags(self._plan.device, decided)
        self._end()

    def _end(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        compiled.release(self)
        rules.uninstall(self._plan, owner=self)
        self.__class__ = On


class _Entered(On):
    """A region that has switched casting on."""

    def __del__(self) -> None:
        """Restore, wherever entering or leaving was interrupted."""
        if _return_to(self._level):
            self._level.restore()
            _thread.level = self._level.outer
        self._end()


class Traced:
    """A region inside a compiled function: only flags, which the compiler knows; it ignores the weight cache."""

    def __init__(self, plan: CastPlan, enabled: bool) -> None:
        self._device = plan.device
        self._wanted = (enabled, DTYPES[plan.dtype])

    def __enter__(self) -> None:
        self._before = is_on(self._device), torch.get_autocast_dtype(self._device)
        self._set(self._wanted)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._set(self._before)

    def _set(self, flags: tuple[bool, torch.dtype]) -> None:
        switch(self._device, flags[0])
        torch.set_autocast_dtype(self._device, flags[1])


def off(device: str) -> AbstractContextManager[None]:
    """Return a region with casting off."""
    return Off(device)


def region(plan: CastPlan, enabled: bool) -> AbstractContextManager[Any]:
    """Return a region with casting on (and the weight cache on) or off."""
    if torch.compiler.is_dynamo_compiling() and rules.in_force(plan):
        return Traced(plan, enabled)
    return On(plan) if enabled else Off(plan.device)


def forget_weights() -> None:
    """Drop the cached casts of weights; they may have changed."""
    if torch.is_autocast_cache_enabled():
        torch.clear_autocast_cache()


def _forget_after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    torch.clear_autocast_cache()


# -- values ----------------------------------------------------------------------------------------


def cast(tree: Any, dtype: Dtype) -> Any:
    """Cast the floating tensors of a tree; the rest, None included, is returned as it is."""
    return trees.cast(tree, DTYPES[dtype])


def widest(tree: Any, at_least: Dtype) -> Dtype:
    """Return float32 where a floating tensor of the tree is float32 or wider, else `at_least`."""
    wide = any(tensor.dtype not in LOW for tensor in trees.floating(tree))
    return "float32" if wide else at_least
