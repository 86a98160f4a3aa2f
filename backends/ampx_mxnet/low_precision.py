"""Parameters in low precision, with a float32 master or without, and the updater that trains them.

MXNet has master weights of its own (`multi_precision=True`), which do less than O2 promises. Native defects: they are
made for float16 only, and of weights that are rounded already; `save_parameters` writes the rounded weights, and a
plain float32 network loads neither these nor the trainer's states. Without masters, MXNet has no update in bfloat16 at
all, and several of its optimizers have none in float16. Here an optimizer sees float32 weights and gradients always.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from .compat import mx
from .dtypes import DTYPES, cast_tensor


class LowParameter(mx.gluon.Parameter):
    """A gluon parameter in low precision: it saves and loads float32, exactly where it has masters.

    Attributes:
        ampx_dtype: Name of the dtype that its values have.
        ampx_masters: Float32 arrays, one a context, as `_data`; None without masters. Those of a parameter whose shape
            is not known yet are made with its values.
        ampx_has_masters: Whether it has them.
    """

    ampx_dtype: Any
    ampx_masters: list[Any] | None
    ampx_has_masters: bool
    _grad: Any
    _low_gradients: list[Any] | None

    def updated(self, place: int) -> Any:
        """Return the float32 values that the optimizer updates on one context: the master, or a copy without one."""
        if self.ampx_masters is None:
            return cast_tensor(self._data[place], "float32")
        return self.ampx_masters[place]

    def round(self, place: int, values: Any) -> None:
        """Round float32 values into the parameter on one context."""
        mx.nd.amp_cast(values, dtype=DTYPES[self.ampx_dtype], out=self._data[place])

    def take_over_writes(self) -> None:
        """Take over what was written into the values by hand, with masters."""
        for place, master in enumerate(self.ampx_masters or ()):
            master[:] = self._exact(place)

    def _exact(self, place: int) -> Any:
        """Return the values on one context in float32: the master's where they are what it rounds to."""
        own = cast_tensor(self._data[place], "float32")
        if self.ampx_masters is None:
            return own
        master = self.ampx_masters[place]
        return mx.nd.where(own == cast_tensor(cast_tensor(master, self.ampx_dtype), "float32"), master, own)

    def widen_gradients(self) -> None:
        """Put float32 gradients in the place of low-precision ones, which dividing by a scale would round to zero."""
        if self._low_gradients is None and self._grad is not None:
            self._low_gradients = self._grad
            self._grad = [cast_tensor(gradient, "float32") for gradient in self._grad]

    def narrow_gradients(self) -> None:
        """Put the arrays back into which backward writes, with the values that the gradients have now."""
        if self._low_gradients is not None:
            wide, self._grad, self._low_gradients = self._grad, self._low_gradients, None
            for values, gradient in zip(wide, self._grad, strict=True):
                mx.nd.amp_cast(values, dtype=DTYPES[self.ampx_dtype], out=gradient)

    # -- what gluon calls ------------------------------------------------------------------------------

    def set_data(self, data: Any) -> None:
        """Set the values on all contexts, of any floating dtype; masters get them exactly."""
        exact = cast_tensor(data if isinstance(data, mx.nd.NDArray) else mx.nd.array(data), "float32")
        if self._data is None:
            super().set_data(exact)
            return
        super().set_data(cast_tensor(exact, self.ampx_dtype))
        for master in self.ampx_masters or ():
            master[:] = exact

    def _init_impl(self, data: Any, ctx_list: list[Any]) -> None:
        exact = cast_tensor(data, "float32")
        super()._init_impl(cast_tensor(exact, self.ampx_dtype), ctx_list)
        self.ampx_masters = [exact.copyto(context) for context in ctx_list] if self.ampx_has_masters else None

    def _finish_deferred_init(self) -> None:
        with self._declared_float32():  # native defect: no initializer knows bfloat16
            super()._finish_deferred_init()

    def _load_init(self, data: Any, *arguments: Any, **options: Any) -> None:
        with self._declared_float32():
            super()._load_init(cast_tensor(data, "float32"), *arguments, **options)

    def _reduce(self) -> Any:
        with mx.autograd.pause():
            return self._exact(0).copyto(mx.cpu())

    @contextmanager
    def _declared_float32(self) -> Iterator[None]:
        self._dtype = "float32"
        try:
            yield
        finally:
            self._dtype = DTYPES[self.ampx_dtype]


def lower(parameter: Any, dtype: Any, masters: bool) -> None:
    """Make a float32 parameter one in low precision, in place."""
    values, gradients = parameter._data, parameter._grad
    parameter.__class__ = LowParameter
    parameter.ampx_dtype, parameter.ampx_has_masters, parameter.ampx_masters = dtype, masters, None
    parameter._low_gradients = None
    parameter._dtype = DTYPES[dtype]
    parameter._var = None  # the symbol has a dtype
    if values is None:
        return
    with mx.autograd.pause():
        if masters:
            parameter.ampx_masters = [array.copy() for array in values]
        parameter._data = [cast_tensor(array, dtype) for array in values]
        if gradients is not None:
            parameter._grad = [cast_tensor(gradient, dtype) for gradient in gradients]
            mx.autograd.mark_variables(parameter._data, parameter._grad, parameter.grad_req)
            for array, old in zip(parameter._data, values, strict=True):
                array._fresh_grad = old._fresh_grad


class Updater(mx.optimizer.Updater):
    """MXNet's updater of one context, whose optimizer sees float32 in the place of parameters in low precision.

    Its states are those of float32 training: files of them are read by plain trainers, and theirs are read here.
    """

    def __init__(self, native: Any) -> None:
        """Take the place of a native updater."""
        self.__dict__.update(vars(native))
        self._begun: set[int] = set()

    def __call__(self, index: Any, grad: Any, weight: Any) -> None:
        """Update, and round the results into the parameters."""
        indices, gradients, weights = (
            list(values) if isinstance(values, (list, tuple)) else [values] for values in (index, grad, weight)
        )
        low = []
        with mx.autograd.pause():
            for position, number in enumerate(indices):
                parameter = self.optimizer.param_dict.get(number)
                if not isinstance(parameter, LowParameter):
                    continue
                place = parameter.list_ctx().index(weights[position].context)
                if number not in self._begun:
                    self._begun.add(number)
                    parameter.take_over_writes()
                gradients[position] = cast_tensor(gradients[position], "float32")
                weights[position] = values = parameter.updated(place)
                low.append((parameter, place, values))
            super().__call__(indices, gradients, weights)
            for parameter, place, values in low:
                parameter.round(place, values)


def low_parameters(parameters: Iterable[Any]) -> list[LowParameter]:
    """List those in low precision."""
    return [parameter for parameter in parameters if isinstance(parameter, LowParameter)]
