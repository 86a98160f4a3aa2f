"""Parameters of layers: named and initialised as `fluid` did, and shared by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle.base import unique_name
from paddle.base.layer_helper import LayerHelper


def name_layer(kind: str, name: str | None = None) -> LayerHelper:
    """Return a layer's helper, which makes names such as `fc_0.w_0`.

    In `unique_name.guard` they begin anew, as in fluid: so does the network of a script that loads what it saved.
    """
    return LayerHelper(kind, name=unique_name.generate(kind) if name is None else name)


def make_parameter(
    helper: LayerHelper, attr: Any, shape: Sequence[int], is_bias: bool = False, initializer: Any = None
) -> Any:
    """Return a float32 parameter of a layer.

    Args:
        helper: The layer's; it makes names such as `fc_0.w_0`.
        attr: A `ParamAttr`, a name, an initializer, None, or False for no parameter at all.
        shape: The parameter's shape.
        is_bias: Zeros by default, else as Xavier.
        initializer: The layer's default.

    Returns:
        The parameter. Where the program has one of the name that `attr` gives, that one: a parameter of this name in
        another program is the same variable anyway. None where `attr` is False.
    """
    if attr is False:
        return None
    described = paddle.ParamAttr._to_attr(attr)
    if described.name is not None:
        known = paddle.static.default_main_program().get_parameter_value_by_name(described.name)
        if known.initialized():
            return known
    return helper.create_parameter(
        attr=described, shape=list(shape), dtype="float32", is_bias=is_bias, default_initializer=initializer
    )


def make_statistic(helper: LayerHelper, name: str | None, shape: Sequence[int], value: float) -> Any:
    """Return a variable that is kept with the parameters but not trained."""
    attr = paddle.ParamAttr(name=name, initializer=paddle.nn.initializer.Constant(value), trainable=False)
    made = make_parameter(helper, attr, shape)
    made.stop_gradient = True
    return made
