"""Which operations run in which dtype, looked at in the first steps only."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ampx.callers import script_line
from ampx.run import Recorder, Sampler
from ampx_torch.modes import Mode, leave
from ampx_torch.trees import LOW

if TYPE_CHECKING:
    from .manager import TorchManager

# They move or make memory and compute nothing.
_IDLE: Final = frozenset(
    ("_to_copy", "detach", "clone", "copy_", "lift_fresh", "zero_", "fill_", "ones_like", "zeros_like")
)
_RESTORED: Final = "saved_include_set"  # what torch's call of a compiled function keeps the dispatch keys in
# They add to what is stored, as a moving average does.
_UPDATES: Final = frozenset(("add_", "sub_", "mul_", "div_", "lerp_", "addcmul_", "addcdiv_"))
_SAMPLED: Final = 4096  # elements of what is written to
_MOST: Final = 0.5  # of those that the same update moves in float32


class _Writes:
    """Names, to the observer of a run, updates of what a script itself stores in low precision that round to nothing.

    What lives on from step to step counts, and no activation: what loses most of its update in two steps.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._lossy: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # by id, with the step

    def update(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operation that updates its first argument. Sync: one."""
        tensor = args[0]
        if self._recorder.observer is None or not _is_stored_low(tensor):
            return func(*args, **kwargs)
        before = _sampled(tensor, tensor.shape).clone()
        others = (
            _sampled(entry, tensor.shape).float() if isinstance(entry, torch.Tensor) else entry for entry in args[1:]
        )
        exact = func(before.float(), *others, **kwargs)
        result = func(*args, **kwargs)
        moved = exact != before.float()
        unchanged = moved & (_sampled(tensor, tensor.shape) == before)
        if unchanged.sum() > _MOST * moved.sum():
            self._note(tensor, name)
        return result

    def _note(self, tensor: torch.Tensor, name: str) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        reference, step = self._lossy.get(id(tensor), (None, 0))
        if reference is None or reference() is not tensor:  # another one, that was freed
            self._lossy[id(tensor)] = weakref.ref(tensor), self._recorder.steps
        elif step != self._recorder.steps and self._recorder.observer is not None:
            self._recorder.observer.mistake(
                f"{script_line()}: most updates round to nothing, which {name} makes to what the script stores in "
                f"{dtype}: they are smaller than what lies between two numbers of {dtype}. Store it in float32."
            )


def _is_stored_low(tensor: torch.Tensor) -> bool:
    """Return whether a tensor may be what a script stores in low precision, beside what optimizers train."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    in_backward = torch._C._current_graph_task_id() != -1
    return plain and tensor.dtype in LOW and not (tensor.is_meta or tensor.requires_grad or in_backward)


def _sampled(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return tensor.detach().expand(shape).reshape(-1)[:_SAMPLED]


class _Counter(Mode):
    """Sees every kernel with the tensors it really gets, after autocast and in backward, too."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._writes = _Writes(recorder)
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2]
        counts = not (self.paused or self.ended)
        updates = counts and name in _UPDATES
        result = self._writes.update(func, name, args, kwargs or {}) if updates else func(*args, **(kwargs or {}))
        if not counts:
            return result
        if not func.is_view and name not in _IDLE and not name.startswith(("empty", "_local_scalar")):
            first = result[0] if isinstance(result, (tuple, list)) and result else result
            if isinstance(first, torch.Tensor) and first.is_floating_point():
                self._recorder.count_op(name, str(first.dtype).removeprefix("torch."))
        return result


class TorchSampler(Sampler):
    """Switches the counting on with the first optimizer, and off after some steps."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self._mode: _Counter | None = None
        self._gone = False  # for good
        self.counts = False  # operations are being counted

    def start(self) -> None:
        """Count from now on, in this thread; nothing where it counts already."""
        if self._mode is None and not self._gone:
            self._mode = _Counter(self.recorder)
            self._mode.__enter__()
            self.counts = True

    def leave(self) -> None:
        """Count nothing any more."""
        self._gone = True
        self.stop()

    def pause(self, paused: bool) -> None:
        """Leave out what optimizers and scalers do."""
        if self._mode is not None and self.counts:
            self._mode.paused = paused

    def stop(self) -> None:
        """Stop, unless the script has entered a mode of its own meanwhile: modes end in the order of a stack."""
        if self._mode is None or _get_current_dispatch_mode() is not self._mode:
            return
        if _inside_compiled_function():
            # At its end torch has operations look for the mode again that was there when it began: it must stay.
            if self.counts:
                self.note_uncompiled()
            self._mode.paused = True
        else:
            leave(self._mode)
            self._mode = None
        self.counts = False

    def note_uncompiled(self) -> None:
        """Note that the script steps in a compiled function."""
        self.recorder.note(
            "The script compiles a function that steps the optimizer: it runs uncompiled. Compile the model, or the "
            "function that computes the loss."
        )


@contextmanager
def whole_graphs_uncounted(manager: TorchManager) -> Iterator[None]:
    """Patch `torch.compile`: where a function is to be compiled whole, counting ends.

    While a mode is there torch compiles nothing: it runs the function as it is, or raises with `fullgraph=True`.
    """
    compile_natively = torch.compile

    @functools.wraps(compile_natively)
    def compile_(model: Any = None, *, fullgraph: bool = False, **options: Any) -> Any:
        if fullgraph:
            manager.sampler.leave()
        return compile_natively(model, fullgraph=fullgraph, **options)

    with mock.patch.object(torch, "compile", compile_):
        yield


def _inside_compiled_function() -> bool:
    """Return whether a function that `torch.compile` made is running."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "torch._dynamo.eval_frame" and _RESTORED in frame.f_code.co_varnames:
            return True
    return False
