"""Optimizers by the names and arguments of `fluid`, on Paddle's own."""

from __future__ import annotations

from inspect import Parameter, Signature
from typing import Any, ClassVar, Final

import paddle

from .missing import refuse_missing
from .programs import raw

_REQUIRED: Final = Parameter.empty
_CLIPPED: Final = {"grad_clip": None, "name": None}
_DECAYED: Final = {"regularization": None, **_CLIPPED}
_ADAM: Final = {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "parameter_list": None}
# Paddle's class, and the arguments in fluid's order with fluid's defaults; but SGD's learning rate had none.
_OPTIMIZERS: Final[dict[str, tuple[type[Any], dict[str, Any]]]] = {
    "SGD": (paddle.optimizer.SGD, {"learning_rate": 0.001, "parameter_list": None, **_DECAYED}),
    "Momentum": (
        paddle.optimizer.Momentum,
        {"learning_rate": _REQUIRED, "momentum": _REQUIRED, "parameter_list": None, "use_nesterov": False, **_DECAYED},
    ),
    "Adam": (paddle.optimizer.Adam, {**_ADAM, **_DECAYED, "lazy_mode": False}),
    "Adamax": (paddle.optimizer.Adamax, {**_ADAM, **_DECAYED}),
    "Adagrad": (
        paddle.optimizer.Adagrad,
        {
            **{"learning_rate": _REQUIRED, "epsilon": 1e-6, "parameter_list": None},
            **_DECAYED,
            "initial_accumulator_value": 0.0,
        },
    ),
    "RMSProp": (
        paddle.optimizer.RMSProp,
        {
            **{"learning_rate": _REQUIRED, "rho": 0.95, "epsilon": 1e-6, "momentum": 0.0, "centered": False},
            **{"parameter_list": None, **_DECAYED},
        },
    ),
    "Lamb": (
        paddle.optimizer.Lamb,
        {
            **{"learning_rate": 0.001, "lamb_weight_decay": 0.01, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6},
            **{"parameter_list": None, "grad_clip": None, "exclude_from_weight_decay_fn": None, "name": None},
        },
    ),
}
# In a static graph `parameter_list` is None, or passed to minimize: Paddle takes all parameters then.
_RENAMED: Final = {"parameter_list": "parameters", "regularization": "weight_decay"}


class _Fluid(paddle.optimizer.Optimizer):
    """Takes its arguments, and `minimize`, as fluid did."""

    __signature__: ClassVar[Signature]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = self.__signature__.bind(*args, **kwargs)
        bound.apply_defaults()
        super().__init__(**{_RENAMED.get(name, name): value for name, value in bound.arguments.items()})

    def minimize(
        self,
        loss: Any,
        startup_program: Any = None,
        parameter_list: Any = None,
        no_grad_set: Any = None,
        parameters: Any = None,
    ) -> Any:
        """Add backward and update to the program that the loss belongs to.

        `parameter_list`, in Paddle `parameters`, has parameters or their names.
        """
        chosen = find_parameters(loss, parameter_list if parameters is None else parameters)
        with paddle.static.program_guard(loss.block.program, raw(startup_program)):
            return super().minimize(loss, raw(startup_program), chosen, no_grad_set)


def find_parameters(loss: Any, chosen: Any) -> Any:
    """Return parameters of the loss's program for parameters or their names; None stays None."""
    if chosen is None:
        return None
    names = [item if isinstance(item, str) else item.name for item in chosen]
    return [loss.block.program.get_parameter_value_by_name(name) for name in names]


for _name, (_base, _arguments) in _OPTIMIZERS.items():
    _parameters = [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=value) for name, value in _arguments.items()
    ]
    globals()[_name] = globals()[f"{_name}Optimizer"] = type(
        f"{_name}Optimizer", (_Fluid, _base), {"__module__": __name__, "__signature__": Signature(_parameters)}
    )

__all__ = [*_OPTIMIZERS, *(f"{_name}Optimizer" for _name in _OPTIMIZERS)]

__getattr__ = refuse_missing(__name__)
