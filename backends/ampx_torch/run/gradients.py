"""The script sees unscaled gradients wherever PyTorch shows it one: in `.grad`, in hooks, in backwards of its own.

What backward calls of the script is called with gradients divided by the loss scale, and what it returns is multiplied
again: see `_showing_unscaled`. `_hooks` and `_own_backwards` list the calls by which a script hands such code over.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import torch
from torch._library.custom_ops import CustomOpDef
from torch.autograd.function import BackwardCFunction
from torch.nn.parallel import DistributedDataParallel

from ampx.run import ImportWatch, is_script_function
from ampx_torch.trees import LOW, gradient_of

from .manager import WIDE, TorchManager

_NAMES: Final = ("hook", "fn", "backward")  # of the parameter that takes the script's function
_FSDP: Final = "torch.distributed.fsdp"
_COMPILED_FUNCTIONS: Final = "torch._dynamo.variables.misc"


@contextmanager
def gradients_unscaled(manager: TorchManager) -> Iterator[None]:
    """Patch `.grad` and the calls by which code of the script is run in backward."""
    with ExitStack() as stack:
        for patch in (
            *(_grad_watched, _retained, _hooks, _node_hooks, _accumulated),
            *(_own_backwards, _uncompiled, _communicated),
        ):
            stack.enter_context(patch(manager))
        yield


# -- `.grad` ---------------------------------------------------------------------------------------


@contextmanager
def _grad_watched(manager: TorchManager) -> Iterator[None]:
    """Unscale the gradients of an optimizer as soon as the script reads or replaces one of them.

    So `clip_grad_norm_`, gradient statistics and whatever a script does by hand need no knowledge of their own.
    """
    native: Any = torch.Tensor.grad

    def read(self: torch.Tensor) -> Any:
        value = gradient_of(self)
        if value is not None and not manager.quiet:
            if manager.pending:
                manager.reveal(self)
            if value.dtype in LOW and not self.is_leaf:
                return getattr(self, WIDE, value)
        elif value is not None and manager.inside and manager.script_code.runs:
            manager.reveal_inside(self)
        return value

    def write(self: torch.Tensor, value: Any) -> None:
        if value is not None and not manager.quiet and manager.pending:
            manager.reveal(self)
        elif value is not None and manager.inside and manager.script_code.runs:
            manager.reveal_inside(self)
        native.__set__(self, value)
        if not self.is_leaf:
            vars(self).pop(WIDE, None)

    def forget(self: torch.Tensor) -> None:
        native.__delete__(self)
        vars(self).pop(WIDE, None)

    def install() -> None:
        torch.Tensor.grad = torch.Tensor._grad = property(read, write, forget, native.__doc__)

    manager.watch_gradients = install  # every read of a gradient takes longer then, so not before it must
    try:
        yield
    finally:
        if "grad" in vars(torch.Tensor):
            del torch.Tensor.grad, torch.Tensor._grad  # torch's own are the base class's


@contextmanager
def _retained(manager: TorchManager) -> Iterator[None]:
    """Remember the tensors in the middle of a graph whose gradients the script wants kept."""
    native = torch.Tensor.retain_grad

    def retain_grad(self: torch.Tensor) -> None:
        native(self)
        if not self.is_leaf and (manager.run.amp is None or manager.scales):
            manager.retained[id(self)] = weakref.ref(self)

    with mock.patch.object(torch.Tensor, "retain_grad", retain_grad):
        yield


# -- code of the script that backward calls ---------------------------------------------------------


def _showing_unscaled(manager: TorchManager, function: Callable[..., Any], casts: bool = True) -> Callable[..., Any]:
    """Return a function that divides the gradients it is given, and multiplies those that `function` returns.

    Low precision becomes float32, where nothing underflows.

    Args:
        manager: Knows the loss scale of the backward under way.
        function: Takes gradients, alone or in tuples, and returns None or what replaces the first.
        casts: What comes back gets the dtypes that the first had; else torch does that.
    """

    @functools.wraps(function)
    def show(*values: Any) -> Any:
        factor = manager.factor_seen
        if isinstance(factor, float) and factor == 1.0:
            return function(*values)
        return manager.script_code.call(
            function,
            values,
            lambda value: unscaled(value, factor),
            lambda result, shown: _scaled_as(result, factor, values if casts else (), shown),
        )

    return show


def _scaled_as(result: Any, factor: Any, values: Sequence[Any], shown: Sequence[Any]) -> Any:
    """Return a result with the loss scale, in the dtypes of the first gradients in `values`, if there are any."""
    first = next((at for at, value in enumerate(values) if isinstance(value, (torch.Tensor, tuple))), None)
    if first is None:
        return _multiplied(result, factor)
    if result is None and any(part._version for part in _parts(shown[first])):
        result = shown[first]  # it was changed in place
    return _multiplied(result, factor, values[first])


def _unless_torch_s(manager: TorchManager, function: Callable[..., Any]) -> Callable[..., Any]:
    return function if _from_torch(function) else _showing_unscaled(manager, function)


def _if_script_s(manager: TorchManager, function: Callable[..., Any]) -> Callable[..., Any]:
    """Have the backward of an operation of the script see unscaled gradients, but where the compiler has traced it."""
    if not is_script_function(function):
        return function
    showing = _showing_unscaled(manager, function, casts=False)
    code = inspect.unwrap(function).__code__

    @functools.wraps(function)
    def backward(*values: Any) -> Any:
        if manager.scales and torch.compiler.is_compiling():
            manager.run.recorder.note_scaled(
                f"the compiled backward of an operation ({code.co_filename}:{code.co_firstlineno})"
            )
        return showing(*values)

    return backward


def _registered(owner: Any, name: str, at: int, wrap: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """Patch what takes a function of the script, at this position or by one of `_NAMES`."""
    native = getattr(owner, name)

    @functools.wraps(native)
    def register(*args: Any, **options: Any) -> Any:
        if len(args) > at:
            args = (*args[:at], wrap(args[at]), *args[at + 1 :])
        return native(*args, **{key: wrap(value) if key in _NAMES else value for key, value in options.items()})

    return mock.patch.object(owner, name, register)


@contextmanager
def _hooks(manager: TorchManager) -> Iterator[None]:
    """Patch what registers hooks on tensors and modules. Legacy hooks of modules are hooks of nodes."""
    module = torch.nn.modules.module
    registering: list[tuple[Any, str, int]] = [
        (torch.Tensor, "register_hook", 1),
        (torch.nn.Module, "register_full_backward_hook", 1),
        (torch.nn.Module, "register_full_backward_pre_hook", 1),
        (module, "register_module_full_backward_hook", 0),
        (module, "register_module_full_backward_pre_hook", 0),
        (torch.autograd.graph, "register_multi_grad_hook", 1),
    ]
    with ExitStack() as stack:
        for owner, name, at in registering:
            stack.enter_context(_registered(owner, name, at, functools.partial(_unless_torch_s, manager)))
        yield


@contextmanager
def _node_hooks(manager: TorchManager) -> Iterator[None]:
    """Replace the methods of nodes that register hooks.

    Their types are static types of C, to which Python does not let a name be assigned; so it goes into their
    dictionaries. Something that stands for a node instead would not be one to `GradientEdge`, `is` and `type`.
    """
    wrap = functools.partial(_unless_torch_s, manager)
    with ExitStack() as stack:
        for name in ("register_hook", "register_prehook"):
            stack.enter_context(_registered(BackwardCFunction, name, 1, wrap))
        for kind in vars(torch._C._functions).values():
            if isinstance(kind, type) and "register_hook" in vars(kind):
                (names,) = gc.get_referents(vars(kind))
                before = {name: names[name] for name in ("register_hook", "register_prehook")}
                after = {name: _node_method(manager, native, name) for name, native in before.items()}
                _rename(kind, names, after)
                stack.callback(_rename, kind, names, before)
        yield


def _rename(kind: type, names: dict[str, Any], methods: dict[str, Any]) -> None:
    names.update(methods)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))  # Python keeps what it has looked up


def _node_method(manager: TorchManager, native: Any, name: str) -> Callable[..., Any]:
    @functools.wraps(native)
    def register(node: Any, fn: Callable[..., Any]) -> Any:
        if not _from_torch(fn):
            if name == "register_hook" and type(node) is torch._C._functions.AccumulateGrad:
                return native(node, _after_accumulation(manager, node.variable, fn))
            fn = _showing_unscaled(manager, fn)
        return native(node, fn)

    return register


@contextmanager
def _own_backwards(manager: TorchManager) -> Iterator[None]:
    """Patch what calls the backward of a `Function` of the script, and what takes that of an operation.

    Those of libraries are left alone, as torch's are: they may count on the dtype that they are given.
    """
    own: dict[type, bool] = {}

    def calling(native: Callable[..., Any]) -> Callable[..., Any]:
        showing = _showing_unscaled(manager, native, casts=False)

        @functools.wraps(native)
        def apply(self: Any, *gradients: Any) -> Any:
            kind = type(self)
            if kind not in own:
                own[kind] = any(map(is_script_function, (kind._forward_cls.backward, kind._forward_cls.vjp)))
            return (showing if own[kind] else native)(self, *gradients)

        return apply

    with ExitStack() as stack:
        for name in {"apply", "apply_boxed"} & vars(BackwardCFunction).keys():
            stack.enter_context(mock.patch.object(BackwardCFunction, name, calling(vars(BackwardCFunction)[name])))
        for owner in (torch.library, CustomOpDef):
            stack.enter_context(_registered(owner, "register_autograd", 1, functools.partial(_if_script_s, manager)))
        yield


@contextmanager
def _accumulated(manager: TorchManager) -> Iterator[None]:
    """Patch the registering of hooks that look at `.grad` while backward still adds to others."""
    native = torch.Tensor.register_post_accumulate_grad_hook

    def register(self: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
        return native(self, hook if _from_torch(hook) else _after_accumulation(manager, self, hook))

    with mock.patch.object(torch.Tensor, "register_post_accumulate_grad_hook", register):
        yield


def _after_accumulation(manager: TorchManager, leaf: torch.Tensor, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that finds the gradients of a tensor unscaled, because they are divided before they are added."""
    manager.arriving[id(leaf)] = weakref.ref(leaf)

    @functools.wraps(hook)
    def look(*values: Any) -> Any:
        with manager.script_code.switched(True):
            return hook(*values)

    return look


