"""Casting of plain functions: TensorFlow's own graph rewriter, for single calls or for the whole process.

Switched on for the process it would also cast what asked for float32, such as a layer with `dtype="float32"` inside
any `tf.function`; so it acts on functions that were given to `ampx.prepare`, and on the whole process only where that
was asked for: see `requested`.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import Any, Final
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers import trainer as keras_trainer
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig
from tensorflow.python.client.session import BaseSession

from ampx.backend import CastPlan
from ampx.errors import ProtocolError, UnsupportedByBackendError
from ampx.policy import Dtype

from . import oplists
from .casting import compute_dtype

# Dtype → the rewriter's option, and what it rounds 1 + 2**-9 + 2**-13 to: float16 keeps ten bits, bfloat16 seven.
_OPTIONS: Final[dict[Dtype, tuple[str, float]]] = {
    "bfloat16": ("auto_mixed_precision_onednn_bfloat16", 1.0),
    "float16": ("auto_mixed_precision", 1.0 + 2.0**-9),
}
# The options are the process's: one prepared function sets them at a time.
_lock = threading.RLock()


@dataclass(frozen=True)
class GraphPlan(CastPlan):
    """Casting by the graph rewriter: of every `tf.function` and of every session of TensorFlow 1."""


class _Request(threading.local):
    """Whether the session that is being started is to cast graphs."""

    graphs = False


_request: Final = _Request()


@contextmanager
def requested() -> Iterator[None]:
    """Return a region in which `ampx.init` starts sessions that cast graphs instead of layers."""
    before, _request.graphs = _request.graphs, True
    try:
        yield
    finally:
        _request.graphs = before


def check_plan(plan: CastPlan) -> CastPlan:
    """Return the plan of a session that is being started; raise where the rewriter casts nothing on the device.

    Sync: one, the first time.
    """
    if not _request.graphs:
        return plan
    check(plan)
    return GraphPlan(**{field.name: getattr(plan, field.name) for field in fields(CastPlan)})


def mixed_policy() -> str:
    """Return which Keras has a global policy that casts, and which one, as "Keras is 'mixed_float16'"; "" for none."""
    policies = {"Keras": keras.config.dtype_policy()}
    if "tf_keras" in sys.modules:
        policies["tf_keras"] = sys.modules["tf_keras"].mixed_precision.global_policy()
    casting = (f"{name} is {policy.name!r}" for name, policy in policies.items() if policy.name.startswith("mixed_"))
    return next(casting, "")


def is_function(candidate: object) -> bool:
    """Return whether this is a `tf.function`."""
    return isinstance(candidate, tf.types.experimental.PolymorphicFunction)


def prepare(function: Any, plan: CastPlan) -> PreparedFunction:
    """Return a `tf.function` that the rewriter casts; raise where it does not here. Sync: one, the first time."""
    if getattr(function, "_jit_compile", False):
        raise UnsupportedByBackendError(
            "prepare got a tf.function with jit_compile=True, which TensorFlow's rewriter does not see; accepted: "
            "functions without it. Leave jit_compile out, or cast inside the function with ampx.half_function."
        )
    _option(plan.device, plan.dtype)
    if not isinstance(plan, oplists.ListsPlan) or not plan.operations:
        return PreparedFunction(function, plan.device)
    plan.waiting.clear()
    # TensorFlow keeps what a function was rewritten to: that of other lists would stay.
    return PreparedFunction(function._clone(None), plan.device, plan)


def check(plan: CastPlan) -> None:
    """Try whether the rewriter casts as a plan says, and raise where it does not. Sync: one, the first time."""
    _option(plan.device, plan.dtype)


def casts(plan: CastPlan) -> bool:
    """Return whether the rewriter casts as a plan says; it is tried. Sync: one, the first time."""
    try:
        check(plan)
    except UnsupportedByBackendError:
        return False
    return True


def _option(device: str, dtype: Dtype) -> str:
    option = _OPTIONS[dtype][0]
    if dtype == "bfloat16" and device.startswith("gpu"):
        raise UnsupportedByBackendError(
            "graphs were to be computed in bfloat16 on a GPU, where TensorFlow's rewriter casts them to float16 only; "
            "accepted: dtype='float16', or Keras layers, which compute in bfloat16 on GPUs by their dtype policies. "
            "Choose dtype='float16', or cast inside the function with ampx.half_function."
        )
    if not _works(device, dtype):
        other = next(name for name in _OPTIONS if name != dtype)
        works = not (other == "bfloat16" and device.startswith("gpu")) and _works(device, other)
        raise UnsupportedByBackendError(
            f"graphs were to be computed in {dtype} on {device!r}, where TensorFlow's rewriter casts nothing (it was "
            f"tried); accepted there: {other if works else 'no dtype'}. "
            f"{f'Choose dtype={other!r}' if works else 'Use Keras layers that compile and fit'}, or cast inside the "
            f"function with ampx.half_function."
        )
    return option


@functools.cache
def _works(device: str, dtype: Dtype) -> bool:
    """Try whether a product is rounded as the dtype does; in a session, which graph mode has too."""
    option, rounded = _OPTIONS[dtype]
    v1 = tf.compat.v1
    with tf.Graph().as_default(), tf.device(device.upper()):
        values, eye = v1.placeholder(tf.float32, [64, 64]), v1.placeholder(tf.float32, [64, 64])
        product = tf.matmul(tf.nn.relu(values), eye) + 0.0
        with v1.Session(config=_with_option(v1.ConfigProto(), option)) as session:
            fed = {values: np.full((64, 64), 1.0 + 2.0**-9 + 2.0**-13), eye: np.eye(64)}
            return float(session.run(product, fed)[0, 0]) == rounded


def _with_option(config: Any, option: str) -> Any:
    """Return a copy of a session's configuration with an option on, unless it is off there."""
    switched = type(config)()
    switched.CopyFrom(config)
    options = switched.graph_options.rewrite_options
    if getattr(options, option) != RewriterConfig.OFF:
        setattr(options, option, RewriterConfig.ON)
    return switched


