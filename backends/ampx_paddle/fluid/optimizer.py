"""Optimizers by the names and arguments of `fluid`, on Paddle's own."""

from __future__ import annotations

from typing import Any

import paddle

from .missing import refuse_missing
from .programs import raw

__all__ = [
    "SGD",
    "Adagrad",
    "AdagradOptimizer",
    "Adam",
    "AdamOptimizer",
    "Adamax",
    "AdamaxOptimizer",
    "Lamb",
    "LambOptimizer",
    "Momentum",
    "MomentumOptimizer",
    "RMSProp",
    "RMSPropOptimizer",
    "SGDOptimizer",
]


class _Fluid(paddle.optimizer.Optimizer):  # type: ignore[misc]
    """Takes `minimize` as fluid did."""

    def minimize(
        self,
        loss: Any,
        startup_program: Any = None,
        parameter_list: Any = None,
        no_grad_set: Any = None,
        parameters: Any = None,
    ) -> Any:
        """Add backward and update to the program that the loss belongs to.

        Args:
            loss: Value of one element.
            startup_program: Initialises what the optimizer keeps; None for the default one.
            parameter_list: Parameters to update; None for all.
            no_grad_set: Values to compute no gradient for.
            parameters: Paddle's name for `parameter_list`.

        Returns:
            As Paddle's `minimize`.
        """
        chosen = find_parameters(loss, parameter_list if parameters is None else parameters)
        with paddle.static.program_guard(loss.block.program, raw(startup_program)):
            return super().minimize(loss, raw(startup_program), chosen, no_grad_set)


def find_parameters(loss: Any, chosen: Any) -> Any:
    """Return parameters of the loss's program for parameters or their names; None stays None."""
    if chosen is None:
        return None
    program = loss.block.program
    names = [one if isinstance(one, str) else one.name for one in chosen]
    return [program.get_parameter_value_by_name(name) for name in names]


def _options(learning_rate: Any, parameter_list: Any, regularization: Any, grad_clip: Any, name: Any) -> dict[str, Any]:
    # In a static graph `parameter_list` is None, or given to minimize: Paddle takes all parameters then.
    return {
        "learning_rate": learning_rate,
        "parameters": parameter_list,
        "weight_decay": regularization,
        "grad_clip": grad_clip,
        "name": name,
    }


class SGDOptimizer(_Fluid, paddle.optimizer.SGD):  # type: ignore[misc]
    """Stochastic gradient descent."""

    def __init__(
        self,
        learning_rate: Any = 0.001,
        parameter_list: Any = None,
        regularization: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        """Take fluid's arguments; fluid had no default for `learning_rate`."""
        super().__init__(**_options(learning_rate, parameter_list, regularization, grad_clip, name))


class MomentumOptimizer(_Fluid, paddle.optimizer.Momentum):  # type: ignore[misc]
    """Gradient descent with momentum."""

    def __init__(
        self,
        learning_rate: Any,
        momentum: float,
        parameter_list: Any = None,
        use_nesterov: bool = False,
        regularization: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        """Take fluid's arguments."""
        options = _options(learning_rate, parameter_list, regularization, grad_clip, name)
        super().__init__(momentum=momentum, use_nesterov=use_nesterov, **options)


class AdamOptimizer(_Fluid, paddle.optimizer.Adam):  # type: ignore[misc]
    """Adam."""

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameter_list: Any = None,
        regularization: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
        lazy_mode: bool = False,
    ) -> None:
        """Take fluid's arguments."""
        options = _options(learning_rate, parameter_list, regularization, grad_clip, name)
        super().__init__(beta1=beta1, beta2=beta2, epsilon=epsilon, lazy_mode=lazy_mode, **options)


class AdamaxOptimizer(_Fluid, paddle.optimizer.Adamax):  # type: ignore[misc]
    """Adamax."""

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameter_list: Any = None,
        regularization: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        """Take fluid's arguments."""
        options = _options(learning_rate, parameter_list, regularization, grad_clip, name)
        super().__init__(beta1=beta1, beta2=beta2, epsilon=epsilon, **options)


class AdagradOptimizer(_Fluid, paddle.optimizer.Adagrad):  # type: ignore[misc]
    """Adagrad."""

    def __init__(
        self,
        learning_rate: Any,
        epsilon: float = 1e-6,
        parameter_list: Any = None,
        regularization: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
        initial_accumulator_value: float = 0.0,
    ) -> None:
        """Take fluid's arguments."""
        options = _options(learning_rate, parameter_list, regularization, grad_clip, name)
        super().__init__(epsilon=epsilon, initial_accumulator_value=initial_accumulator_value, **options)


class RMSPropOptimizer(_Fluid, paddle.optimizer.RMSProp):  # type: ignore[misc]
    """RMSProp."""

    def __init__(
        self,
        learning_rate: Any,
        rho: float = 0.95,
        epsilon: float = 1e-6,
        momentum: float = 0.0,
        centered: bool = False,
        parameter_list: Any = None,
        regularization: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        """Take fluid's arguments."""
        options = _options(learning_rate, parameter_list, regularization, grad_clip, name)
        super().__init__(rho=rho, epsilon=epsilon, momentum=momentum, centered=centered, **options)


class LambOptimizer(_Fluid, paddle.optimizer.Lamb):  # type: ignore[misc]
    """LAMB."""

    def __init__(
        self,
        learning_rate: Any = 0.001,
        lamb_weight_decay: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        parameter_list: Any = None,
        grad_clip: Any = None,
        exclude_from_weight_decay_fn: Any = None,
        name: str | None = None,
    ) -> None:
        """Take fluid's arguments."""
        options = _options(learning_rate, parameter_list, None, grad_clip, name)
        options.pop("weight_decay")
        super().__init__(
            lamb_weight_decay=lamb_weight_decay,
            beta1=beta1,
            beta2=beta2,
            epsilon=epsilon,
            exclude_from_weight_decay_fn=exclude_from_weight_decay_fn,
            **options,
        )


SGD, Momentum, Adam, Adamax = SGDOptimizer, MomentumOptimizer, AdamOptimizer, AdamaxOptimizer
Adagrad, RMSProp, Lamb = AdagradOptimizer, RMSPropOptimizer, LambOptimizer

__getattr__ = refuse_missing(__name__)
