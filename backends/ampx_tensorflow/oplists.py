"""The entries of `allow` and `deny`: layers by name or class, and operations that TensorFlow's graph rewriter knows.

Layers cast by dtype policies, which know nothing of the operations inside. So operations can be named for functions
only, which `prepare` has the rewriter cast: it reads changes of its lists from the environment. In a session that
names some, layers are not cast.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal
from unittest import mock

import keras
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from ampx.backend import CastPlan, is_module
from ampx.errors import PrecisionWarning, UnsupportedOpError, meant
from ampx.modules import check_patterns, inherited, last_match, module_dtypes

from . import names

Kind = Literal["allow", "deny"]
# Where the rewriter reads changes of its lists; an operation may stand in one of them only.
_LISTS: Final = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_{}LIST_{}"


@dataclass(frozen=True)
class ListsPlan(CastPlan):
    """A plan whose entries are resolved.

    Attributes:
        classes: Classes of layers, each with whether it is in `allow` or in `deny`.
        operations: Names of operations, each with the same.
        waiting: Entries that no `prepare` has looked up yet.
    """

    classes: tuple[tuple[type, Kind], ...] = ()
    operations: tuple[tuple[str, Kind], ...] = ()
    waiting: set[Any] = field(default_factory=set, compare=False)

    def environment(self) -> dict[str, str]:
        """Return what the rewriter is to read from the environment, behind what is there."""
        changes: dict[str, list[str]] = {}
        for name, kind in self.operations:
            added = "ALLOW" if kind == "allow" else "DENY"
            for each in ("ALLOW", "DENY", "INFER", "CLEAR"):
                changes.setdefault(_LISTS.format(each, "ADD" if each == added else "REMOVE"), []).append(name)
        return {
            variable: ",".join([*filter(None, [os.environ.get(variable)]), *names])
            for variable, names in changes.items()
        }

    def check_resolved(self) -> None:
        """Raise for entries that wait for `prepare`.

        Raises:
            UnsupportedOpError: There are some.
        """
        if self.waiting:
            names = sorted(repr(entry) if isinstance(entry, str) else entry.__name__ for entry in self.waiting)
            raise UnsupportedOpError(
                f"allow and deny name the layers {', '.join(names)}, and the optimizer was stepped before a model was "
                f"searched for them; accepted: layers that ampx.prepare(model) found. Call it before training, or "
                f"remove them."
            )


def resolve(plan: CastPlan) -> CastPlan:
    """Return a plan that says what every entry means.

    Raises:
        UnsupportedOpError: An entry means nothing here, or contradicts another.
    """
    if isinstance(plan, ListsPlan) or not (plan.allow or plan.deny):
        return plan
    classes: dict[Any, Kind] = {}
    operations: dict[Any, Kind] = {}
    lists: tuple[tuple[Kind, tuple[Any, ...]], ...] = (("allow", plan.allow), ("deny", plan.deny))
    for kind, entries in lists:
        for entry in entries:
            if is_module(entry):
                continue
            kinds = operations if isinstance(entry, str) else classes
            _check(kind, entry, plan)
            if kinds.setdefault(entry, kind) != kind:
                raise _refused(kind, entry, "it is in allow and in deny. Leave it in one of them")
    if operations and len(operations) < len({*plan.allow, *plan.deny}):
        raise UnsupportedOpError(
            f"allow and deny got operations ({', '.join(sorted(operations))}) and layers; accepted: one of both. "
            f"TensorFlow's graph rewriter casts operations of functions, and layers cast by policies that know none: "
            f"name the layers."
        )
    return ListsPlan(
        **{each.name: getattr(plan, each.name) for each in fields(CastPlan)},
        classes=tuple(classes.items()),
        operations=tuple(operations.items()),
        waiting={*plan.allow, *plan.deny},
    )


def _check(kind: Kind, entry: Any, plan: CastPlan) -> None:
    if isinstance(entry, str):
        if op_def_registry.get(entry) is None:
            why = f"it is no operation of TensorFlow.{meant(entry, dir(tf.raw_ops))}"
            raise _refused(kind, entry, f"{why} Write a layer's name as 'module:name'")
        if plan.level != "O1":
            raise _refused(kind, entry, f"level {plan.level} casts variables, not operations. Use level='O1'")
        return
    if not (isinstance(entry, type) and issubclass(entry, keras.layers.Layer)):
        raise _refused(kind, entry, "it is no class of layers. Pass one, such as keras.layers.Dense, or a name")
    if entry in (keras.layers.Layer, keras.Model, keras.Sequential):
        raise _refused(kind, entry, "every model is one. Name the classes you mean")


def _refused(kind: Kind, entry: Any, why: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"{kind} got {entry!r}, which cannot be honoured; accepted: 'module:pattern' with a pattern of names of "
        f"layers, classes of Keras 3 layers, and names of TensorFlow operations, such as 'MatMul', for functions: "
        f"{why}."
    )


def operations(plan: CastPlan) -> bool:
    """Return whether a plan names operations, so that functions are cast and layers are not."""
    return isinstance(plan, ListsPlan) and bool(plan.operations)


def warn_of_layers(plan: CastPlan) -> None:
    """Warn that a session which names operations casts no layers."""
    if operations(plan):
        warnings.warn(
            "allow and deny name operations, which layers of Keras know nothing of: in this session only functions "
            "that ampx.prepare is passed are cast, and layers compute in float32. To cast layers, name layers.",
            PrecisionWarning,
            stacklevel=5,
        )


def forced_layers(model: Any, plan: CastPlan) -> dict[int, str]:
    """Return the dtypes of layers that `allow` and `deny` name, and of all inside, by identity.

    A layer's own entry holds before that of a layer around it, and deny before allow.

    Raises:
        UnsupportedOpError: A pattern matches no layer, or the plan names operations.
    """
    if not isinstance(plan, ListsPlan):
        return {}
    if plan.operations:
        raise UnsupportedOpError(
            f"prepare got {type(model).__name__} in a session whose allow and deny name operations "
            f"({', '.join(name for name, _ in plan.operations)}); accepted: tf.functions there. Name layers in "
            f"ampx.init, as 'module:name' or by class."
        )
    layers, patterns = dict(names.walk(model)), module_dtypes(plan)
    check_patterns("prepare", patterns, list(layers))
    own = {}
    for name, layer in layers.items():
        dtypes = {last_match(name, patterns), *(_dtype(kind, plan) for c, kind in plan.classes if isinstance(layer, c))}
        if dtypes != {None}:
            own[name] = "float32" if "float32" in dtypes else plan.dtype
    plan.waiting.clear()
    held = {name: inherited(name, own.get) for name in layers}
    return {id(layers[name]): dtype for name, dtype in held.items() if dtype is not None}


def _dtype(kind: Kind, plan: CastPlan) -> str:
    return "float32" if kind == "deny" else plan.dtype


@contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Return a region in which the rewriter reads changes of its lists."""
    with ExitStack() as stack:
        if changes:
            stack.enter_context(mock.patch.dict(os.environ, changes))
        yield
