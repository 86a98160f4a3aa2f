"""The script sees unscaled gradients, wherever it looks: between backward and step, and in backwards of its own."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import PurePath
from typing import Any, Final
from unittest import mock

from ampx.run import asked_by_script, is_script_function
from ampx_mxnet.calls import in_backward
from ampx_mxnet.casting import modules, switch
from ampx_mxnet.compat import mx
from ampx_mxnet.dtypes import cast_tensor, name_of

from .manager import TrainerManager, wait_for

_OWN: Final = ("mxnet", "ampx", "ampx_mxnet", "contextlib")
_THROUGH: Final = ("ampx_mxnet.run",)
# Operators that make a gradient whatever comes from behind them; MXNet's list of them lacks the last two.
_LOSSES: Final = (
    *("SoftmaxOutput", "Softmax", "LinearRegressionOutput", "LogisticRegressionOutput", "MAERegressionOutput"),
    *("SVMOutput", "MakeLoss"),
)


@contextmanager
def gradients_true(manager: TrainerManager) -> Iterator[None]:
    """Patch the ways to a gradient, by its parameter and by its array, and backwards of the script's own."""
    patch = mock.patch.object
    with ExitStack() as stack:
        for name in ("grad", "list_grad"):
            stack.enter_context(patch(mx.gluon.Parameter, name, _by_parameter(manager, name)))
        for kind in (mx.nd.NDArray, mx.np.ndarray):
            stack.enter_context(patch(kind, "grad", _by_array(manager, kind.grad)))
            stack.enter_context(patch(kind, "attach_grad", _attaching(manager, kind.attach_grad)))
        stack.enter_context(patch(mx.autograd, "mark_variables", _attaching(manager, mx.autograd.mark_variables)))
        stack.enter_context(patch(mx.autograd, "grad", _differentiating(manager)))
        stack.enter_context(patch(mx.autograd.Function, "__call__", _calling(manager)))
        stack.enter_context(patch(mx.operator, "register", _registering(manager)))
        for module in modules():
            for name in set(_LOSSES) & vars(module).keys():
                stack.enter_context(patch(module, name, _noting(manager, getattr(module, name))))
        yield


# -- gradients that hang on arrays -------------------------------------------------------------------------------------


def _by_parameter(manager: TrainerManager, name: str) -> Any:
    native = getattr(mx.gluon.Parameter, name)

    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        manager.look(lambda trainer: any(parameter is self for parameter in trainer._params))
        if manager.multiplied and not (manager.quiet or manager.stood_down or manager.owns(self)):
            manager.refuse_unowned()
        return native(self, *args, **kwargs)

    return read


def _by_array(manager: TrainerManager, native: Any) -> Any:
    def read(self: Any) -> Any:
        # An array does not know whose parameter it is.
        manager.look(lambda trainer: True, self)
        return native.__get__(self)

    return property(read, doc=native.__doc__)


def _attaching(manager: TrainerManager, native: Any) -> Any:
    @functools.wraps(native)
    def attach(arrays: Any, *args: Any, **kwargs: Any) -> Any:
        if in_backward():
            inside = manager.attached_inside
            inside.arrays = [*inside.arrays, *_listed(arrays)]
        elif asked_by_script(_OWN, _THROUGH):
            manager.attached = True
        return native(arrays, *args, **kwargs)

    return attach


def _differentiating(manager: TrainerManager) -> Callable[..., Any]:
    native = mx.autograd.grad

    @functools.wraps(native)
    def differentiate(heads: Any, *args: Any, **kwargs: Any) -> Any:
        if not manager.shows:
            return native(heads, *args, **kwargs)
        # In a backward of the script's own: others that run within get gradients that carry the scale, as everywhere.
        with manager.script_code.switched(False):
            result = native(manager.scaled(heads, manager.factor), *args, **kwargs)
        wait_for(_listed(result))
        return _times_each(result, 1.0 / manager.factor)

    return differentiate


# -- backwards of the script's own -------------------------------------------------------------------------------------


def _calling(manager: TrainerManager) -> Callable[..., Any]:
    native = mx.autograd.Function.__call__

    def call(self: Any, *inputs: Any) -> Any:
        if mx.autograd.is_recording() and is_script_function(type(self).backward):
            manager.waits = True
            function = weakref.ref(self)  # in a circle, it would keep its arrays for long
            self.backward = lambda *gradients: _on_unscaled(manager, type(self).backward, function(), gradients)
        return native(self, *inputs)

    return call


