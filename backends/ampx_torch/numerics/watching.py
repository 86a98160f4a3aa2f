"""Hooks on modules and their outputs, and a dispatch mode for operations: what a model computed, reduced."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode

from ampx.callers import script_line
from ampx.modules import check_patterns
from ampx.numerics.probe import Direction, Reading, Watching
from ampx.numerics.watching import Entry, GradientLog, Log, Reduced
from ampx_torch.lent_hooks import lend
from ampx_torch.names import Names, each_model
from ampx_torch.trees import stored

from .reductions import floating, read, read_samples, reduce

# They hand memory on and compute nothing, not even another dtype.
_IDLE: Final = frozenset(
    ("detach", "clone", "alias", "lift_fresh", "zero_", "zeros", "ones", "zeros_like", "ones_like")
)


@dataclass(eq=False)
class _Call:
    """A call of a module that is under way."""

    module: nn.Module
    name: str
    kind: str
    inputs: list[Reduced]
    began: float = 0.0
    waited: float = 0.0


class _Thread(threading.local):
    """The calls of modules under way, outermost first."""

    calls: tuple[_Call, ...] = ()


class ModuleWatch:
    """What a region saw so far."""

    def __init__(self, watching: Watching) -> None:
        self._watching = watching
        self._log = Log(watching, read, read_samples)
        self._thread = _Thread()
        self._nodes: dict[int, tuple[str, str, str]] = {}  # by number of a node of the graph: module, kind, place
        self._leaf_hooks: list[Any] = []
        self._waited = 0.0  # what this watch itself took, for times
        self.open = True

    def readings(self) -> list[Reading]:
        """Return what was seen so far, in order of execution. Sync: one a device."""
        return self._log.readings()

    # -- modules -----------------------------------------------------------------------------------

    def take(self, names: Names) -> list[Callable[[], None]]:
        """Put hooks on modules; return what takes them off."""
        return [
            lend(
                module,
                (
                    module.register_forward_pre_hook(_Before(self, name), with_kwargs=True),
                    # In front: a hook of the user's may replace the output, and it is the module's own that counts.
                    module.register_forward_hook(_After(self, name), with_kwargs=True, prepend=True, always_call=True),
                ),
            )
            for module, name in names.items()
        ]

    def enter(self, module: nn.Module, name: str, tree: Any) -> None:
        """Begin a call; inputs are looked at before the module can change them in place."""
        started = time.perf_counter()
        reads = self._watching.watches(name) and not _computes_again()
        inputs = reduce(floating(tree), self._watching.dtype) if reads else []
        call = _Call(module, name, type(module).__name__, inputs)
        self._thread.calls = (*self._thread.calls, call)
        if self._watching.times:
            _wait(tree)
            call.began = time.perf_counter()
            self._waited += call.began - started
            call.waited = self._waited

    def leave(self, module: nn.Module, name: str, output: Any) -> None:
        """End a call; those inside it that an interrupt left open go too."""
        calls = self._thread.calls
        position = next((at for at in range(len(calls) - 1, -1, -1) if calls[at].module is module), None)
        if position is None:
            return
        call, self._thread.calls = calls[position], calls[:position]
        tensors = list(floating(output))
        ended = 0.0
        if self._watching.times:
            _wait(tensors)
            ended = time.perf_counter()
        if not tensors or not self._watching.watches(name):
            return
        if not _computes_again():
            seen = self._note(call.name, call.kind, "", "forward", tensors)
            seen.inputs = call.inputs
            if self._watching.times:
                seen.seconds = ended - call.began - (self._waited - call.waited)
        self._watch_gradients(call, tensors)
        if self._watching.times:
            _wait(tensors)
            self._waited += time.perf_counter() - ended

    def _watch_gradients(self, call: _Call, tensors: list[torch.Tensor]) -> None:
        """Put a hook on every output that a gradient may come to; one call's gradients are one reading."""
        wanted = [
            tensor
            for tensor in tensors
            if tensor.requires_grad and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        ]
        sizes = self._sizes(wanted)
        gradients = GradientLog(self._log, call.name, call.kind, sizes=sizes)
        for place, tensor in enumerate(wanted):
            handle = tensor.register_hook(_Gradient(self, gradients, place))
            if tensor.is_leaf:  # it outlives the graph
                self._leaf_hooks.append(handle)

    def gradient(self, gradients: GradientLog, place: int, gradient: torch.Tensor) -> None:
        """Take the gradient of one output."""
        self._take(gradients.at(place), [gradient], place)

    def _note(self, module: str, kind: str, operation: str, direction: Direction, tensors: list[torch.Tensor]) -> Entry:
        entry = self._log.add(module, kind, operation, direction, self._sizes(tensors))
        self._take(entry, tensors)
        return entry

    def _sizes(self, tensors: list[torch.Tensor]) -> list[int]:
        return [stored(tensor).numel() for tensor in tensors] if self._watching.samples else []

    def _take(self, entry: Entry, tensors: list[torch.Tensor], first: int = 0) -> None:
        """Reduce tensors of a value, and keep what belongs to its sample.

        Args:
            entry: Where they belong.
            tensors: Some that follow each other in the value.
            first: The place of the first of them.
        """
        entry.dtype = entry.dtype or _dtype(tensors[0])
        entry.value += reduce(tensors, self._watching.dtype)
        with _disable_current_modes(), torch.no_grad():
            for place, tensor in enumerate(tensors if entry.sampled else (), first):
                values = stored(tensor).reshape(-1)
                sample = entry.chosen(place, values, values.numel())
                if sample is not None:
                    entry.samples[place] = sample.to(torch.float32, copy=True)

    def close(self) -> None:
        """Stop looking: gradients may come after the region."""
        self.open = False
        for handle in self._leaf_hooks:
            handle.remove()

    # -- operations --------------------------------------------------------------------------------

    def operation(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and note what came in and out."""
        name = _operation_name(function)
        calls = self._thread.calls
        backward = _in_backward()
        module, kind, place = (calls[-1].name, calls[-1].kind, "") if calls else ("", "", "")
        node = torch._C._current_autograd_node() if backward and not calls else None
        if node is not None:
            module, kind, place = self._nodes.get(node._sequence_nr(), ("", "", ""))
        else:
            place = script_line()
            # The node of an operation is made before it runs; what makes none, as our reading, takes no other's place.
            latest = torch._C._autograd._get_sequence_nr() - 1
            self._nodes.setdefault(latest, (module, kind, place))
        reads = not function.is_view and not (backward and calls) and self._watching.watches(module)
        if not reads or name in _IDLE or name.startswith(("empty", "new_empty")):
            return function(*args, **kwargs)
        inputs = reduce(floating((args, kwargs)), self._watching.dtype)
        result = function(*args, **kwargs)
        tensors = list(floating(result))
        if tensors:
            seen = self._note(module, kind, name, "backward" if backward else "forward", tensors)
            seen.inputs, seen.place = inputs, place
        return result


class _Hook:
    """Called by torch while the region is open."""

    def __init__(self, watch: ModuleWatch, name: str) -> None:
        self._watch = watch
        self._name = name

    @property
    def _open(self) -> bool:
        return self._watch.open and not torch.compiler.is_compiling()


class _Before(_Hook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._open:
            self._watch.enter(module, self._name, (args, kwargs))


class _After(_Hook):
    def __call__(self, module: nn.Module, *rest: Any) -> None:
        """Take the output, which is None after an exception; torch leaves out the keyword arguments then."""
        if self._open:
            self._watch.leave(module, self._name, rest[-1])


class _Gradient:
    def __init__(self, watch: ModuleWatch, gradients: GradientLog, place: int) -> None:
        self._call = (gradients, place)
        self._watch = watch

    def __call__(self, gradient: torch.Tensor) -> None:
        if self._watch.open:
            self._watch.gradient(*self._call, gradient)


class _Operations(TorchDispatchMode):
    """Sees every kernel with the tensors it really gets, after autocast and in backward, too."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run: Callable[..., Any] | None = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.run is None:
            return func(*args, **(kwargs or {}))
        return self.run(func, args, kwargs or {})


@contextmanager
def watch(model: nn.Module | None, watching: Watching) -> Iterator[ModuleWatch]:
    """Read the outputs of modules and the gradients of these outputs: see `Probe.watch`."""
    view = ModuleWatch(watching)
    with ExitStack() as stack:

        def take(names: Names) -> None:
            if model is not None:
                check_patterns("watch", watching.modules, list(names.values()))
            for take_back in view.take(names):
                stack.callback(take_back)

        stack.callback(view.close)
        stack.enter_context(each_model(model, take))
        if watching.operations:
            stack.enter_context(_operations_watched(view))
        yield view


@contextmanager
def _operations_watched(view: ModuleWatch) -> Iterator[None]:
    mode = _Operations(view.operation)
    mode.__enter__()
    try:
        yield
    finally:
        mode.run = None
        if _get_current_dispatch_mode() is mode:  # else another was entered meanwhile: they end in order of a stack
            mode.__exit__(None, None, None)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


_computes_again = _in_backward  # modules run inside backward where activations were thrown away


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _operation_name(function: Any) -> str:
    name: str = function._schema.name
    return name.removeprefix("aten::")


def _wait(tree: Any) -> None:
    """Wait for the devices of some tensors."""
    for device in {tensor.device for tensor in floating(tree) if tensor.is_cuda}:
        torch.cuda.synchronize(device)
