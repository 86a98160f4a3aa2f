"""Watch the values of layers, compute layers in a dtype of their own, and compute a batch again.

All three see layers by `paddle.nn.Layer.__call__`, which is replaced while somebody looks. Functions that `to_static`
compiled run as they are written inside. In static graphs there are no calls to see: a model is refused there, and where
none is named nothing is seen.

On the CPU eager Paddle computes float32 whatever auto_cast says. A replay for float16 or bfloat16 shows float32 there;
what these dtypes would do is shown inside of `force`, which rounds values on devices that cannot compute a dtype.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar, Final, cast
from unittest import mock

import numpy as np
import paddle
from paddle.autograd.backward_mode import backward  # `ampx run` patches the public name

from ampx.backend import Backend, CastPlan, Device
from ampx.callers import script_line
from ampx.formats import FORMATS, find_digits, to_digits
from ampx.modules import FORCES, GRADIENTS, WATCHERS, Names
from ampx.numerics.forcing import Forcer
from ampx.numerics.probe import Probe, Replayed, Step, Watch, Watching
from ampx.numerics.randomness import random_numbers_kept
from ampx.numerics.timing import timed
from ampx.numerics.watching import Tensors, Watcher, Where
from ampx.policy import Dtype
from ampx.scaling import check_loss

from . import casting, devices
from .calls import calls, named
from .gradients import gradient_of, unscale
from .losses import scale_loss
from .writes import unnoticed

# What layers can be rounded to on a CPU.
_ROUNDED: Final = frozenset(("float16", "bfloat16", "float8_e4m3", "float8_e5m2"))
# What this machine's best device does not compute in.
SIMULATED: Final = _ROUNDED - devices.best().native
# What Paddle rounds by casts: its casts to the others do not round as the dtypes are defined.
_CAST: Final = ("float16", "bfloat16")
# Operators of tensors that are methods written in C; what they compute, as Paddle calls it.
_METHODS: Final = {
    **{"__add__": "add", "__radd__": "add", "__sub__": "subtract", "__rsub__": "subtract", "__mul__": "multiply"},
    **{"__rmul__": "multiply", "__truediv__": "divide", "__rtruediv__": "divide", "__div__": "divide"},
    **{"__rdiv__": "divide", "__pow__": "pow", "__rpow__": "pow", "__matmul__": "matmul", "__rmatmul__": "matmul"},
    **{"__mod__": "remainder", "__rmod__": "remainder", "__floordiv__": "floor_divide"},
}


@contextmanager
def _uncompiled(backend: Backend, call: str, model: Any | None) -> Iterator[None]:
    """Return a region in which functions that `to_static` compiled run as they are written."""
    if model is not None and not paddle.in_dynamic_mode():
        backend.refuse(f"{call} in a static graph (use an eager model)")
    switch = paddle.jit.dy2static.program_translator.ProgramTranslator.get_instance()
    before = switch.enable_to_static
    paddle.jit.enable_to_static(False)
    try:
        yield
    finally:
        paddle.jit.enable_to_static(before)


# -- watch -------------------------------------------------------------------------------------------------------------


class _Thread(threading.local):
    """What the calling thread does.

    Attributes:
        quiet: It measures or rounds: what it calls is no operation of the model.
        backward: It runs a backward pass.
    """

    quiet = False
    backward = False


_thread: Final = _Thread()


@contextmanager
def _quiet() -> Iterator[None]:
    """Return a region for what ampx computes itself."""
    quiet, _thread.quiet = _thread.quiet, True
    try:
        with casting.off():
            yield
    finally:
        _thread.quiet = quiet


def _wait() -> None:
    if not paddle.get_device().startswith("cpu"):
        paddle.device.synchronize()


class _Watcher(Watcher):
    """Reads what layers and operations return."""

    wait = staticmethod(_wait)

    def tapped(self, value: Any, where: Where, operation: str = "") -> Any:
        tensors = [tensor for tensor in casting.floating(value) if not tensor.stop_gradient]
        for tensor, listen in zip(tensors, self.listeners(where, tensors, operation), strict=True):
            tensor.register_hook(partial(_heard, listen))
        return value

    def operate(self, name: str, operation: Callable[..., Any], args: Any, options: Any) -> Any:
        """Read what an operation returns, and have read what its part of the backward pass returns."""
        where = self.where
        if _thread.quiet or not self.watching.watches(where[0]):
            return operation(*args, **options)
        line, received = script_line(), self.reduced((args, options))
        output = operation(*args, **options)
        self.note(where, name, "backward" if _thread.backward else "forward", output, received, line)
        self._tap_backward(where, name, line, args, output)
        return output

    def _tap_backward(self, where: Where, name: str, line: str, args: Any, output: Any) -> None:
        """Have read what an operation's part of the backward pass returns."""
        if any(isinstance(argument, (list, tuple)) and list(casting.floating(argument)) for argument in args):
            # Native defect: Paddle does not take back what a hook behind an operation on lists returns. The gradients
            # of its inputs are read when they are complete.
            self.tapped([tensor for tensor in casting.floating(args) if not tensor.is_leaf], where, f"{name}_grad")
            return

        def note(returned: Any, arrived: Any) -> Any:
            self.note(where, f"{name}_grad", "backward", returned, self.reduced(arrived), line)
            return returned

        computed = (tensor for tensor in casting.floating(output) if not (tensor.stop_gradient or tensor.is_leaf))
        node = next((tensor.grad_fn for tensor in computed), None)
        if node is not None:
            node._register_post_hook(note)


