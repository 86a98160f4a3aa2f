"""The verbs of ampx in autograd."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.builtins import dict, isinstance, list, tuple  # they know lists that are being differentiated
from autograd.tracer import getval, isbox

import ampx

from .optimizer import SGD


class AutogradBackend(ampx.GenericBackend):
    """autograd differentiates NumPy functions; gradients are values, and nothing casts by itself."""

    name = "autograd"
    capabilities = ampx.Capabilities(
        dtypes=frozenset({"float16"}),
        levels=frozenset({"O0", "O1"}),
        gradients="explicit",  # opt.step(gradients)
        autocast="explicit",  # the user annotates functions: ampx.half_function
    )

    def device(self, name: str) -> ampx.Device:
        """Describe the CPU: NumPy computes float16, but not in hardware."""
        if name not in ("auto", "cpu"):
            raise ampx.UnsupportedDeviceError(
                f"device={name!r} is not a device of autograd; accepted: 'cpu', 'auto'. Pass one of these."
            )
        return ampx.Device("cpu", emulated=frozenset({"float16"}), reason="NumPy emulates float16, which is slow")

    def is_optimizer(self, candidate: object) -> bool:
        """Return whether this is an optimizer."""
        return isinstance(candidate, SGD)

    def inspect_loss(self, loss: Any, check_nan: bool | None) -> ampx.LossInfo:
        """Return what ampx has to know about a loss."""
        value = getval(loss)
        if not isinstance(value, (np.ndarray, np.generic, float)):
            raise ampx.LossDtypeError(
                f"scale_loss got {type(value).__name__}; accepted: a NumPy number or array. Pass what the loss "
                f"function computed."
            )
        value = np.asarray(value)
        floating = np.issubdtype(value.dtype, np.floating)
        nan = bool(np.isnan(value).any()) if floating and check_nan is not False else None
        return ampx.LossInfo(value.size, str(value.dtype), floating, isbox(loss), nan)

    def scale(self, loss: Any, scale: float) -> Any:
        """Return the loss in float32 times the scale: in float16 the product would be inf."""
        return anp.array(loss, dtype="float32") * np.float32(scale)

    def unscale(self, grads: Any, scale: float) -> ampx.Unscaled:
        """Divide gradients by the scale and test them. In float32 at least: 2**16 is inf in float16."""
        with np.errstate(all="ignore"):
            wide = [np.divide(grad, scale, dtype=np.result_type(grad, np.float32)) for grad in grads]
            true = [quotient.astype(grad.dtype) for quotient, grad in zip(wide, grads, strict=True)]
        return ampx.Unscaled(true, all(np.isfinite(grad).all() for grad in true))

    def apply(self, optimizer: SGD, grads: Any) -> None:
        """Run the optimizer's own update."""
        optimizer.step(grads)

    def cast(self, tree: Any, dtype: str) -> Any:
        """Cast the floating arrays of a tree."""
        return map_floating(lambda leaf: leaf.astype(dtype), tree)

    def autocast(self, plan: ampx.CastPlan, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Return a region with casting off, which it is anyway; there is no switch that could turn it on."""
        if enabled:
            self.refuse("autocast regions (annotate functions with ampx.half_function)")
        return contextlib.nullcontext()

    def activate(self, plan: ampx.CastPlan) -> None:
        """Do nothing: annotated functions ask the session what to compute in."""

    def deactivate(self, plan: ampx.CastPlan) -> None:
        """Do nothing."""

    def wrap_optimizer(self, optimizer: SGD, member: Any, options: Mapping[str, Any]) -> ampx.WrappedOptimizer:
        """Wrap; float16 parameters lose small updates, and SGD keeps no float32 copies."""
        low = sum(parameter.dtype == np.float16 for parameter in optimizer.parameters)
        if low:
            raise ampx.LowPrecisionParametersError(
                f"wrap_optimizer got an optimizer with {low} float16 parameters; accepted: float32 and float64. Keep "
                f"the parameters in float32 and annotate functions with ampx.half_function."
            )
        return super().wrap_optimizer(optimizer, member, options)


def map_floating(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to the floating arrays of a tree; everything else stays as it is."""
    if isinstance(tree, dict):
        return {key: map_floating(function, tree[key]) for key in tree}
    if isinstance(tree, (list, tuple)):
        values = [map_floating(function, value) for value in tree]
        if isinstance(tree, list):
            return values
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    value = getval(tree)
    floating = isinstance(value, (np.ndarray, np.generic)) and np.issubdtype(value.dtype, np.floating)
    return function(tree) if floating else tree
