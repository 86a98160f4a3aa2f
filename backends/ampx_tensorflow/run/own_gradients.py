"""Gradient functions of the script's own, as `tf.custom_gradient` takes them: they see unscaled gradients.

What such a function does with a gradient (clips it, compares it with a bound) holds for unscaled gradients, and whether
it is linear cannot be seen from outside. So the loss scale is divided out before it is called, and what it returns is
multiplied again. Those of libraries stay as they are.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.ops import control_flow_v2_func_graphs as func_graphs, custom_gradient, script_ops
from tensorflow.python.saved_model import save

from ampx.callers import is_script_function
from ampx.run import Manager, patched
from ampx_tensorflow import gradients
from ampx_tensorflow.numerics import stats

# Of loops and branches, and of their gradients.
_BODIES: Final = (func_graphs.CondBranchFuncGraph, func_graphs.WhileBodyFuncGraph, func_graphs.WhileCondFuncGraph)


class _Backwards(threading.local):
    """The scales of the backwards that the calling thread is in, the innermost last."""

    carried: tuple[Any, ...] = ()


class OwnGradients:
    """Knows the scale of the backward that is under way, wherever a gradient function runs.

    TensorFlow differentiates a `tf.function` in a trace of its own, often before anybody asks for a gradient, and uses
    that trace for many backwards. So the scale is in a variable, which is 1 where no scaled backward is under way.
    """

    def __init__(self, manager: Manager[Any]) -> None:
        self._manager: Final = manager
        self._on = True
        self._there = False  # whether the script has called such a function
        self._backwards = _Backwards()
        self._variable: Any = None

    def stop(self) -> None:
        """Leave alone what was registered, which stays with TensorFlow."""
        self._on = False

    def carry(self, scale: Any, differentiate: Callable[[], Any]) -> Any:
        """Return the gradients that a function computes, which carry a scale: gradient functions know it inside."""
        if not self._there:
            return differentiate()
        before = self._backwards.carried
        self._backwards.carried = (*before, scale)
        try:
            # Beside the order of operations on the variable: Python that the graph calls reads it, too.
            with tf.control_dependencies(self._tell(scale)):
                result = differentiate()
            with tf.control_dependencies([leaf for leaf in tf.nest.flatten(result) if isinstance(leaf, tf.Tensor)]):
                self._tell(before[-1] if before else 1.0)
            return result
        finally:
            self._backwards.carried = before

    def _tell(self, scale: Any) -> list[Any]:
        if not tf.compat.v1.executing_eagerly_outside_functions():
            return []
        assigned = self._own_variable().assign(tf.cast(scale, tf.float32))
        return [] if tf.executing_eagerly() else [assigned]

    def _own_variable(self) -> Any:
        if self._variable is None:
            # In a thread of its own, as `VariableLedger.other` does, and for no strategy.
            with ThreadPoolExecutor(1) as pool:
                self._variable = pool.submit(tf.Variable, 1.0, trainable=False).result()
        return self._variable

    def _scale(self) -> Any:
        """Return the scale that the gradients of the moment carry; None where they are unscaled."""
        manager = self._manager
        if not self._on or manager.stood_down or manager.script_code.runs or not manager.scales:
            return None
        if not tf.compat.v1.executing_eagerly_outside_functions():  # such a graph is differentiated in itself
            return self._backwards.carried[-1] if self._backwards.carried else None
        if tf.executing_eagerly():
            return tf.convert_to_tensor(self._own_variable())
        graph = tf.compat.v1.get_default_graph()
        while isinstance(graph, _BODIES):  # the gradient of a body takes no variable that the body has not
            graph = graph.outer_graph
        with graph.as_default():
            return tf.convert_to_tensor(self._own_variable())

    # -- gradient functions ------------------------------------------------------------------------

    def true(self, function: Callable[..., Any], low: Callable[[], None] = lambda: None) -> Callable[..., Any]:
        """Return a gradient function that gets unscaled gradients, and whose result is scaled as the incoming ones are.

        Args:
            function: Takes gradients, and perhaps an operation before them and keywords after them.
            low: Is called before a float16 gradient would be divided.
        """

        @functools.wraps(function)
        def called(*passed: Any, **keywords: Any) -> Any:
            with stats.unwatched():
                scale = self._scale()
            if scale is None:
                return function(*passed, **keywords)
            if any(tf.is_tensor(each) and each.dtype == tf.float16 for each in passed):
                low()
            return self._manager.script_code.call(
                functools.partial(function, **keywords),
                passed,
                lambda gradient: _divided(gradient, scale),
                lambda result, _: _multiplied(result, scale),
            )

        called.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # TensorFlow looks for `variables`
        return called

    def deriving(self, native: Callable[..., Any]) -> Callable[..., Any]:
        """Return how `tf.custom_gradient` calls a function, in float32 where the script wrote it and losses are scaled.

        In float16 the gradients would be too small for it once they are divided.
        """

        @functools.wraps(native)
        def call(function: Any, args: Any, kwargs: Any) -> Any:
            if not self._on or self._manager.stood_down or not is_script_function(function):
                return native(function, args, kwargs)
            self._there = True

            @functools.wraps(function)
            def forward(*args: Any, **kwargs: Any) -> Any:
                result, gradient = function(*args, **kwargs)
                return result, self.true(gradient)

            low = _common_dtype([args, kwargs]) if self._manager.scales else None
            if low not in gradients.LOW:
                return native(forward, args, kwargs)
            args, kwargs = _cast([args, kwargs], low, tf.float32)
            return _cast(native(forward, args, kwargs), tf.float32, low)

        return call

    def registering(self, native: Callable[..., Any]) -> Callable[..., Any]:
        """Return how `tf.RegisterGradient` registers a function."""

        @functools.wraps(native)
        def register(decorator: Any, function: Any) -> Any:
            saved = function.__module__.startswith("tensorflow.python.saved_model")  # whose it was is not known
            if not (saved or is_script_function(function)):
                return native(decorator, function)
            self._there = True
            native(decorator, self.true(function, self._refuse_float16))
            return function

        return register

    def calling_python(self, native: Callable[..., Any]) -> Callable[..., Any]:
        """Return how `tf.py_function` makes an operation; what the function derives is known when it runs only."""

        @functools.wraps(native)
        def make(*args: Any, **kwargs: Any) -> Any:
            self._there = True
            return native(*args, **kwargs)

        return make

    def saving(self, native: Callable[..., Any]) -> Callable[..., Any]:
        """Return how a SavedModel takes gradient functions: as they are, for it knows no variable of this run."""

        @functools.wraps(native)
        def trace(*args: Any, **kwargs: Any) -> Any:
            with self._manager.script_code.switched(True):
                return native(*args, **kwargs)

        return trace

    def _refuse_float16(self) -> None:
        self._manager.run.refuse(
            "a gradient function of tf.RegisterGradient gets float16 gradients, too small for float16 once the loss "
            "scale is divided out; accepted: functions that get float32. Cast the operand to float32 before that "
            "operation, write the function with tf.custom_gradient, or run with --dtype bfloat16"
        )


@contextmanager
def own_gradients_true(own: OwnGradients) -> Iterator[None]:
    """Patch how functions with a gradient of their own are called, and registered."""
    try:
        with patched(
            (custom_gradient, "_eager_mode_decorator", own.deriving),
            (custom_gradient, "_graph_mode_decorator", own.deriving),
            (tf.RegisterGradient, "__call__", own.registering),
            (script_ops, "_internal_py_func", own.calling_python),
            (save, "_trace_gradient_functions", own.saving),
        ):
            yield
    finally:
        own.stop()


def _divided(value: Any, scale: Any) -> Any:
    """Return a gradient divided, dense or sparse; what is none stays."""
    if not isinstance(value, (tf.Tensor, tf.Variable, tf.IndexedSlices)):
        return value
    with stats.unwatched():
        return gradients.unscale([tf.convert_to_tensor(value) if isinstance(value, tf.Variable) else value], scale)[0]


def _multiplied(tree: Any, scale: Any) -> Any:
    """Return the gradients in a tree times the scale. They are not multiplied: see `gradients.unscale`."""
    with stats.unwatched():
        inverse = 1.0 / scale
    return tf.nest.map_structure(lambda value: _divided(value, inverse), tree)


def _common_dtype(tree: Any) -> Any:
    """Return the one dtype of all floating tensors of a tree; None where there are several, or none."""
    dtypes = {leaf.dtype for leaf in tf.nest.flatten(tree) if tf.is_tensor(leaf) and leaf.dtype.is_floating}
    return dtypes.pop() if len(dtypes) == 1 else None


def _cast(tree: Any, before: Any, after: Any) -> Any:
    """Return a tree with the tensors of one dtype cast to another."""

    def cast(leaf: Any) -> Any:
        return tf.cast(leaf, after) if tf.is_tensor(leaf) and leaf.dtype == before else leaf

    return tf.nest.map_structure(cast, tree)