def _heard(listen: Callable[[Any], None], gradient: Any) -> Any:
    if gradient._is_initialized():
        listen(gradient)
    return gradient  # Paddle forgets what hooks before made of it otherwise


@contextmanager
def _unseen() -> Iterator[None]:
    with paddle.no_grad(), _quiet():
        yield


def _values(tensor: Any) -> Any:
    """Return the elements in one dimension; of sparse gradients those of the rows."""
    dense = tensor._get_tensor_from_selected_rows() if tensor.is_selected_rows() else tensor.detach()
    return dense.reshape([-1])


def _reduced(values: Any, dtype: str) -> Any:
    """Reduce elements to the numbers of `NUMBERS`, on their device."""
    limits = FORMATS[dtype]
    if values.dtype != paddle.float64:
        values = values.astype("float32")
    finite = paddle.isfinite(values)
    magnitudes = paddle.where(finite, values.abs(), paddle.zeros_like(values))
    none = paddle.full_like(values, math.inf)
    present = magnitudes > 0
    numbers = (
        finite.logical_not().sum(),
        paddle.isnan(values).sum(),
        finite.logical_and(present.logical_not()).sum(),  # Paddle calls numbers equal that are not quite
        magnitudes.max(),
        paddle.where(present, magnitudes, none).min(),
        paddle.where(finite, values, none).min(),
        present.logical_and(magnitudes <= limits.flushes_to).sum(),
        (magnitudes >= limits.overflows_from).sum(),
    )
    return paddle.stack([number.astype("float64") for number in numbers])


_TENSORS: Final = Tensors(
    unseen=_unseen,
    floating=lambda tree: (tensor for tensor in casting.floating(tree) if tensor._is_initialized()),
    dtype=lambda tensor: str(tensor.dtype).rpartition(".")[2],
    held=_values,
    size=lambda values: int(values.size),
    reduce=_reduced,
    flat=lambda values: values,
    sample=lambda values: values.astype("float32").clone(),  # Paddle writes gradients over those that came before
    device=lambda tensor: str(tensor.place),
    rows=lambda vectors: paddle.stack(vectors).tolist(),
    arrays=lambda samples: [sample.numpy() for sample in samples],
)


