"""`enable_mixed_precision_graph_rewrite`: TensorFlow's graph rewriter for the whole process, and a loss scale.

TensorFlow still rewrites graphs but takes only optimizers of TensorFlow 1, and casts only on GPUs. Here the session of
ampx does it: its plan says that graphs are cast, so that whatever ends the session also switches the rewriter off.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

import ampx
from ampx.errors import AmpxWarning, InvalidOptionError, NotInitializedError, ProtocolError
from ampx.scale_state import LossScale
from ampx_tensorflow import rewrite
from ampx_tensorflow.keras3 import FORMER_INIT_SCALE


class _Request(threading.local):
    """The code that starts the session instead, if any."""

    start: Callable[[], Any] | None = None
    tell: Callable[[Any, str], None] | None = None


@dataclass
class _Started:
    """The session that `enable_mixed_precision_graph_rewrite` started."""

    session: weakref.ref[Any] | None = None


_request = _Request()
_started = _Started()


@contextmanager
def started_by(start: Callable[[], Any], tell: Callable[[Any, str], None]) -> Iterator[None]:
    """Return a region in which other code starts the session, and receives what `enable_...` wraps."""
    _request.start, _request.tell = start, tell
    try:
        yield
    finally:
        _request.start = _request.tell = None


def stand_alone() -> None:
    """Let `enable_...` start sessions of its own again inside `started_by`."""
    _request.start = _request.tell = None


def enable_mixed_precision_graph_rewrite(
    opt: Any, loss_scale: Any = "dynamic", *, dtype: Any = "auto", device: str = "auto"
) -> Any:
    """Cast every graph from now on, and give an optimizer that scales the loss.

    A session of ampx is started unless one that casts graphs, or casts nothing, is active.

    Args:
        opt: An optimizer of `tf.compat.v1.train`, Keras 3 or tf_keras.
        loss_scale: `"dynamic"` (starting at 2**15, as it used to), a number (static), a loss scale of
            `tf.compat.v1.mixed_precision`, or an `ampx.LossScale`.
        dtype: As in `ampx.init`.
        device: As in `ampx.init`.

    Raises:
        ProtocolError: Layers are cast already, by Keras' policy or a session of ampx.
        AlreadyWrappedError: The optimizer scales the loss itself.
        NotAnOptimizerError: It is none.
        InvalidOptionError: The loss scale is none.
        UnsupportedByBackendError: The rewriter casts nothing on this device.

    Sync: one, the first time.
    """
    config = read_loss_scale(loss_scale)
    if _request.start is not None and _request.tell is not None:
        wrapped = _request.start().wrap_optimizer(opt, loss_scale=config)
        _request.tell(wrapped, type(opt).__name__)
        return wrapped
    session = _active()
    if session is not None and session.casting is not None and not isinstance(session.casting, rewrite.GraphPlan):
        raise ProtocolError(
            "enable_mixed_precision_graph_rewrite was called in a session that casts layers; accepted: no session, or "
            "one with level='O0'. Give the optimizer to ampx.wrap_optimizer, or call ampx.shutdown() first."
        )
    policy = rewrite.mixed_policy()
    if session is None and policy:
        raise ProtocolError(
            f"enable_mixed_precision_graph_rewrite was called while the global policy of {policy}, which casts "
            f"already; accepted: one of both. Leave out set_global_policy, or use "
            f"keras.mixed_precision.LossScaleOptimizer for the loss scale."
        )
    if session is not None:
        return session.wrap_optimizer(opt, loss_scale=config)
    with rewrite.requested():
        session = ampx.init("tensorflow", dtype=dtype, device=device)
    try:
        wrapped = session.wrap_optimizer(opt, loss_scale=config)
    except BaseException:
        session.shutdown()
        raise
    _started.session = weakref.ref(session)
    return wrapped


def _active() -> ampx.Amp | None:
    try:
        return ampx.current("tensorflow")
    except NotInitializedError:
        return None


def disable_mixed_precision_graph_rewrite() -> None:
    """Cast no graphs from now on; optimizers go on to scale their loss. Sync: as `Amp.shutdown`."""
    if _request.start is not None:
        rewrite.process.off()
        return
    session = _active()
    started = None if _started.session is None else _started.session()
    _started.session = None
    if session is None or (session is not started and not isinstance(session.casting, rewrite.GraphPlan)):
        warnings.warn("disable_mixed_precision_graph_rewrite was called while nothing was enabled", AmpxWarning, 2)
        return
    session.shutdown()


def read_loss_scale(value: Any) -> LossScale:
    """Read a loss scale as the functions of TensorFlow and Keras 2 took it."""
    kinds = tf.compat.v1.mixed_precision
    if isinstance(value, str) and value == "dynamic":
        return LossScale(init_scale=FORMER_INIT_SCALE)
    if isinstance(value, kinds.DynamicLossScale):
        config = value.get_config()
        return LossScale(
            init_scale=float(config["initial_loss_scale"]),
            growth_interval=int(config["increment_period"]),
            growth_factor=float(config["multiplier"]),
            backoff_factor=1 / float(config["multiplier"]),
        )
    if isinstance(value, kinds.FixedLossScale):
        return LossScale.static(float(value.get_config()["loss_scale_value"]))
    if isinstance(value, kinds.LossScale):
        raise InvalidOptionError(
            f"loss_scale={value!r} is a loss scale of a class of its own; accepted: 'dynamic', a positive number, "
            f"DynamicLossScale, FixedLossScale or ampx.LossScale(...). Pass one of these."
        )
    return LossScale.parse(value)