@contextmanager
def _communicated(manager: TorchManager) -> Iterator[None]:
    """Patch the registering of functions that exchange gradients between processes."""

    def exchanging(hook: Callable[..., Any]) -> Callable[..., Any]:
        if _from_torch(hook):
            return hook

        @functools.wraps(hook)
        def exchange(state: Any, bucket: Any, *out: torch.Tensor) -> Any:
            factor = manager.factor_seen
            if isinstance(factor, float) and factor == 1.0:
                return hook(state, bucket, *out)
            sharded = isinstance(bucket, torch.Tensor)  # of FSDP, whose hook writes to its last argument
            (bucket if sharded else bucket.buffer()).div_(factor)
            with manager.script_code.switched(True):
                future = hook(state, bucket, *out)
            if sharded:
                (*out, bucket)[0].mul_(factor)
                return future
            return future.then(lambda done: _multiplied(_parts(done.value())[0], factor))

        return exchange

    def patch(owner: Any) -> None:
        stack.enter_context(_registered(owner, "register_comm_hook", 2, exchanging))

    with ExitStack() as stack:
        patch(DistributedDataParallel)
        stack.enter_context(_once_imported(_FSDP, lambda module: patch(module.FullyShardedDataParallel)))
        yield


@contextmanager
def _uncompiled(manager: TorchManager) -> Iterator[None]:
    """Have the compiler leave out functions whose backward is the script's: compiled, it would see scaled gradients."""

    def patch(module: Any) -> None:
        native = module.AutogradFunctionVariable.call_apply

        @functools.wraps(native)
        def call_apply(self: Any, *args: Any, **options: Any) -> Any:
            if manager.scales and is_script_function(self.fn_cls.backward):
                raise torch._dynamo.exc.Unsupported(
                    f"the backward of {self.fn_cls.__name__} is to see gradients that do not carry the loss scale of "
                    f"`ampx run`, so it is not compiled: compile without fullgraph=True, or run with --dtype bfloat16"
                )
            return native(self, *args, **options)

        stack.enter_context(mock.patch.object(module.AutogradFunctionVariable, "call_apply", call_apply))

    with ExitStack() as stack:
        stack.enter_context(_once_imported(_COMPILED_FUNCTIONS, patch))
        yield