@contextmanager
def _operations_watched(watcher: _Watcher) -> Iterator[None]:
    """Patch Paddle's operators wherever its own modules hold them, custom functions, and what runs a backward."""
    operators = {id(value): name for name, value in vars(paddle._C_ops).items() if _is_operator(name, value)}
    wrappers: dict[int, Any] = {}
    eager = paddle.base.core.eager
    with ExitStack() as stack:
        for module in (paddle._C_ops, *_modules()):
            for attribute, value in list(vars(module).items()):
                if id(value) in operators:
                    if id(value) not in wrappers:
                        wrappers[id(value)] = _operation(watcher, operators[id(value)], value)
                    setattr(module, attribute, wrappers[id(value)])
                    stack.callback(setattr, module, attribute, value)
        for attribute, operator in _METHODS.items():
            native = getattr(paddle.Tensor, attribute)
            setattr(paddle.Tensor, attribute, _operation(watcher, operator, native))
            stack.callback(setattr, paddle.Tensor, attribute, native)
        layer = paddle.autograd.PyLayer

        def custom(cls: Any, *args: Any, **options: Any) -> Any:
            return watcher.operate(cls.__name__, super(layer, cls).apply, args, options)

        stack.enter_context(mock.patch.object(layer, "apply", classmethod(custom)))
        for name in ("run_backward", "run_partial_grad"):
            stack.enter_context(mock.patch.object(eager, name, _in_backward(getattr(eager, name))))
        yield


def _modules() -> list[Any]:
    """List Paddle's own modules that are written in Python."""
    names = [
        name for name in sys.modules if name.startswith("paddle.") and not name.startswith("paddle.base.libpaddle")
    ]
    return [sys.modules[name] for name in names if sys.modules[name] not in (None, paddle._C_ops)]


def _is_operator(name: str, value: Any) -> bool:
    return callable(value) and not name.startswith("_") and not isinstance(value, type)


def _operation(watcher: _Watcher, name: str, native: Callable[..., Any]) -> Callable[..., Any]:
    def operation(*args: Any, **options: Any) -> Any:
        # What is written in place without gradients is an update of an optimizer.
        updates = name.endswith("_") and not paddle.is_grad_enabled()
        if _thread.quiet or updates or not paddle.in_dynamic_mode():
            return native(*args, **options)
        return watcher.operate(name, native, args, options)

    return operation


