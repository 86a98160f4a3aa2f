"""Casting of Keras layers: a dtype policy whose compute dtype follows the session and its regions."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import keras
import tensorflow as tf
from keras.src.trainers.trainer import Trainer

from ampx.backend import CastPlan, map_leaves
from ampx.modules import listed
from ampx.policy import Dtype

from . import oplists, retracing

# Keras' policies with float32 variables: those of models that were made before `init`, or loaded.
_REPLACED: Final = ("float32", "mixed_float16", "mixed_bfloat16")
DTYPES: Final = {"float16": tf.float16, "bfloat16": tf.bfloat16, "float32": tf.float32}
LOW: Final = ("float16", "bfloat16")  # the low-precision ones


class _Session:
    """What `activate` switched on in this process, and the layers whose policies `prepare` replaced."""

    def __init__(self) -> None:
        self.dtype: Dtype | None = None
        self.prepared: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class _Before(threading.local):
    """The policy that Keras had in a thread before: it keeps its own by thread."""

    policies: tuple[Any, ...] = ()
    switched: int = 0  # how often a session began or ended in the thread


_session = _Session()
_added: Final = Trainer._aggregate_additional_loss
_before = _Before()
_regions: Final[dict[int, tuple[weakref.ref[Region], ...]]] = {}  # by thread, the innermost last


@retracing.decided_by
def compute_dtype() -> Dtype:
    """Return the dtype in which layers compute in the calling thread now."""
    if _regions:
        region = _innermost(threading.get_ident()) or _innermost(retracing.launcher() or 0)
        if region is not None:
            return region.dtype
    return _session.dtype or "float32"


class AmpPolicy(keras.DTypePolicy):
    """Float32 variables, and computation in whatever dtype the session and its regions say at the moment.

    Its name is that of Keras' own policy, as which it is saved.
    """

    @property
    def compute_dtype(self) -> Dtype:
        """The dtype of the moment."""
        retracing.depend()
        return compute_dtype()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Keras' own class: saved models then hold its policy, and load where there is no ampx."""
        return keras.DTypePolicy


def policy_for(dtype: Dtype) -> AmpPolicy:
    """Return a policy for new layers."""
    return AmpPolicy("float32" if dtype == "float32" else f"mixed_{dtype}")


class Region:
    """Layers compute in one dtype inside, in the calling thread. Nothing but its `with` statement keeps it alive.

    A Ctrl-C may interrupt the exit at any line; a region that has ended with its statement does not count even so.
    """

    def __init__(self, dtype: Dtype) -> None:
        self.dtype: Final = dtype  # in which layers compute

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        outer = _regions.get(self._thread)
        self._outer = tuple(entry for entry in outer if entry() is not None) if outer else ()
        _regions[self._thread] = (*self._outer, weakref.ref(self))

    def __exit__(self, *error: object) -> None:
        _regions[self._thread] = self._outer  # first, and before any call: a traceback that is kept keeps regions alive
        if not self._outer:
            _regions.pop(self._thread, None)


@contextmanager
def policy_region(policy: Any, get: Callable[[], Any], set: Callable[[Any], None]) -> Iterator[None]:
    """Return a region in which new layers get a policy; `get` and `set` are Keras' functions for the global one.

    The policy before is put back, unless `init` or `shutdown` have decided anew inside.
    """
    before, switched = get(), _before.switched
    try:
        try:
            set(policy)
            yield
        except GeneratorExit:  # nobody left it, after a Ctrl-C, and regions around it may be over
            before = before if get() is policy else get()
            raise
        finally:
            if _before.switched == switched:
                set(before)
    finally:
        if _before.switched == switched:
            set(before)  # again: the first may have been interrupted


@contextmanager
def both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    """Return a region inside two."""
    with first, second:
        yield


def _innermost(thread: int) -> Region | None:
    regions = (entry() for entry in reversed(_regions.get(thread, ())))
    return next((region for region in regions if region is not None), None)


def region(plan: CastPlan, enabled: bool) -> AbstractContextManager[Any]:
    """Return a region with casting on or off; layers that are made inside one with casting on follow later ones."""
    if not enabled or plan.level != "O1":  # beyond O1 it is the variables that are low precision
        return off()
    if oplists.operations(plan):
        return Region(plan.dtype)
    policy = policy_region(policy_for(plan.dtype), keras.config.dtype_policy, keras.config.set_dtype_policy)
    return both(policy, Region(plan.dtype))


