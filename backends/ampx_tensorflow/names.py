"""Modules by name, and a region around their calls: layers of Keras and tf_keras, and `tf.Module`s that are called."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from unittest import mock

import keras
import tensorflow as tf

from ampx.modules import Name, Names

# Receives the call, the module's own function, and the arguments; returns what the call returns.
Around: TypeAlias = Callable[["Call", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
# The frameworks' own classes call one another; only those of the user are modules that are called.
_OWN: Final = ("tensorflow.", "tf_keras.", "keras.")


@dataclass(frozen=True)
class Call:
    """A call of a module.

    Attributes:
        name: The module's name.
        module: The module.
    """

    name: str
    module: Any

    @property
    def kind(self) -> str:
        """Name of the module's class."""
        return type(self.module).__name__


def is_module(candidate: object) -> bool:
    """Return whether this is a layer or a `tf.Module`."""
    return isinstance(candidate, (keras.layers.Layer, tf.Module))


def children(module: Any) -> list[tuple[str, Any]]:
    """List what a module holds, each with its name in it: a layer's own name, or the path of attributes."""
    if isinstance(module, keras.layers.Layer):
        return [(layer.name, layer) for layer in module._layers if not isinstance(layer, keras.layers.InputLayer)]
    if hasattr(module, "_flatten_layers"):  # tf_keras
        return [(layer.name, layer) for layer in module._flatten_layers(recursive=False, include_self=False)]
    if isinstance(module, tf.Module):
        held = module._flatten(recursive=False, predicate=is_module, with_path=True)
        return [(".".join(map(str, path)), child) for path, child in held]
    return [(str(key), child) for key, child in _entries(module) if is_module(child)]