def _in_backward(native: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        before, _thread.backward = _thread.backward, True
        try:
            return native(*args, **options)
        finally:
            _thread.backward = before

    return run


# -- force -------------------------------------------------------------------------------------------------------------


def computes(dtype: str) -> bool:
    """Return whether the present device computes in a low dtype."""
    return dtype not in SIMULATED and find_digits(dtype) is None and not paddle.get_device().startswith("cpu")


class _Force(Forcer):
    """Computes layers in dtypes of their own."""

    def rounds(self, dtype: str) -> bool:
        return dtype != "float32" and not computes(dtype)

    def rounded(self, tree: Any, dtype: str, gradients: bool) -> Any:
        with _quiet():
            return casting.each(tree, lambda tensor: (_both_ways if gradients else _straight)(tensor, dtype))

    def computing(self, dtype: Any) -> AbstractContextManager[None]:
        return casting.off() if dtype == "float32" else casting.region(CastPlan(paddle.get_device(), dtype), True)

    def cast(self, tree: Any, dtype: Any) -> Any:
        return casting.cast(tree, dtype)


class _Widening:
    """Casts what a layer returns in low precision where nothing else is cast: float32 weights do not take it.

    It stands outside of those who watch, so that they see the layer's own dtype.
    """

    def __init__(self, force: _Force) -> None:
        self._force = force

    def call(self, layer: Any, forward: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call a layer."""
        dtype = self._force.dtype(layer)
        output = forward(*inputs, **options)
        if dtype in (None, "float32") or not computes(str(dtype)) or paddle.amp.is_autocast_enabled():
            return output
        wide = casting.widest((inputs, options), cast(Dtype, dtype)) == "float32"
        return casting.cast(output, "float32") if wide else output


class _Rounded(paddle.autograd.PyLayer):
    """Rounds, and rounds the gradient or lets it through as it is."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, dtype: str, both_ways: bool) -> Any:
        """Round."""
        ctx.dtype = dtype if both_ways else None
        return rounded(tensor, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Return the gradient."""
        return gradient if ctx.dtype is None else rounded(gradient, ctx.dtype)


def _straight(tensor: Any, dtype: str) -> Any:
    return rounded(tensor, dtype) if tensor.stop_gradient else _Rounded.apply(tensor, dtype, False)


def _both_ways(tensor: Any, dtype: str) -> Any:
    if tensor.stop_gradient:
        return rounded(tensor, dtype)
    output = _Rounded.apply(tensor, dtype, True)
    # For watchers: their hooks come after this one. A user's hook would undo what it returns.
    output.register_hook(lambda gradient: rounded(gradient, dtype))
    return output


@paddle.no_grad()
def rounded(tensor: Any, dtype: str) -> Any:
    """Round the elements of a tensor as a dtype would, to nearest even, and keep the tensor's own dtype."""
    with _quiet():
        bits = find_digits(dtype)
        if bits is not None:
            nearest = to_digits(tensor.astype("float32"), bits).astype(tensor.dtype)
            return paddle.where(paddle.isfinite(nearest), nearest, tensor)
        if dtype in _CAST:
            return tensor.astype(dtype).astype(tensor.dtype)
        limits = FORMATS[dtype]
        values = tensor.astype("float32")
        # A sum with a power of two rounds to the last digit that it holds. What is below the smallest normal number
        # has the digits of that; what is far too large must not overflow on the way.
        magnitudes = values.abs().clip(0.0, 2 * limits.largest)
        powers = 2.0 ** magnitudes.clip(limits.smallest_normal, 2 * limits.largest).log2().floor()
        shift = powers * 2.0 ** (FORMATS["float32"].bits - limits.bits)
        nearest = (magnitudes + shift) - shift
        beyond = paddle.full_like(values, math.inf if limits.infinite else math.nan)
        nearest = paddle.where(nearest > limits.largest, beyond, nearest) * values.sign()
        return paddle.where(paddle.isnan(values), values, nearest).astype(tensor.dtype)


# -- replay ------------------------------------------------------------------------------------------------------------


def _computed(backend: Backend, model: Any, step: Step, plan: CastPlan | None, scale: float) -> Any:
    """Return the loss of a batch, after its backward."""
    with casting.region(plan, True) if plan and computes(plan.dtype) else casting.off():
        loss = step(model)
    check_loss(backend, loss, False, "replay")
    with _quiet():
        scaled = scale_loss(loss, scale)
    with casting.off():
        backward([scaled])
    return loss


def _is_there(parameter: Any) -> bool:
    gradient = gradient_of(parameter)
    return gradient is not None and gradient._is_initialized()


def _true(parameter: Any, scale: float) -> Any:
    """Return a gradient divided by the scale, as an array of float32."""
    gradient = gradient_of(parameter)
    if gradient.is_selected_rows():
        dense = np.zeros(parameter.shape, "float32")
        np.add.at(dense, np.array(gradient.rows()), gradient._get_tensor_from_selected_rows().astype("float32").numpy())
    else:
        dense = gradient.astype("float32").numpy()
    return dense / np.float32(scale)


@contextmanager
def _restored(model: Any) -> Iterator[None]:
    """Return a region after which random numbers, weights, buffers and gradients are as before."""
    layers = [layer for _, layer in named(model)]
    held = [(layer._buffers, dict(layer._buffers)) for layer in layers]
    tensors = [*model.parameters(), *(tensor for _, buffers in held for tensor in buffers.values())]
    with paddle.no_grad(), casting.off():
        values = [(tensor, tensor.clone()) for tensor in tensors if tensor is not None and tensor._is_initialized()]
        gradients = [(parameter, _taken(parameter)) for parameter in model.parameters()]
    drawn = paddle.get_rng_state(), paddle.get_rng_state("cpu")
    try:
        with random_numbers_kept():
            yield
    finally:
        paddle.set_rng_state(drawn[0])
        paddle.set_rng_state(drawn[1], "cpu")
        with paddle.no_grad(), casting.off():
            for buffers, before in held:
                buffers.clear()
                buffers.update(before)
            for tensor, value in values:
                tensor.copy_(value, True)
            for parameter, gradient in gradients:
                _put_back(parameter, gradient)


def _taken(parameter: Any) -> tuple[Any, Any]:
    """Take the gradients off a parameter; `main_grad` is the float32 one of low-precision parameters."""
    main, gradient = getattr(parameter, "main_grad", None), parameter._grad_ivar()
    if main is not None:
        parameter.main_grad = None
    if gradient is not None:
        gradient = gradient.clone() if gradient._is_initialized() else None
        parameter.clear_gradient(False)
    return main, gradient


def _put_back(parameter: Any, gradients: tuple[Any, Any]) -> None:
    main, gradient = gradients
    if main is not None:
        parameter.main_grad = main
    if parameter._grad_ivar() is not None:
        parameter.clear_gradient(False)
    if gradient is not None:
        parameter._set_grad_ivar(gradient)


class PaddleProbe(Probe):
    """Looks into layers of Paddle."""

    rounds_unseen: ClassVar[bool] = True

    def simulates(self, device: Device) -> frozenset[str]:
        """Return what values are rounded to; on a CPU on which eager Paddle computes, whatever the best device has."""
        eager_cpu = device.name == "cpu" and paddle.in_dynamic_mode() and paddle.get_device() == "cpu"
        return _ROUNDED if eager_cpu else SIMULATED

    def watch(self, model: Any | None, watching: Watching) -> AbstractContextManager[Watch]:
        """Read the outputs of layers and the gradients of these outputs: see `Probe.watch`."""
        watcher = _Watcher(_TENSORS, watching, Names(model, named, kinds=(paddle.nn.Layer,)))
        regions = _uncompiled(self.backend, "watch", model), calls.around((WATCHERS, watcher))
        return watcher.looking(regions, _operations_watched)

    @contextmanager
    def force(self, model: Any | None, dtypes: Mapping[str, str]) -> Iterator[None]:
        """Compute layers in dtypes of their own, or round as these would: see `Probe.force`."""
        force = _Force(Names(model, named, kinds=(paddle.nn.Layer,)), dtypes)
        with _uncompiled(self.backend, "force", model), calls.around((GRADIENTS, _Widening(force)), (FORCES, force)):
            yield

    def replay(self, model: Any, step: Step, plan: CastPlan | None, scale: float = 1.0) -> Replayed:
        """Compute a batch and its gradients, and leave everything as it was: see `Probe.replay`."""
        trained = {name: parameter for name, parameter in model.named_parameters() if not parameter.stop_gradient}
        with _uncompiled(self.backend, "replay", model), _restored(model), unnoticed(), paddle.enable_grad():
            loss = _computed(self.backend, model, step, plan, scale)
            gradients = {name: _true(parameter, scale) for name, parameter in trained.items() if _is_there(parameter)}
            value = float(loss.astype("float32"))
        return Replayed(value, gradients, _TENSORS.stats(trained, "float16" if plan is None else plan.dtype))

    def clock(self, model: Any, step: Step, plan: CastPlan | None) -> Callable[[], float]:
        """Return what times a batch and its gradients: see `Probe.clock`.

        Where something is cast, each step waits to see whether gradients are finite, as the optimizer's will do.
        """
        trained = [parameter for parameter in model.parameters() if not parameter.stop_gradient]

        def compute() -> None:
            for parameter in trained:
                if _is_there(parameter):
                    parameter.clear_gradient(False)
            _computed(self.backend, model, step, plan, 1.0)
            if plan is not None and computes(plan.dtype):
                bool(unscale([parameter for parameter in trained if _is_there(parameter)], 1.0))

        def seconds() -> float:
            with _uncompiled(self.backend, "replay", model), _restored(model), unnoticed(), paddle.enable_grad():
                compute()
                _wait()
                return timed(compute, _wait)

        return seconds

    def seed(self, number: int) -> None:
        """Seed Paddle, whose random numbers are then the same in every run."""
        paddle.seed(number)

    def peak_memory(self) -> int | None:
        """Return the peak of Paddle's allocator on the present GPU; None without one."""
        return paddle.device.cuda.max_memory_allocated() if paddle.device.is_compiled_with_cuda() else None
