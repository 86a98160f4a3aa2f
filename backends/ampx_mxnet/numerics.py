"""Watch the values of blocks, compute blocks in a dtype of their own, and compute a batch again.

All three see blocks by `gluon.Block.__call__`, which is replaced while somebody looks. Hybridized blocks run as they
are written inside; a `SymbolBlock` is seen from the outside only. The gradient of an output is seen by an operation
that does nothing and is recorded behind the block: MXNet runs its backward in threads of its own. Operations are seen
where a script looks them up in MXNet's modules; a function that it has taken from there before is not.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar, Final, cast

import numpy as np

from ampx.backend import Backend, CastPlan, Device
from ampx.callers import script_line
from ampx.errors import DetachedLossError
from ampx.formats import FORMATS, find_digits, to_digits
from ampx.modules import FORCES, GRADIENTS, WATCHERS, Names
from ampx.numerics.forcing import Forcer
from ampx.numerics.probe import Probe, Reading, Replayed, Step, Watch, Watching
from ampx.numerics.randomness import random_numbers_kept
from ampx.numerics.timing import timed
from ampx.numerics.watching import Tensors, Watcher, Where
from ampx.policy import Dtype
from ampx.scaling import check_loss

from . import casting, devices, dtypes
from .calls import calls, in_backward, is_traced, named
from .casting import switch
from .compat import mx
from .gradients import all_finite, collect, is_fresh
from .losses import scale_loss

_device: Final = devices.describe("auto")
# What this machine's best device does not compute in.
SIMULATED: Final = frozenset(FORMATS) - {"float32"} - _device.native - _device.emulated
_backward: Final = mx.autograd.backward  # `ampx run` and sessions patch the public name
# Arguments that operations write to.
_WRITTEN: Final = frozenset(("out", "moving_mean", "moving_var", "running_mean", "running_var"))
_NORMS: Final = ("BatchNorm", "SyncBatchNorm")  # whose last two inputs are written to
_COPY: Final = "_copyto"  # by which MXNet itself hands values over
# What every replay starts from: MXNet does not tell where its random numbers are.
_SEED: Final = 0


# -- the calls of blocks -----------------------------------------------------------------------------------------------


class _AsWritten:
    """Has hybridized blocks run as they are written, and keeps what was traced of them."""

    def call(self, block: Any, forward: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run a block as it is written."""
        if is_traced(inputs) or not getattr(block, "_active", False):
            return forward(*inputs, **options)
        block._active = False
        try:
            return forward(*inputs, **options)
        finally:
            block._active = True


class _Behind(mx.autograd.Function):
    """Does nothing to a value, and shows its gradient, or changes it."""

    def __init__(self, look: Callable[[Any], Any]) -> None:
        super().__init__()
        self._look = look

    def forward(self, value: Any) -> Any:
        """Return the value: its memory too, since a copy has another layout, and layers round by that."""
        return value.detach()

    def backward(self, gradient: Any) -> Any:
        """Return the gradient, or what becomes of it."""
        with _quiet():
            held = _held(gradient)
            changed = self._look(held)
        return held if changed is None else changed


def _held(gradient: Any) -> Any:
    """Return a copy of what a custom function's backward is called with. Sync: waits until it is read.

    Native defect: MXNet frees the memory of gradients in oneDNN's layouts when the call returns, though operations
    that read it may only be queued.
    """
    held = gradient.copy()
    held.wait_to_read()
    return held


def _tapped(tensor: Any, look: Callable[[Any], Any]) -> Any:
    if tensor.stype != "default" or not mx.autograd.is_recording():
        return tensor
    # Native defect: custom functions write nothing to a parameter whose gradients are added up.
    return _Behind(look)(tensor * 1 if tensor.grad is not None else tensor)


# -- watch -------------------------------------------------------------------------------------------------------------


class _Thread(threading.local):
    """Whether the calling thread measures or rounds: what it calls is no operation of the model."""

    quiet = False


_thread: Final = _Thread()


@contextmanager
def _quiet() -> Iterator[None]:
    """Return a region for what ampx computes itself."""
    quiet, _thread.quiet = _thread.quiet, True
    try:
        with switch.Region(None):
            yield
    finally:
        _thread.quiet = quiet