def off() -> Region:
    """Return a region with casting off, whatever the plan."""
    return Region("float32")


def activate(plan: CastPlan) -> None:
    """Switch casting on in the process, and for new layers in the calling thread."""
    _regions.pop(threading.get_ident(), None)
    _before.switched += 1
    # Native defect: what a layer adds to the loss in low precision, Keras cannot add to one in float32, and raises.
    Trainer._aggregate_additional_loss = _added_in_float32
    if plan.level == "O1":  # beyond, `prepare` makes layers low precision
        _session.dtype = plan.dtype
    oplists.warn_of_layers(plan)
    enter_thread(plan)


@functools.wraps(_added)
def _added_in_float32(self: Any, loss: Any) -> Any:
    """Return the sum of what a layer added to the loss: a penalty of its outputs, or what `add_loss` got."""
    low = keras.ops.is_tensor(loss) and keras.backend.standardize_dtype(loss.dtype) in LOW
    return _added(self, keras.ops.cast(loss, "float32") if low else loss)


def enter_thread(plan: CastPlan) -> None:
    """Let new layers of the calling thread cast: Keras keeps the policy for them by thread."""
    if plan.level != "O1" or oplists.operations(plan):
        return
    if not _before.policies:
        _before.policies = (keras.config.dtype_policy(),)
    keras.config.set_dtype_policy(policy_for(plan.dtype))


def deactivate() -> None:
    """Undo `activate` and `prepare`."""
    _regions.pop(threading.get_ident(), None)
    _before.switched += 1
    Trainer._aggregate_additional_loss = _added
    _session.dtype = None
    if _before.policies:
        (policy,), _before.policies = _before.policies, ()
        keras.config.set_dtype_policy(policy)
    restore()


def restore() -> None:
    """Put the policies back that `prepare` changed."""
    for layer, policy in list(_session.prepared.items()):
        layer.dtype_policy = policy
    _session.prepared.clear()


def prepare(model: Any, plan: CastPlan) -> Any:
    """Let the layers of a model that was made before `init`, or of a list of them, cast, in place; return the model.

    Layers in low precision altogether, quantized layers and layers with other policies keep them. What `allow` and
    `deny` name computes in the dtype of the plan, or in float32, with all inside; what is denied stays so.

    Raises:
        InvalidOptionError: It is no model or layer of Keras.
        UnsupportedOpError: A pattern matches no layer, or `allow` and `deny` name operations.
    """
    models = listed(model, keras.layers.Layer, "model", "a model or layer of Keras, a tf.function")
    forced = {key: dtype for each in models for key, dtype in oplists.forced_layers(each, plan).items()}
    for layer in (layer for each in models for layer in each._flatten_layers()):
        _prepare_layer(layer, plan, forced.get(id(layer)))
    return model


def _prepare_layer(layer: Any, plan: CastPlan, forced: str | None) -> None:
    policy = layer.dtype_policy
    if type(policy) is keras.DTypePolicy and policy.name in _REPLACED:
        _session.prepared[layer] = policy
        layer.dtype_policy = policy_for(plan.dtype)
    if forced is not None and policy.quantization_mode is None:
        _session.prepared.setdefault(layer, policy)
        layer.dtype_policy = keras.DTypePolicy("float32") if forced == "float32" else policy_for(plan.dtype)
    forget_functions(layer)


def forget_functions(layer: Any) -> None:
    """Have a model build its functions for fit, evaluate and predict anew."""
    if isinstance(layer, keras.Model):
        layer.train_function = layer.test_function = layer.predict_function = None


def cast(tree: Any, dtype: Dtype) -> Any:
    """Cast the floating tensors of a tree, keeping its shape and types; the rest is returned as it is."""
    wanted = DTYPES[dtype]

    def cast_leaf(leaf: Any) -> Any:
        casts = tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable) and leaf.dtype.is_floating
        return tf.cast(leaf, wanted) if casts and leaf.dtype != wanted else leaf

    return map_leaves(tree, cast_leaf)


def widest(tree: Any, at_least: Dtype) -> Dtype:
    """Return float32 if any floating tensor of a tree is wider than `at_least`."""
    dtypes = {leaf.dtype for leaf in tf.nest.flatten(tree) if tf.is_tensor(leaf) and leaf.dtype.is_floating}
    return at_least if dtypes <= {DTYPES[at_least]} else "float32"
