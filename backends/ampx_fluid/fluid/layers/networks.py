"""Layers with parameters, which are named and initialised as `fluid` did, and shared by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import paddle
from paddle.base import unique_name
from paddle.base.layer_helper import LayerHelper
from paddle.nn import functional
from paddle.nn.initializer import Constant, Normal

from ampx.errors import InvalidOptionError, UnsupportedByBackendError

__all__ = [
    "batch_norm",
    "conv2d",
    "conv2d_transpose",
    "create_parameter",
    "dropout",
    "embedding",
    "fc",
    "layer_norm",
    "pool2d",
]

# The `act` argument of layers.
_ACTS: Final[dict[str, Callable[[Any], Any]]] = {
    "relu": functional.relu,
    "relu6": lambda x: paddle.clip(x, 0.0, 6.0),
    "leaky_relu": lambda x: functional.leaky_relu(x, 0.02),
    "elu": functional.elu,
    "sigmoid": functional.sigmoid,
    "tanh": paddle.tanh,
    "softplus": functional.softplus,
    "softmax": functional.softmax,
}


def activate(value: Any, act: str | None) -> Any:
    """Apply what a layer got as `act`."""
    if act is None:
        return value
    if act not in _ACTS:
        raise InvalidOptionError(f"act={act!r} is not known; accepted: {', '.join(_ACTS)}, or None. Pass one of these.")
    return _ACTS[act](value)


def _name_layer(kind: str, name: str | None = None) -> LayerHelper:
    """Return a layer's helper, which makes names such as `fc_0.w_0`.

    In `unique_name.guard` they begin anew, as in fluid: so does the network of a script that loads what it saved.
    """
    return LayerHelper(kind, name=unique_name.generate(kind) if name is None else name)


def _make_parameter(
    helper: LayerHelper, attr: Any, shape: Sequence[int], is_bias: bool = False, initializer: Any = None
) -> Any:
    """Return a float32 parameter of a layer; None where `attr` is False.

    Where the program has one of the name that `attr` says, that one: a parameter of this name in another program is the
    same variable anyway.
    """
    if attr is False:
        return None
    attr = paddle.ParamAttr._to_attr(attr)
    if attr.name is not None:
        present = paddle.static.default_main_program().get_parameter_value_by_name(attr.name)
        if present.initialized():
            return present
    return helper.create_parameter(
        attr=attr, shape=list(shape), dtype="float32", is_bias=is_bias, default_initializer=initializer
    )


def _make_statistic(helper: LayerHelper, name: str | None, shape: Sequence[int], value: float) -> Any:
    """Return a variable that is kept with the parameters but not trained."""
    statistic = _make_parameter(
        helper, paddle.ParamAttr(name=name, initializer=Constant(value), trainable=False), shape
    )
    statistic.stop_gradient = True
    return statistic


def create_parameter(
    shape: Sequence[int],
    dtype: str,
    name: str | None = None,
    attr: Any = None,
    is_bias: bool = False,
    default_initializer: Any = None,
) -> Any:
    """Return a parameter, by a name if wanted; float32 only."""
    if str(dtype) != "float32":
        raise UnsupportedByBackendError(
            f"create_parameter got dtype={dtype!r}; accepted: 'float32'. Casting is decorate's work."
        )
    attr = paddle.ParamAttr._to_attr(attr)
    if name is not None and attr.name is None:
        attr.name = name
    return _make_parameter(_name_layer("create_parameter"), attr, shape, is_bias, default_initializer)


def fc(
    input: Any,
    size: int,
    num_flatten_dims: int = 1,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    name: str | None = None,
) -> Any:
    """Return products with weights, plus a bias; the products of several inputs are added.

    Args:
        input: A tensor or several.
        size: How many outputs.
        num_flatten_dims: How many axes in front stay; the others are taken as one.
        param_attr: Of the weights, or a list of such.
        bias_attr: Of the bias; False for none.
        act: Name of an activation.
        name: The start of the parameters' names.
    """
    helper = _name_layer("fc", name)
    inputs = list(input) if isinstance(input, (list, tuple)) else [input]
    attrs = list(param_attr) if isinstance(param_attr, (list, tuple)) else [param_attr] * len(inputs)
    total = None
    for value, attr in zip(inputs, attrs, strict=True):
        width = int(np.prod(value.shape[num_flatten_dims:]))
        weight = _make_parameter(helper, attr, [width, size])
        if len(value.shape) != num_flatten_dims + 1:
            value = paddle.reshape(value, [0] * num_flatten_dims + [width])
        product = paddle.matmul(value, weight)
        total = product if total is None else total + product
    bias = _make_parameter(helper, bias_attr, [size], is_bias=True)
    return activate(total if bias is None else total + bias, act)


def conv2d(
    input: Any,
    num_filters: int,
    filter_size: Any,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int | None = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    use_cudnn: bool = True,
    act: str | None = None,
    name: str | None = None,
    data_format: str = "NCHW",
) -> Any:
    """Convolve images; the arguments are fluid's, and `use_cudnn` is Paddle's own choice."""
    helper = _name_layer("conv2d", name)
    kernel, groups = _pair(filter_size), groups or 1
    channels = input.shape[_channels(data_format)]
    spread = (2.0 / (kernel[0] * kernel[1] * channels)) ** 0.5
    shape = [num_filters, channels // groups, *kernel]
    weight = _make_parameter(helper, param_attr, shape, initializer=Normal(0.0, spread))
    out = functional.conv2d(input, weight, None, stride, padding, dilation, groups, data_format)
    return activate(_with_bias(helper, out, bias_attr, num_filters, data_format), act)


def conv2d_transpose(
    input: Any,
    num_filters: int,
    output_size: Any = None,
    filter_size: Any = None,
    padding: Any = 0,
    stride: Any = 1,
    dilation: Any = 1,
    groups: int | None = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    use_cudnn: bool = True,
    act: str | None = None,
    name: str | None = None,
    data_format: str = "NCHW",
) -> Any:
    """Convolve backwards; the arguments are fluid's, but `filter_size` is needed."""
    if filter_size is None:
        raise UnsupportedByBackendError(
            "conv2d_transpose got no filter_size; accepted: a number or a pair. Pass it; output_size may stand beside."
        )
    helper = _name_layer("conv2d_transpose", name)
    groups = groups or 1
    shape = [input.shape[_channels(data_format)], num_filters // groups, *_pair(filter_size)]
    weight = _make_parameter(helper, param_attr, shape)
    out = functional.conv2d_transpose(
        input, weight, None, stride, padding, 0, dilation, groups, output_size, data_format
    )
    return activate(_with_bias(helper, out, bias_attr, num_filters, data_format), act)


def _pair(size: Any) -> list[int]:
    return [int(item) for item in size] if isinstance(size, (list, tuple)) else [int(size)] * 2


def _channels(data_format: str) -> int:
    return 1 if data_format == "NCHW" else 3


def _with_bias(helper: LayerHelper, value: Any, attr: Any, size: int, data_format: str) -> Any:
    bias = _make_parameter(helper, attr, [size], is_bias=True)
    if bias is None:
        return value
    return value + (paddle.reshape(bias, [1, size, 1, 1]) if data_format == "NCHW" else bias)


def pool2d(
    input: Any,
    pool_size: Any = -1,
    pool_type: str = "max",
    pool_stride: Any = 1,
    pool_padding: Any = 0,
    global_pooling: bool = False,
    use_cudnn: bool = True,
    ceil_mode: bool = False,
    name: str | None = None,
    exclusive: bool = True,
    data_format: str = "NCHW",
) -> Any:
    """Return the largest or the mean value of every window; the arguments are fluid's."""
    options = {"ceil_mode": ceil_mode, "data_format": data_format}
    if global_pooling:
        pool_size = list(input.shape[2:] if data_format == "NCHW" else input.shape[1:3])
        pool_stride, pool_padding = 1, 0
    if pool_type == "max":
        return functional.max_pool2d(input, pool_size, pool_stride, pool_padding, **options)
    if pool_type != "avg":
        raise UnsupportedByBackendError(f"pool_type={pool_type!r} is not known; accepted: 'max', 'avg'. Pass one.")
    return functional.avg_pool2d(input, pool_size, pool_stride, pool_padding, exclusive=exclusive, **options)


def batch_norm(
    input: Any,
    act: str | None = None,
    is_test: bool = False,
    momentum: float = 0.9,
    epsilon: float = 1e-5,
    param_attr: Any = None,
    bias_attr: Any = None,
    data_layout: str = "NCHW",
    in_place: bool = False,
    name: str | None = None,
    moving_mean_name: str | None = None,
    moving_variance_name: str | None = None,
    do_model_average_for_mean_and_var: bool = True,
    use_global_stats: bool = False,
) -> Any:
    """Normalise by the statistics of the batch, or by those kept with the parameters; the arguments are fluid's."""
    helper = _name_layer("batch_norm", name)
    flat = len(input.shape) == 2
    size = [input.shape[1 if flat else _channels(data_layout)]]
    scale = _make_parameter(helper, param_attr, size, initializer=Constant(1.0))
    shift = _make_parameter(helper, bias_attr, size, is_bias=True)
    mean = _make_statistic(helper, moving_mean_name, size, 0.0)
    variance = _make_statistic(helper, moving_variance_name, size, 1.0)
    layout, statistics = "NC" if flat else data_layout, use_global_stats or None
    normalised = functional.batch_norm(
        input, mean, variance, scale, shift, not is_test, momentum, epsilon, layout, statistics
    )
    return activate(normalised, act)


def layer_norm(
    input: Any,
    scale: bool = True,
    shift: bool = True,
    begin_norm_axis: int = 1,
    epsilon: float = 1e-5,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    name: str | None = None,
) -> Any:
    """Normalise every sample over the axes from `begin_norm_axis` on; the arguments are fluid's."""
    helper = _name_layer("layer_norm", name)
    shape = list(input.shape[begin_norm_axis:])
    size = [int(np.prod(shape))]
    weight = _make_parameter(helper, param_attr, size, initializer=Constant(1.0)) if scale else None
    bias = _make_parameter(helper, bias_attr, size, is_bias=True) if shift else None
    return activate(functional.layer_norm(input, shape, weight, bias, epsilon), act)


def embedding(
    input: Any,
    size: Sequence[int],
    is_sparse: bool = False,
    is_distributed: bool = False,
    padding_idx: int | None = None,
    param_attr: Any = None,
    dtype: str = "float32",
) -> Any:
    """Look rows up by numbers of shape (..., 1), whose last axis is replaced; `padding_idx` is a row of zeros.

    The gradient is dense whatever `is_sparse` says: it changes the speed and not the numbers.
    """
    if is_distributed or str(dtype) != "float32":
        raise UnsupportedByBackendError(
            f"embedding got is_distributed={is_distributed}, dtype={dtype!r}; accepted: False and 'float32'. Leave "
            f"them out."
        )
    table = _make_parameter(_name_layer("embedding"), param_attr, size)
    rows = paddle.squeeze(input, -1) if input.shape[-1] == 1 else input
    return functional.embedding(rows, table, padding_idx=padding_idx)


def dropout(
    x: Any,
    dropout_prob: float,
    is_test: bool = False,
    seed: int | None = None,
    name: str | None = None,
    dropout_implementation: str = "downgrade_in_infer",
) -> Any:
    """Set elements to zero by chance; a seed is refused, as `Program.random_seed` is for."""
    if seed:
        raise UnsupportedByBackendError(
            f"dropout got seed={seed}; accepted: None. Set the random_seed of the startup program instead."
        )
    mode = {"downgrade_in_infer": "downscale_in_infer"}.get(dropout_implementation, dropout_implementation)
    return functional.dropout(x, dropout_prob, training=not is_test, mode=mode)
