"""Compute named modules in a dtype of their own: layers by dtype policies, other modules by what they receive.

A policy is set as long as the region lasts. Functions are traced anew inside, since a trace keeps the dtypes that it
was made in.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Final

import keras
import tensorflow as tf

from ampx.errors import UnsupportedDtypeError
from ampx.formats import find_digits, to_digits
from ampx.modules import check_patterns, forced_dtype, last_match, unmatched
from ampx.policy import Dtype
from ampx_tensorflow import casting, devices, products, retracing
from ampx_tensorflow.names import Call, Modules

# Dtypes to which values are rounded.
SIMULATED: Final = {
    "float8_e4m3": tf.dtypes.experimental.float8_e4m3fn,
    "float8_e5m2": tf.dtypes.experimental.float8_e5m2,
}
# Layers whose policy a region has set, by the number of such regions.
_forced: Final[weakref.WeakKeyDictionary[Any, int]] = weakref.WeakKeyDictionary()
_regions: Final[list[object]] = []


class ForcedPolicy(keras.DTypePolicy):
    """Computation in one dtype, whatever the session and its regions say; variables as they are."""

    def __init__(self, dtype: Dtype, variables: str) -> None:
        super().__init__("float32" if dtype == "float32" else f"mixed_{dtype}")
        self._forced: Final = dtype, variables

    @property
    def compute_dtype(self) -> str:
        """The dtype that was forced."""
        return self._forced[0]

    @property
    def variable_dtype(self) -> str:
        """The dtype of the variables that there are."""
        return self._forced[1]


class Policies:
    """Policies of layers that are set for a while."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, Any]] = []

    def set(self, layer: Any, dtype: Dtype) -> None:
        """Let a layer compute in a dtype."""
        before = layer._dtype_policy
        if layer.quantization_mode is not None or before.compute_dtype is None:
            return
        self._before.append((layer, before))
        _forced[layer] = _forced.get(layer, 0) + 1
        layer._dtype_policy = ForcedPolicy(dtype, layer.variable_dtype)

    def restore(self) -> None:
        """Leave all layers as they were."""
        for layer, before in reversed(self._before):
            layer._dtype_policy = before
            _forced[layer] -= 1
            if not _forced[layer]:
                del _forced[layer]
        self._before.clear()


def is_active() -> bool:
    """Return whether some region forces modules."""
    return bool(_regions)


def is_forced(layer: Any) -> bool:
    """Return whether a region has set the policy of a layer."""
    return layer in _forced


class _Innermost(threading.local):
    """The dtype of products in the innermost forced module that is no layer; None in a layer."""

    dtype: Dtype | None = None


class Forcing:
    """What one region forces."""

    def __init__(self, modules: Modules, dtypes: Mapping[str, str]) -> None:
        self.modules: Final = modules
        self.policies: Final = Policies()
        self._dtypes: Final = dict(dtypes)
        self._innermost = _Innermost()
        modules.on_root = self.assign

    def of(self, module: Any) -> str | None:
        """Return the dtype of a module; None where nothing forces it."""
        return self.modules.names.dtype(module, partial(forced_dtype, dtypes=self._dtypes))

    def assign(self, calls: list[Call]) -> None:
        """Set the policies of layers."""
        for call in calls:
            dtype = self.of(call.module)
            if dtype is not None and not rounds(dtype) and isinstance(call.module, keras.layers.Layer):
                self.policies.set(call.module, dtype)  # type: ignore[arg-type]

    def around(self, call: Call, native: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module in its dtype."""
        dtype = self.of(call.module)
        if dtype is None:
            return native(*args, **kwargs)
        if rounds(dtype):
            args, kwargs = _rounded((args, kwargs), dtype, gradients=False)
            return _rounded(native(*args, **kwargs), dtype, gradients=True)
        is_layer = isinstance(call.module, keras.layers.Layer)
        own = partial(last_match, dtypes=self._dtypes)
        if not is_layer and dtype == "float32" and self.modules.names.dtype(call.module, own) is not None:
            args, kwargs = casting.cast((args, kwargs), "float32")
        before = self._innermost.dtype
        self._innermost.dtype = None if is_layer else dtype  # type: ignore[assignment]
        try:
            with casting.Region(dtype):  # type: ignore[arg-type]
                return native(*args, **kwargs)
        finally:
            self._innermost.dtype = before

    @contextmanager
    def products(self) -> Iterator[None]:
        """Return a region in which products in forced modules that are no layers are cast."""
        with products.cast(lambda: self._innermost.dtype or "float32"):
            yield

    def unmatched(self) -> list[str]:
        """List the patterns that matched no module so far."""
        return unmatched(self._dtypes, list(self.modules.names))

    @property
    def is_low(self) -> bool:
        """Whether some dtype is low precision that computes."""
        return any(dtype in casting.LOW for dtype in self._dtypes.values())


def rounds(dtype: str) -> bool:
    """Return whether values are rounded to a dtype or to its digits, and not computed in it."""
    return dtype in SIMULATED or find_digits(dtype) is not None


def _rounded(tree: Any, dtype: str, gradients: bool) -> Any:
    """Round the floating tensors of a tree to a dtype, and keep the one they have.

    Args:
        tree: Tensors in any structure.
        dtype: Of `SIMULATED`.
        gradients: Round their gradients, too.
    """
    bits = find_digits(dtype)

    def nearest(value: Any) -> Any:
        if bits is not None:
            result = tf.cast(to_digits(tf.cast(value, tf.float32), bits), value.dtype)
            return tf.where(tf.math.is_finite(result), result, value)
        return tf.cast(tf.cast(tf.cast(value, tf.float32), SIMULATED[dtype]), value.dtype)

    @tf.custom_gradient
    def rounding(value: Any) -> Any:
        return nearest(value), nearest if gradients else lambda upstream: upstream

    def visit(leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor) or not leaf.dtype.is_floating:
            return leaf
        result = rounding(leaf)
        mask = getattr(leaf, "_keras_mask", None)
        if mask is not None:
            result._keras_mask = mask
        return result

    return tf.nest.map_structure(visit, tree)


def check_dtypes(dtypes: Mapping[str, str]) -> None:
    """Raise for a dtype that can neither be computed nor simulated.

    Raises:
        UnsupportedDtypeError: There is one.
    """
    device = devices.describe("auto")
    accepted = ["float32", *sorted(device.native | device.emulated), *SIMULATED]
    for pattern, dtype in dtypes.items():
        if dtype not in accepted and not rounds(dtype):
            raise UnsupportedDtypeError(
                f"force got {dtype!r} for {pattern!r}, which TensorFlow can neither compute on {device.name!r} nor "
                f"simulate; accepted: {', '.join(accepted)}. Choose one of these."
            )


@contextmanager
def force(model: Any | None, dtypes: Mapping[str, str]) -> Iterator[Forcing]:
    """Compute named modules in dtypes of their own: see `Probe.force`.

    Of a `tf.Module` that is no layer, low precision is that of its products, as under `ampx run`: results are float32
    again, as the variables are.
    """
    check_dtypes(dtypes)
    modules = Modules(model)
    if model is not None:
        check_patterns("force", dtypes, list(modules.names))
    forcing = Forcing(modules, dtypes)
    with ExitStack() as stack:
        stack.callback(forcing.policies.restore)
        _regions.append(forcing)
        stack.callback(_regions.remove, forcing)
        modules.start()
        stack.enter_context(retracing.anew())
        stack.enter_context(modules.around(forcing.around, in_graphs=True))
        stack.enter_context(forcing.products() if forcing.is_low else nullcontext())
        yield forcing
