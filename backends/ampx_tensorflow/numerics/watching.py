"""Read the outputs of layers and operations, and the gradients of outputs.

TensorFlow's own op callbacks (what `tf.debugging.enable_check_numerics` stands on) see operations; of a backward pass
they do not tell where the operation came from. The function that TensorFlow calls for the gradient of an operation
does: it gets tensors of the forward pass, which were noted there.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import backprop, record
from tensorflow.python.framework import op_callbacks

from ampx.callers import script_line
from ampx.modules import check_patterns
from ampx.numerics.probe import Direction, Watching
from ampx.numerics.watching import Watcher, Where
from ampx_tensorflow.names import Call, Modules

from . import stats

# Operations of the runtime, and those that bring a batch from a pipeline: what is in it was not computed there.
_BRINGS: Final = ("__", "Iterator", "Optional")


@dataclass(frozen=True)
class _Origin:
    """Where an operation of the forward pass ran."""

    inputs: tuple[Any, ...]
    call: Call | None
    place: str


class _Place(threading.local):
    """Where the calling thread is in a backward pass.

    Attributes:
        depth: In how many `GradientTape.gradient`.
        module: The module whose operations are differentiated, as far as is known.
        origin: The line of the operation that is differentiated; "" where that is not known.
    """

    depth = 0
    module: Call | None = None
    line = ""


class TensorFlowWatch(Watcher):
    """What a region sees: see `ampx.numerics.probe.Watch`."""

    def __init__(self, modules: Modules, watching: Watching) -> None:
        super().__init__(stats.TENSORS, watching)
        self.modules: Final = modules
        self._place = _Place()
        self._origins: dict[tuple[str, int, Any], list[_Origin]] = {}

    # -- modules -----------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait for GPUs."""
        if tf.config.list_logical_devices("GPU"):
            tf.test.experimental.sync_devices()

    def around(self, call: Call, native: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module, and read what it returns."""
        return self.read((call.name, call.kind), native, args, kwargs)

    def tapped(self, value: Any, where: Where) -> Any:
        """Return an output whose gradients are seen: the same values, under other names."""
        call = self.modules.innermost
        leaves = [leaf for leaf in tf.nest.flatten(value) if _is_tapped(leaf)]
        listeners = iter(self.listeners(where, leaves))

        def tap(leaf: Any) -> Any:
            if not _is_tapped(leaf):
                return leaf
            listen = next(listeners)

            @tf.custom_gradient
            def identity(value: Any) -> Any:
                def backward(upstream: Any) -> Any:
                    self._place.module, self._place.line = call, ""
                    tensors = stats.floating(upstream)
                    if tensors and tf.executing_eagerly():
                        listen(tensors[0])
                    return upstream

                return tf.identity(value), backward

            with stats.unwatched():
                tapped = identity(leaf)
            vars(tapped).update(vars(leaf))  # Keras hangs masks on tensors
            return tapped

        return tf.nest.map_structure(tap, value)

    # -- operations --------------------------------------------------------------------------------

    def operation(
        self, kind: Any, inputs: Any, attributes: Any, outputs: Any, op_name: Any = None, graph: Any = None
    ) -> None:
        """Note an operation that ran: a callback of TensorFlow."""
        if graph is not None or stats.is_unwatched():
            return
        name = kind.decode() if isinstance(kind, bytes) else str(kind)
        tensors, backward = stats.floating(list(outputs)), self._place.depth > 0
        if not tensors or name.startswith(_BRINGS):
            return
        with stats.unwatched():
            call = self._place.module if backward else self.modules.innermost
            if not self.watching.watches(call.name if call else ""):
                return
            line = self._place.line if backward else script_line()
            if not backward:
                self._remember(name, inputs, _Origin(tuple(map(_identity, inputs)), call, line))
            where = (call.name, call.kind) if call else ("", "")
            direction: Direction = "backward" if backward else "forward"
            self.note(where, name, direction, tensors, self.reduced(list(inputs)), line)

    def _remember(self, name: str, inputs: Sequence[Any], origin: _Origin) -> None:
        for position, value in enumerate(inputs):
            self._origins.setdefault((name, position, _identity(value)), []).append(origin)

    def differentiate(self, name: str, inputs: Sequence[Any]) -> None:
        """Note which operation's gradient is computed next.

        Args:
            name: The operation.
            inputs: What it received; None for what its gradient does not need.
        """
        kept = {position: _identity(value) for position, value in enumerate(inputs) if value is not None}
        for position, identity in kept.items():
            for origin in reversed(self._origins.get((name, position, identity), ())):
                if all(origin.inputs[other] == wanted for other, wanted in kept.items()):
                    self._place.module, self._place.line = origin.call, origin.place
                    return
        self._place.line = ""

    def recording(self, native: Callable[..., None]) -> Callable[..., None]:
        """Return TensorFlow's function that records a custom gradient, whose backward then knows where it came from."""

        @functools.wraps(native)
        def recorded(
            op_type: str, output_tensors: Any, input_tensors: Any, backward_function: Any, forward_function: Any = None
        ) -> None:
            operation = op_type, output_tensors, input_tensors
            if stats.is_unwatched():
                return native(*operation, backward_function, forward_function)
            call, line = self.modules.innermost, script_line()

            def located(*args: Any) -> Any:
                self._place.module, self._place.line = call, line
                return backward_function(*args)

            return native(*operation, located, forward_function)

        return recorded

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Note that a backward pass runs in this thread."""
        self._place.depth += 1
        try:
            yield
        finally:
            self._place.depth -= 1
            if not self._place.depth:
                self._place.module, self._place.line = None, ""


def _is_tapped(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating and record.should_record_backprop([leaf])


def _identity(value: Any) -> Any:
    return getattr(value, "_id", None)


_differentiating: Final[list[TensorFlowWatch]] = []


def _gradient_function(name: str, attributes: Any, count: int, inputs: Any, *rest: Any) -> Any:
    for watch in _differentiating:
        watch.differentiate(name, inputs or ())
    return backprop._gradient_function(name, attributes, count, inputs, *rest)


@contextmanager
def _operations_seen(watch: TensorFlowWatch) -> Iterator[None]:
    _differentiating.append(watch)
    pywrap_tfe.TFE_Py_RegisterGradientFunction(_gradient_function)
    op_callbacks.add_op_callback(watch.operation)
    try:
        with mock.patch.object(record, "record_operation", watch.recording(record.record_operation)):
            yield
    finally:
        op_callbacks.remove_op_callback(watch.operation)
        _differentiating.remove(watch)
        if not _differentiating:
            pywrap_tfe.TFE_Py_RegisterGradientFunction(backprop._gradient_function)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Return a region in which every `tf.function` runs as Python."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    # TensorFlow warns that pipelines of tf.data stay compiled, where there is nothing to see.
    warnings.filterwarnings("ignore", "Even though the `tf.config.experimental_run_functions_eagerly`")
    ours = warnings.filters[0]
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)
        if ours in warnings.filters:
            warnings.filters.remove(ours)  # type: ignore[attr-defined]


@contextmanager
def watch(model: Any | None, watching: Watching) -> Iterator[TensorFlowWatch]:
    """Read the modules of a model, or of every model that is called: see `Probe.watch`."""
    modules = Modules(model)
    if model is not None:
        check_patterns("watch", watching.modules, list(modules.names))
    watched = TensorFlowWatch(modules, watching)
    native = tf.GradientTape.gradient

    @functools.wraps(native)
    @tf.autograph.experimental.do_not_convert
    def gradient(self: Any, *args: Any, **kwargs: Any) -> Any:
        with watched.backward():
            return native(self, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(uncompiled())
        stack.enter_context(modules.around(watched.around, in_graphs=False))
        if watching.operations:
            stack.enter_context(mock.patch.object(tf.GradientTape, "gradient", gradient))
            stack.enter_context(_operations_seen(watched))
        yield watched