def _on_unscaled(manager: TrainerManager, backward: Any, function: Any, gradients: Sequence[Any]) -> Any:
    """Run a backward of the script's on unscaled gradients, and scale what it returns."""
    run = functools.partial(backward, function)
    if _stay_scaled(manager, backward, gradients):
        return run(*gradients)
    return manager.call_unscaled(run, gradients, _divided, _multiplied)


def _stay_scaled(manager: TrainerManager, backward: Any, gradients: Sequence[Any]) -> bool:
    """Return whether gradients stay as they are: nothing scales them, or they are float16, which is noted."""
    if manager.factor == 1.0:
        return True
    if any(name_of(gradient.dtype) == "float16" for gradient in gradients):
        # Divided, they would underflow; in float32, MXNet's operators would refuse them beside arrays of float16.
        code = backward.__code__
        place = f"{PurePath(code.co_filename).name}:{code.co_firstlineno}"
        manager.run.recorder.note_scaled(f"{backward.__qualname__}, in float16 ({place})")
        return True
    return False


def _registering(manager: TrainerManager) -> Callable[..., Any]:
    """Register subclasses of the script's operators that make operators with unscaled gradients."""
    native = mx.operator.register

    @functools.wraps(native)
    def register(name: str) -> Callable[[Any], Any]:
        def registered(kind: Any) -> Any:
            def create(self: Any, *args: Any, **kwargs: Any) -> Any:
                operator = kind.create_operator(self, *args, **kwargs)
                if is_script_function(type(operator).backward):
                    manager.waits = True
                    operator.backward = functools.partial(_run_operator, manager, weakref.ref(operator))
                return operator

            native(name)(type(kind.__name__, (kind,), {"create_operator": create}))
            return kind

        return registered

    return register


def _run_operator(
    manager: TrainerManager, reference: weakref.ref[Any], req: Any, out_grad: Any, in_grad: Any, **arrays: Any
) -> None:
    """Run an operator's backward with unscaled gradients; scale what it writes, into arrays of its own."""
    operator: Any = reference()
    backward = type(operator).backward
    if _stay_scaled(manager, backward, out_grad):
        backward(operator, req=req, out_grad=out_grad, in_grad=in_grad, **arrays)
        return

    def write(*gradients: Any) -> list[Any]:
        with switch.Region(None):
            slots = [mx.nd.zeros_like(array) for array in in_grad]
        once = ["null" if kind == "null" else "write" for kind in req]
        backward(operator, req=once, out_grad=list(gradients), in_grad=slots, **arrays)
        return slots

    scaled = manager.call_unscaled(write, out_grad, _divided, _multiplied)
    with switch.Region(None):
        for array, kind, gradient in zip(in_grad, req, scaled, strict=True):
            mx.operator.CustomOp.assign(operator, array, kind, gradient)


def _listed(arrays: Any) -> list[Any]:
    return list(arrays) if isinstance(arrays, (list, tuple)) else [arrays]


def _divided(gradient: Any, factor: float) -> Any:
    with switch.Region(None):
        return _times_each(gradient, 1.0 / factor)


def _multiplied(result: Any, factor: float, _: Sequence[Any]) -> list[Any]:
    with switch.Region(None):
        return [_times(gradient, factor) for gradient in _listed(result)]


def _times_each(arrays: Any, factor: float) -> Any:
    if isinstance(arrays, (list, tuple)):
        return [_times_each(array, factor) for array in arrays]
    # Of what an operator does not ask for, MXNet hands it an array without a shape: a classic one has no scalars.
    has_shape = arrays.shape is not None and (arrays.shape or isinstance(arrays, mx.np.ndarray))
    return _times(arrays, factor) if has_shape else arrays


def _times(array: Any, factor: float) -> Any:
    """Return the product in the array's dtype; bfloat16 has the range of float32, in which it is computed."""
    if name_of(array.dtype) != "bfloat16":
        return array * factor
    return cast_tensor(cast_tensor(array, "float32") * factor, "bfloat16")


# -- operators that make their own gradient ----------------------------------------------------------------------------


def _noting(manager: TrainerManager, native: Any) -> Any:
    @functools.wraps(native)
    def call(*args: Any, **kwargs: Any) -> Any:
        if mx.autograd.is_recording():
            manager.own_gradient = native.__name__
        return native(*args, **kwargs)

    return call
