"""Keep raw optimizers from steps by mistake while gradients of `scale_loss` wait, and all from low precision.

Optimizers of Keras and TensorFlow have no hooks: the wrapped one's own method stands in the way on the object, and
the class keeps its. The wrapper calls that of the class.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import tensorflow as tf

from ampx.errors import LowPrecisionParametersError, RawStepError

from . import gradients


class Wrapper(Protocol):
    """What is asked of the optimizer that wraps a raw one."""

    @property
    def ampx_pending(self) -> bool:
        """Whether gradients of `scale_loss` wait for the step, as far as the caller's place can tell."""

    def ampx_assert_idle(self) -> list[Any]:
        """Return operations that fail in a function or graph where gradients wait when it runs."""


_watched: Final[weakref.WeakKeyDictionary[Any, tuple[weakref.ref[Any], str]]] = weakref.WeakKeyDictionary()


def watch(raw: Any, wrapper: Wrapper, method: str) -> None:
    """Let the method of a raw optimizer that applies gradients raise while its wrapper has gradients pending.

    Copies of the optimizer are not watched.
    """
    _watched[raw] = weakref.ref(wrapper), method
    vars(raw)[method] = types.MethodType(_guarded(getattr(type(raw), method)), raw)


def leave(raw: Any) -> None:
    """Leave a raw optimizer as it was before `watch`."""
    if raw in _watched:
        vars(raw).pop(_watched.pop(raw)[1], None)


def native(raw: Any, method: str) -> Callable[..., Any]:
    """Return the method as the raw optimizer's class has it, for the wrapper's own steps."""
    return functools.partial(getattr(type(raw), method), raw)


def refuse_low_precision(variables: Iterable[Any]) -> None:
    """Raise for variables in float16 or bfloat16, in which small updates would be lost."""
    low = [variable for variable in variables if tf.as_dtype(variable.dtype).base_dtype in gradients.LOW]
    if low:
        names = ", ".join(getattr(variable, "path", variable.name) for variable in low[:5])
        raise LowPrecisionParametersError(
            f"the optimizer was given {len(low)} low-precision variables ({names}); updates smaller than their "
            f"precision would be lost; accepted: float32, or variables with float32 masters. Keep the variables in "
            f"float32 and cast what is computed from them (policy 'mixed_float16', not 'float16'), or use "
            f"ampx.init(level='O2') and ampx.prepare(model, optimizer)."
        )


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    name = method.__name__

    @functools.wraps(method)
    @tf.autograph.experimental.do_not_convert
    def call(raw: Any, *args: Any, **kwargs: Any) -> Any:
        step = native(raw, name)
        wrapper = _watched[raw][0]() if raw in _watched else None
        if wrapper is None:
            return step(*args, **kwargs)
        if wrapper.ampx_pending:
            raise RawStepError(
                f"the raw {type(raw).__name__} was stepped while gradients of scale_loss are pending; they would be "
                f"applied scaled or unchecked. Call {name} of the object that ampx.wrap_optimizer returned, or its "
                f"zero_grad to forget them."
            )
        with tf.control_dependencies([] if tf.executing_eagerly() else wrapper.ampx_assert_idle()):
            return step(*args, **kwargs)

    return call
