"""Which operations run in which dtype, looked at in the first steps only."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ampx.run import Recorder, Sampler
from ampx_torch.modes import Mode, leave

if TYPE_CHECKING:
    from .manager import TorchManager

# They move or make memory and compute nothing.
_IDLE: Final = frozenset(
    ("_to_copy", "detach", "clone", "copy_", "lift_fresh", "zero_", "fill_", "ones_like", "zeros_like")
)
_RESTORED: Final = "saved_include_set"  # what torch's call of a compiled function keeps the dispatch keys in


class _Counter(Mode):
    """Sees every kernel with the tensors it really gets, after autocast and in backward, too."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.paused or self.ended:
            return result
        name = func._schema.name.rpartition("::")[2]
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