def _entries(container: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys and entries of a mapping or list; nothing of anything else."""
    if isinstance(container, (list, tuple)):
        return enumerate(container)
    return container.items() if isinstance(container, Mapping) else ()


def walk(module: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a module and all below it with their names; what occurs twice has its first name."""
    seen: set[int] = set()

    def visit(name: str, module: Any) -> Iterator[tuple[str, Any]]:
        seen.add(id(module))
        yield name, module
        taken: set[str] = set()
        for own, child in children(module):
            if id(child) in seen:
                continue
            unique, number = own, 1
            while unique in taken:
                number += 1
                unique = f"{own}_{number}"
            taken.add(unique)
            yield from visit(join(name, unique), child)

    return visit(name, module)


def join(outer: str, inner: str) -> str:
    """Return the name of a module inside another."""
    return f"{outer}{inner}" if not outer or outer.endswith(":") else f"{outer}.{inner}"


def plain(variable: Any) -> Any:
    """Return the variable of TensorFlow that one of Keras holds; another as it is."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def parameters(model: Any) -> list[tuple[str, Any]]:
    """List the trainable variables of a model, or of a tree of variables, by name."""
    named: dict[int, tuple[str, Any]] = {}
    for name, module in walk(model):
        for own, variable in _variables(module):
            named.setdefault(id(variable), (join(name, own), plain(variable)))
    listed = {id(variable) for _, variable in named.values()}
    for variable in getattr(model, "trainable_variables", ()):
        if id(variable) not in named and id(plain(variable)) not in listed:
            named[id(variable)] = getattr(variable, "path", variable.name), plain(variable)
            listed.add(id(plain(variable)))
    return list(named.values())


def _variables(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the trainable variables that a module itself holds, by their names in it."""
    if isinstance(module, keras.layers.Layer):
        yield from ((variable.name, variable) for variable in module._trainable_variables if variable.trainable)
    elif isinstance(module, tf.Module) and not hasattr(module, "_flatten_layers"):
        for path, variable in module._flatten(recursive=False, predicate=_is_trainable, with_path=True):
            yield ".".join(map(str, path)), variable
    for key, variable in _entries(module):
        if _is_trainable(variable) or isinstance(variable, keras.Variable):
            yield str(key), variable


def _is_trainable(candidate: object) -> bool:
    return isinstance(candidate, tf.Variable) and bool(candidate.trainable)


class _Stack(threading.local):
    """The modules that run in the calling thread, the innermost last."""

    def __init__(self) -> None:
        self.calls: list[Call] = []


class Modules:
    """The modules of a model by name, or of every model that is called.

    Attributes:
        names: Names of all modules so far.
        on_root: Called for every model once it has names, with its modules.
    """

    def __init__(self, model: Any | None) -> None:
        """Name the modules of a model; None: of those that are called from now on."""
        self._any = model is None
        self._calls: dict[int, Call] = {}  # which keep the modules alive, so that no other gets their identity
        self._stack = _Stack()
        self.on_root: Callable[[list[Call]], None] = lambda calls: None
        self.names: Final = Names(model, walk, self._added, (keras.layers.Layer, tf.Module))

    @property
    def innermost(self) -> Call | None:
        """The module that runs in the calling thread."""
        return self._stack.calls[-1] if self._stack.calls else None

    def _added(self, modules: list[tuple[Name, Any]]) -> None:
        calls = {id(module): Call(name, module) for name, module in modules}
        self._calls.update(calls)
        self.on_root(list(calls.values()))

    def start(self) -> None:
        """Report what was named at the beginning."""
        self.on_root(list(self._calls.values()))

    def _find(self, module: Any) -> Call | None:
        """Return a module by its name; None for one that is not of the model."""
        outer = self.innermost
        if id(module) not in self._calls and outer is not None:  # made after the names were taken
            self.names.add(module, join(outer.name, getattr(module, "name", type(module).__name__)))
        elif id(module) not in self._calls:
            self.names.of(module)
        return self._calls.get(id(module))

    @contextmanager
    def around(self, around: Around, in_graphs: bool) -> Iterator[None]:
        """Return a region in which every call of a module goes through a function.

        Args:
            around: The function.
            in_graphs: Calls in traces, too.
        """
        with ExitStack() as stack:
            for owner in self._owners():
                stack.enter_context(mock.patch.object(owner, "__call__", self._patched(owner, around, in_graphs)))
            yield

    def _owners(self) -> list[type]:
        """List the classes whose `__call__` modules are called by."""
        owners: list[type] = [keras.layers.Layer]
        if "tf_keras" in sys.modules:
            owners.append(sys.modules["tf_keras"].layers.Layer)
        if self._any:
            classes = _subclasses(tf.Module)
        else:
            classes = {kind for call in self._calls.values() for kind in type(call.module).__mro__}
        layers = tuple(owners)
        users = (kind for kind in classes if issubclass(kind, tf.Module) and not kind.__module__.startswith(_OWN))
        return owners + [kind for kind in users if "__call__" in vars(kind) and not issubclass(kind, layers)]

    def _patched(self, owner: type, around: Around, in_graphs: bool) -> Callable[..., Any]:
        native = owner.__call__

        @functools.wraps(native)
        @tf.autograph.experimental.do_not_convert
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            innermost = self.innermost
            skipped = not in_graphs and not tf.executing_eagerly()
            if skipped or (innermost is not None and innermost.module is module) or _is_symbolic((args, kwargs)):
                return native(module, *args, **kwargs)
            entered = self._find(module)
            if entered is None:
                return native(module, *args, **kwargs)
            self._stack.calls.append(entered)
            try:
                return around(entered, functools.partial(native, module), args, kwargs)
            finally:
                self._stack.calls.pop()

        return call


def _subclasses(base: type) -> set[type]:
    """Return a class and all that inherit from it, at whatever distance."""
    classes, waiting = set(), [base]
    while waiting:
        kind = waiting.pop()
        if kind not in classes:
            classes.add(kind)
            waiting += kind.__subclasses__()
    return classes


def _is_symbolic(tree: Any) -> bool:
    return any(isinstance(leaf, keras.KerasTensor) for leaf in tf.nest.flatten(tree))
