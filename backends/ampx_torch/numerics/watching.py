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

from ampx.callers import script_line
from ampx.modules import check_patterns
from ampx.numerics.probe import Watching
from ampx.numerics.watching import Reduced, Watcher, Where
from ampx_torch.lent_hooks import lend
from ampx_torch.modes import Mode, leave
from ampx_torch.names import Names, each_model

from .reductions import TENSORS, floating, wait

# They hand memory on and compute nothing, not even another dtype.
_IDLE: Final = frozenset(
    ("detach", "clone", "alias", "lift_fresh", "zero_", "zeros", "ones", "zeros_like", "ones_like")
)


@dataclass(eq=False)
class _Call:
    """A call of a module that is under way."""

    module: nn.Module
    where: Where
    inputs: list[Reduced]
    began: float = 0.0
    waited: float = 0.0


class _Thread(threading.local):
    """The calls of modules under way, outermost first."""

    running: tuple[_Call, ...] = ()


class ModuleWatch(Watcher):
    """What a region saw so far."""

    def __init__(self, watching: Watching) -> None:
        super().__init__(TENSORS, watching)
        self._calls = _Thread()
        self._take_back: dict[nn.Module, Callable[[], None]] = {}
        self._nodes: dict[int, tuple[Where, str]] = {}  # by number of a node of the graph: module and line
        self._leaf_hooks: list[Any] = []
        self._waited = 0.0  # what this watch itself took, for times
        self.open = True

    # -- modules -----------------------------------------------------------------------------------

    def take(self, names: Names) -> None:
        """Put hooks on modules, around those of others; a name that is new may have had others put some there."""
        for module, name in names.items():
            self._take_back.pop(module, lambda: None)()
            self._take_back[module] = lend(
                module,
                (
                    module.register_forward_pre_hook(_Before(self, name), with_kwargs=True),
                    # In front: a hook of the user's may replace the output, and it is the module's own that counts.
                    module.register_forward_hook(_After(self, name), with_kwargs=True, prepend=True, always_call=True),
                ),
            )

    def enter(self, module: nn.Module, name: str, tree: Any) -> None:
        """Begin a call; inputs are looked at before the module can change them in place."""
        started = time.perf_counter()
        reads = self.watching.watches(name) and not _computes_again()
        call = _Call(module, (name, type(module).__name__), self.reduced(tree) if reads else [])
        self._calls.running = (*self._calls.running, call)
        if self.watching.times:
            wait(tree)
            call.began = time.perf_counter()
            self._waited += call.began - started
            call.waited = self._waited

    def leave(self, module: nn.Module, output: Any) -> None:
        """End a call; those inside it that an interrupt left open go too."""
        running = self._calls.running
        position = next((at for at in range(len(running) - 1, -1, -1) if running[at].module is module), None)
        if position is None:
            return
        call, self._calls.running = running[position], running[:position]
        ended = 0.0
        if self.watching.times:
            wait(output)
            ended = time.perf_counter()
        if not self.watching.watches(call.where[0]):
            return
        entry = None if _computes_again() else self.note(call.where, "", "forward", output, call.inputs)
        if entry is not None and self.watching.times:
            entry.seconds = ended - call.began - (self._waited - call.waited)
        self.tapped(output, call.where)
        if self.watching.times:
            wait(output)
            self._waited += time.perf_counter() - ended

    def tapped(self, value: Any, where: Where) -> Any:
        """Put a hook on every output that a gradient may come to."""
        wanted = [
            tensor
            for tensor in floating(value)
            if tensor.requires_grad and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        ]
        for tensor, listen in zip(wanted, self.listeners(where, wanted), strict=True):
            handle = tensor.register_hook(_Gradient(self, listen))
            if tensor.is_leaf:  # it outlives the graph
                self._leaf_hooks.append(handle)
        return value

    def close(self) -> None:
        """Stop looking: gradients may come after the region."""
        self.open = False
        for handle in self._leaf_hooks:
            handle.remove()
        for take_back in self._take_back.values():
            take_back()

    # -- operations --------------------------------------------------------------------------------

    def operation(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and note what came in and out."""
        name = _operation_name(function)
        running = self._calls.running
        backward = _in_backward()
        where, line = (running[-1].where if running else ("", "")), ""
        node = torch._C._current_autograd_node() if backward and not running else None
        if node is not None:
            where, line = self._nodes.get(node._sequence_nr(), (("", ""), ""))
        else:
            line = script_line()
            # Autograd makes the node of an operation before this runs. An operation without a node of its own, such as
            # our reading, finds the node of another one, whose entry stays.
            latest = torch._C._autograd._get_sequence_nr() - 1
            self._nodes.setdefault(latest, (where, line))
        reads = not function.is_view and not (backward and running) and self.watching.watches(where[0])
        if not reads or name in _IDLE or name.startswith(("empty", "new_empty")):
            return function(*args, **kwargs)
        inputs = self.reduced((args, kwargs))
        result = function(*args, **kwargs)
        self.note(where, name, "backward" if backward else "forward", result, inputs, line)
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
            self._watch.leave(module, rest[-1])


class _Gradient:
    def __init__(self, watch: ModuleWatch, listen: Callable[[torch.Tensor], None]) -> None:
        self._watch = watch
        self._listen = listen

    def __call__(self, gradient: torch.Tensor | None) -> None:
        # None comes where only another output of the same operation has a gradient, as of a recurrent layer on a GPU.
        if self._watch.open and gradient is not None:
            self._listen(gradient)


class _Operations(Mode):
    """Sees every kernel with the tensors it really gets, after autocast and in backward, too."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.ended:
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
            view.take(names)

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
        leave(mode)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


_computes_again = _in_backward  # modules run inside backward where activations were thrown away


def _operation_name(function: Any) -> str:
    name: str = function._schema.name
    return name.removeprefix("aten::")