@contextmanager
def _once_imported(name: str, patch: Callable[[Any], None]) -> Iterator[None]:
    """Patch a module of torch as soon as the script has imported it, which takes seconds."""
    watch = ImportWatch({name: name}, lambda name: patch(sys.modules[name]))
    with watch.installed():
        watch.look()
        yield


# -- trees of gradients ------------------------------------------------------------------------------


def _from_torch(hook: object) -> bool:
    """Return whether a hook is none of the script's: torch's, or that of a watch, which sees what was computed."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).partition(".")[0] in ("torch", "ampx_torch")


def _parts(tree: Any) -> list[torch.Tensor]:
    """List the tensors of a tree."""
    if isinstance(tree, (tuple, list)):
        return [part for branch in tree for part in _parts(branch)]
    return [tree] if isinstance(tree, torch.Tensor) else []


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in LOW else tensor


def unscaled(tree: Any, factor: Any) -> Any:
    """Return gradients without the loss scale; low precision becomes float32, where nothing underflows."""
    if isinstance(tree, (tuple, list)):
        parts = [unscaled(part, factor) for part in tree]
        return parts if isinstance(tree, list) else tuple(parts)
    return _widened(tree) / factor if _is_gradient(tree) else tree


def _multiplied(tree: Any, factor: Any, like: Any = None) -> Any:
    """Return gradients with the loss scale, each in the dtype of its fellow in `like`, or else as they are."""
    if isinstance(tree, (tuple, list)):
        before = like if isinstance(like, (tuple, list)) else [like] * len(tree)
        return tuple(_multiplied(part, factor, old) for part, old in zip(tree, before, strict=True))
    if not _is_gradient(tree):
        return tree
    scaled, before = _widened(tree) * factor, _parts(like)
    return scaled.to(before[0].dtype) if before else scaled


def _is_gradient(value: object) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