class ProcessSwitch:
    """The rewriter for the whole process: `tf.function`s, sessions, and models that Keras compiles."""

    def __init__(self) -> None:
        self._undo: ExitStack | None = None

    @property
    def is_on(self) -> bool:
        """Whether it is on."""
        return self._undo is not None

    def on(self, plan: CastPlan) -> None:
        """Switch it on. Sync: one, the first time."""
        self.off()
        option = _option(plan.device, plan.dtype)
        before = bool(tf.config.optimizer.get_experimental_options().get(option, False))
        make = BaseSession.__init__

        @functools.wraps(make)
        def make_with_option(self: Any, target: Any = "", graph: Any = None, config: Any = None) -> None:
            make(self, target, graph, config if config is None else _with_option(config, option))

        with ExitStack() as undo:
            undo.callback(tf.config.optimizer.set_experimental_options, {option: before})
            tf.config.optimizer.set_experimental_options({option: True})
            # Native defect: a session with a configuration of its own takes nothing of the process's.
            undo.enter_context(mock.patch.object(BaseSession, "__init__", make_with_option))
            # Keras compiles with XLA on a GPU unless told otherwise, and XLA's graphs are not rewritten.
            undo.enter_context(mock.patch.object(keras_trainer, "model_supports_jit", return_value=False))
            self._undo = undo.pop_all()

    def off(self) -> None:
        """Leave everything as it was before `on`."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo.close()


process: Final = ProcessSwitch()


@contextmanager
def _switched(option: str) -> Iterator[None]:
    """Return a region with one of the rewriter's options on; before and after, the options are the same."""
    with _lock:
        before = bool(tf.config.optimizer.get_experimental_options().get(option, False))
        try:
            tf.config.optimizer.set_experimental_options({option: True})
            yield
        finally:
            tf.config.optimizer.set_experimental_options({option: before})


class PreparedFunction:
    """A `tf.function` whose products are cast while the session, and the region of the call, cast.

    Everything but calling it is the function's own.
    """

    def __init__(self, function: Any, device: str, plan: oplists.ListsPlan | None = None) -> None:
        self.function = function
        self._device = device
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "function" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.function, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, with the rewriter on where casting is.

        Raises:
            ProtocolError: It is called while another function is traced, which the rewriter would not follow.
            UnsupportedByBackendError: The region asks for a dtype that the rewriter does not know here.

        Sync: as the function.
        """
        dtype = compute_dtype()
        if dtype == "float32":
            return self.function(*args, **kwargs)
        if tf.inside_function():
            raise ProtocolError(
                "a prepared function was called while another tf.function is traced, where casting is decided by the "
                "outer one; accepted: calling it directly. Give the outer function to ampx.prepare instead."
            )
        lists = {} if self._plan is None else self._plan.environment()
        with _switched(_option(self._device, dtype)), oplists.environment(lists):
            return self.function(*args, **kwargs)