class _Watcher(Watcher):
    """Reads what blocks and operations return."""

    wait = staticmethod(mx.nd.waitall)

    def readings(self) -> list[Reading]:
        # The backward pass runs in threads of MXNet, and branches of it side by side.
        mx.nd.waitall()
        self.log.sort()
        return super().readings()

    def call(self, module: Any, forward: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if is_traced(inputs):
            return forward(*inputs, **options)
        if self.where == ("", ""):
            mx.nd.waitall()  # gradients of a backward that still runs are noted before
        return super().call(module, forward, inputs, options)

    def tapped(
        self, value: Any, where: Where, operation: str = "", line: str = "", written: frozenset[int] = frozenset()
    ) -> Any:
        def is_read(leaf: Any) -> bool:
            return bool(leaf.size) and id(leaf) not in written

        tensors = list(filter(is_read, dtypes.floating(value)))
        listeners = iter(self.listeners(where, tensors, operation, line))
        with _quiet():
            return dtypes.each(value, lambda leaf: _tapped(leaf, next(listeners)) if is_read(leaf) else leaf)

    def operate(self, name: str, operation: Callable[..., Any], args: Any, options: Any) -> Any:
        """Read what an operation returns, and have read what its part of the backward pass returns."""
        where = self.where
        if not self.watching.watches(where[0]):
            return operation(*args, **options)
        read = {key: value for key, value in options.items() if key != "out"}  # it may have no shape yet
        line, received = script_line(), self.reduced((args, read))

        written = {id(value) for key, value in options.items() if key in _WRITTEN}
        written |= {id(value) for value in args[3:5]} if name in _NORMS else set()
        args, options = self.tapped((args, options), where, f"_backward_{name}", line, frozenset(written))
        output = operation(*args, **options)
        self.note(where, name, "backward" if in_backward() else "forward", output, received, line)
        return output


@contextmanager
def _unseen() -> Iterator[None]:
    with mx.autograd.pause(), _quiet():
        yield


def _values(tensor: Any) -> Any:
    """Return the elements in one dimension, in float32 at least."""
    wide = tensor if dtypes.name_of(tensor.dtype) == "float64" else dtypes.cast_tensor(tensor, "float32")
    dense = wide.tostype("default") if wide.stype != "default" else wide
    classic = dense.as_nd_ndarray() if isinstance(dense, mx.np.ndarray) else dense
    # Native defect: an array's own `reshape` is a view, which cannot be copied where oneDNN chose the layout.
    return mx.nd.reshape(classic, shape=(-1,))


def _reduced(values: Any, dtype: str) -> Any:
    """Reduce elements to the numbers of `NUMBERS`, on their device."""
    limits = FORMATS[dtype]
    finite = mx.nd.contrib.isfinite(values)
    magnitudes = mx.nd.where(finite, values.abs(), mx.nd.zeros_like(values))
    none = mx.nd.full(values.shape, math.inf, ctx=values.context, dtype=values.dtype)
    present = magnitudes > 0
    numbers = (
        _count(finite == 0),
        _count(mx.nd.contrib.isnan(values)),
        _count(finite * (present == 0)),
        magnitudes.max(),
        mx.nd.where(present, magnitudes, none).min(),
        mx.nd.where(finite, values, none).min(),
        _count(present * (magnitudes <= limits.flushes_to)),
        _count(magnitudes >= limits.overflows_from),
    )
    return mx.nd.concat(*(number.astype("float64").reshape((1,)) for number in numbers), dim=0)


def _count(mask: Any) -> Any:
    return mask.astype("float64").sum()  # a sum in float32 stops at 2**24


_TENSORS: Final = Tensors(
    unseen=_unseen,
    floating=lambda tree: (tensor for tensor in dtypes.floating(tree) if tensor.size),
    dtype=lambda tensor: dtypes.name_of(tensor.dtype),
    held=_values,
    size=lambda values: values.size,
    reduce=_reduced,
    flat=lambda values: values,
    sample=lambda values: values.astype("float32"),
    device=lambda tensor: str(tensor.context),
    rows=lambda vectors: mx.nd.concat(*vectors, dim=0).asnumpy().reshape(len(vectors), -1).tolist(),
    arrays=lambda samples: [sample.asnumpy() for sample in samples],
)


@contextmanager
def _operations_watched(watcher: _Watcher) -> Iterator[None]:
    """Patch the functions of MXNet's operators, also where casting has replaced them."""
    with ExitStack() as stack:
        for module in casting.modules():
            for attribute, value in list(vars(module).items()):
                if _is_operator(value):
                    setattr(module, attribute, _operation(watcher, value))
                    stack.callback(setattr, module, attribute, value)
        yield


def _is_operator(value: Any) -> bool:
    # MXNet writes the functions of its operators by itself.
    if not inspect.isfunction(value) or value.__name__ == _COPY:
        return False
    return inspect.unwrap(value).__code__.co_filename.startswith("<")


def _operation(watcher: _Watcher, native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def operation(*args: Any, **options: Any) -> Any:
        if _thread.quiet or native.__name__.endswith("_update"):  # optimizers'
            return native(*args, **options)
        return watcher.operate(native.__name__, native, args, options)

    return operation


# -- force -------------------------------------------------------------------------------------------------------------


def _plan(dtype: str) -> CastPlan:
    """Return the plan by which a low dtype is computed: the session's, where it has that dtype."""
    session = casting.running_session()
    plan = None if session is None else session.plan
    return plan if plan is not None and plan.dtype == dtype else CastPlan(_device.name, cast(Dtype, dtype))


class _Force(Forcer):
    """Computes blocks in dtypes of their own; gradients of outputs are rounded by `_Rounding`."""

    def call(self, module: Any, forward: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if is_traced(inputs):
            return forward(*inputs, **options)
        return super().call(module, forward, inputs, options)

    def rounds(self, dtype: str) -> bool:
        return dtype in SIMULATED

    def rounded(self, tree: Any, dtype: str, gradients: bool) -> Any:
        with _quiet():
            return dtypes.each(tree, lambda leaf: _Rounded(dtype)(leaf) if leaf.stype == "default" else leaf)

    def computing(self, dtype: Any) -> AbstractContextManager[Any]:
        return switch.Region(None) if dtype == "float32" else casting.region(_plan(dtype), True)

    def cast(self, tree: Any, dtype: Any) -> Any:
        with switch.Region(None):
            return dtypes.cast(tree, dtype)


class _Rounding:
    """Rounds the gradients of outputs, outside of the hooks that watch them."""

    def __init__(self, force: _Force) -> None:
        self._force = force

    def call(self, block: Any, forward: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Have the gradient of a block's output rounded before anybody sees it."""
        dtype = self._force.dtype(block)
        output = forward(*inputs, **options)
        if dtype is None or is_traced(inputs) or (dtype not in SIMULATED and find_digits(dtype) is None):
            return output
        with _quiet():
            return dtypes.each(output, lambda leaf: _tapped(leaf, lambda gradient: rounded(gradient, dtype)))


class _Rounded(mx.autograd.Function):
    """Rounds, and lets the gradient through as it is."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self._dtype = dtype

    def forward(self, value: Any) -> Any:
        """Round."""
        return rounded(value, self._dtype)

    def backward(self, gradient: Any) -> Any:
        """Return the gradient."""
        with _quiet():
            return _held(gradient)


def rounded(tensor: Any, dtype: str) -> Any:
    """Round the elements of an array as a dtype would, to nearest even, and keep the array's own dtype."""
    with mx.autograd.pause(), _quiet():
        bits = find_digits(dtype)
        if bits is not None:
            nearest = to_digits(tensor.astype("float32"), bits).astype(tensor.dtype)
            return mx.nd.where(mx.nd.abs(nearest) < math.inf, nearest, tensor)
        if dtype in dtypes.DTYPES:
            return dtypes.cast_tensor(tensor, cast(Dtype, dtype)).astype(tensor.dtype)
        return dtypes.nearest(tensor, FORMATS[dtype]).astype(tensor.dtype)


# -- replay ------------------------------------------------------------------------------------------------------------


def _computed(backend: Backend, model: Any, step: Step, plan: CastPlan | None, scale: float) -> Any:
    """Return the loss of a batch, after its backward."""
    with switch.Region(None) if plan is None else casting.region(plan, True), mx.autograd.record():
        loss = step(model)
    check_loss(backend, loss, False, "replay")
    try:
        with _quiet():
            scaled = scale_loss(loss, scale)
        with switch.Region(None):
            _backward(scaled)
    except mx.MXNetError as error:
        raise DetachedLossError(
            "replay got a loss that no gradient can flow from; accepted: a loss computed from the parameters. "
            "Remove detach(), asscalar() or autograd.pause around it."
        ) from error
    return loss


def _true(parameter: Any, scale: float) -> Any:
    """Return the sum of a parameter's gradients on all contexts, divided by the scale, as an array of float32."""
    with _quiet():
        parts = [_values(gradient).asnumpy() for gradient in parameter._grad]
    return np.sum(parts, axis=0, dtype=np.float32).reshape(parameter.shape) / np.float32(scale)


@contextmanager
def _restored(model: Any) -> Iterator[None]:
    """Return a region after which weights, running statistics and gradients are as before."""
    parameters = list({id(entry): entry for entry in model._collect_params_with_prefix().values()}.values())
    trained = [data for parameter in parameters if parameter._grad for data in parameter._data]
    fresh = [data._fresh_grad for data in trained]
    with _arrays_restored(parameters), _randomness_repeated():
        for data in trained:
            data._fresh_grad = False
        try:
            yield
        finally:
            for data, was_fresh in zip(trained, fresh, strict=True):
                data._fresh_grad = was_fresh


@contextmanager
def _arrays_restored(parameters: Sequence[Any]) -> Iterator[None]:
    """Return a region, begun with gradients of zero, after which parameters and their gradients are as before."""
    gradients = [gradient for parameter in parameters for gradient in parameter._grad or ()]
    with mx.autograd.pause(), _quiet():
        arrays = [data for parameter in parameters for data in parameter._data or ()]
        kept = [(array, array.copy()) for array in (*arrays, *gradients)]
        for gradient in gradients:
            gradient[:] = 0  # where gradients are added up
    try:
        yield
    finally:
        with mx.autograd.pause(), _quiet():
            for array, before in kept:
                before.copyto(array)


@contextmanager
def _randomness_repeated() -> Iterator[None]:
    """Return a region that always draws the same random numbers; what follows it depends on what was before."""
    with mx.autograd.pause(), _quiet():
        after = int(mx.nd.random.randint(0, 2**31 - 1, shape=(1,)).asscalar())
    mx.random.seed(_SEED)
    try:
        with random_numbers_kept():
            yield
    finally:
        mx.random.seed(after)


class MXNetProbe(Probe):
    """Looks into blocks of MXNet."""

    rounds_unseen: ClassVar[bool] = True

    def simulates(self, device: Device) -> frozenset[str]:
        return SIMULATED

    def watch(self, model: Any | None, watching: Watching) -> AbstractContextManager[Watch]:
        """Read the outputs of blocks and the gradients of these outputs: see `Probe.watch`."""
        watcher = _Watcher(_TENSORS, watching, Names(model, named, kinds=(mx.gluon.Block,)))
        return watcher.looking([calls.around((GRADIENTS, _AsWritten()), (WATCHERS, watcher))], _operations_watched)

    @contextmanager
    def force(self, model: Any | None, dtypes: Mapping[str, str]) -> Iterator[None]:
        """Compute blocks in dtypes of their own, or round as these would: see `Probe.force`."""
        force = _Force(Names(model, named, kinds=(mx.gluon.Block,)), dtypes)
        with ExitStack() as stack:
            before = switch.current()
            for dtype in sorted(set(dtypes.values()) & FORMATS.keys() - SIMULATED - {"float32"}):
                # Installed once, not in every call of a block; outside of the blocks the thread casts as before.
                stack.enter_context(casting.region(_plan(dtype), True))
                stack.enter_context(switch.Region(before))
            stack.enter_context(calls.around((GRADIENTS, _AsWritten()), (GRADIENTS, _Rounding(force)), (FORCES, force)))
            yield

    def replay(self, model: Any, step: Step, plan: CastPlan | None, scale: float = 1.0) -> Replayed:
        """Compute a batch and its gradients, and leave everything but MXNet's random numbers as it was.

        MXNet tells nobody where its random numbers are. Every replay draws the same ones, those of one seed; afterwards
        others follow than without the replay, the same in every run of a seeded script. See `Probe.replay`.
        """
        trained = {
            name: parameter
            for name, parameter in model._collect_params_with_prefix().items()
            if parameter.grad_req != "null"
        }
        with _restored(model):
            loss = _computed(self.backend, model, step, plan, scale)
            gradients = {name: _true(parameter, scale) for name, parameter in trained.items() if is_fresh(parameter)}
            value = float(dtypes.cast_tensor(loss, "float32").asnumpy().sum())  # a loss a sample: backward adds them up
            initialized = {name: entry.list_data()[0] for name, entry in trained.items() if entry._data is not None}
        return Replayed(value, gradients, _TENSORS.stats(initialized, "float16" if plan is None else plan.dtype))

    def clock(self, model: Any, step: Step, plan: CastPlan | None) -> Callable[[], float]:
        """Return what times a batch and its gradients: see `Probe.clock`.

        Where something is cast, each step waits to see whether gradients are finite, as the trainer's will do.
        """
        trained = [entry for entry in model._collect_params_with_prefix().values() if entry.grad_req != "null"]
        owner = SimpleNamespace(_params=list({id(parameter): parameter for parameter in trained}.values()))

        def compute() -> None:
            _computed(self.backend, model, step, plan, 1.0)
            if plan is not None:
                all_finite(collect(owner, True)).asscalar()

        def seconds() -> float:
            with _restored(model), ExitStack() as regions:
                if plan is not None:
                    # To put in place what casts takes milliseconds, which no step of a training pays.
                    regions.enter_context(casting.region(plan, True))
                    regions.enter_context(switch.Region(None))
                compute()
                mx.nd.waitall()
                return timed(compute, mx.nd.waitall)

        return seconds

    def seed(self, number: int) -> None:
        """Seed MXNet, whose random numbers are then the same in every run."""
        mx.random.seed(number)
