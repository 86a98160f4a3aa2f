"""Layers with parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
from paddle.base.layer_helper import LayerHelper
from paddle.nn import functional
from paddle.nn.initializer import Constant, Normal

from ampx.errors import UnsupportedByBackendError
from ampx_paddle.fluid.parameters import make_parameter, make_statistic, name_layer

from .activations import activate

__all__ = ["batch_norm", "conv2d", "conv2d_transpose", "dropout", "embedding", "fc", "layer_norm", "pool2d"]


def fc(
    input: Any,
    size: int,
    num_flatten_dims: int = 1,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    name: str | None = None,
) -> Any:
    """Return products with weights, plus a bias.

    Args:
        input: A tensor, or several whose products are added.
        size: How many outputs.
        num_flatten_dims: How many axes in front stay; the others are taken as one.
        param_attr: Of the weights, or a list of such.
        bias_attr: Of the bias; False for none.
        act: Name of an activation.
        name: The start of the parameters' names.
    """
    helper = name_layer("fc", name)
    inputs = list(input) if isinstance(input, (list, tuple)) else [input]
    attrs = list(param_attr) if isinstance(param_attr, (list, tuple)) else [param_attr] * len(inputs)
    total = None
    for one, attr in zip(inputs, attrs, strict=True):
        width = int(np.prod(one.shape[num_flatten_dims:]))
        weight = make_parameter(helper, attr, [width, size])
        flat = one if len(one.shape) == num_flatten_dims + 1 else paddle.reshape(one, [0] * num_flatten_dims + [width])
        product = paddle.matmul(flat, weight)
        total = product if total is None else total + product
    bias = make_parameter(helper, bias_attr, [size], is_bias=True)
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
    helper = name_layer("conv2d", name)
    kernel, count = _pair(filter_size), groups or 1
    channels = input.shape[_channels(data_format)]
    spread = (2.0 / (kernel[0] * kernel[1] * channels)) ** 0.5
    weight = make_parameter(
        helper, param_attr, [num_filters, channels // count, *kernel], initializer=Normal(0.0, spread)
    )
    out = functional.conv2d(input, weight, None, stride, padding, dilation, count, data_format)
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
    """Convolve backwards; the arguments are fluid's, but `filter_size` must be given."""
    if filter_size is None:
        raise UnsupportedByBackendError(
            "conv2d_transpose got no filter_size; accepted: a number or a pair. Pass it; output_size may stand beside."
        )
    helper = name_layer("conv2d_transpose", name)
    count, channels = groups or 1, input.shape[_channels(data_format)]
    weight = make_parameter(helper, param_attr, [channels, num_filters // count, *_pair(filter_size)])
    out = functional.conv2d_transpose(
        input,
        weight,
        stride=stride,
        padding=padding,
        groups=count,
        dilation=dilation,
        output_size=output_size,
        data_format=data_format,
    )
    return activate(_with_bias(helper, out, bias_attr, num_filters, data_format), act)


def _with_bias(helper: LayerHelper, value: Any, attr: Any, size: int, data_format: str) -> Any:
    bias = make_parameter(helper, attr, [size], is_bias=True)
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
    size = input.shape[2:] if data_format == "NCHW" else input.shape[1:3]
    options = {"ceil_mode": ceil_mode, "data_format": data_format}
    kernel = list(size) if global_pooling else pool_size
    stride, padding = (1, 0) if global_pooling else (pool_stride, pool_padding)
    if pool_type == "max":
        return functional.max_pool2d(input, kernel, stride, padding, **options)
    if pool_type != "avg":
        raise UnsupportedByBackendError(f"pool_type={pool_type!r} is not known; accepted: 'max', 'avg'. Pass one.")
    return functional.avg_pool2d(input, kernel, stride, padding, exclusive=exclusive, **options)


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
    helper = name_layer("batch_norm", name)
    axis = 1 if len(input.shape) == 2 else _channels(data_layout)
    size = [input.shape[axis]]
    scale = make_parameter(helper, param_attr, size, initializer=Constant(1.0))
    shift = make_parameter(helper, bias_attr, size, is_bias=True)
    mean = make_statistic(helper, moving_mean_name, size, 0.0)
    variance = make_statistic(helper, moving_variance_name, size, 1.0)
    normalised = functional.batch_norm(
        input,
        mean,
        variance,
        scale,
        shift,
        training=not is_test,
        momentum=momentum,
        epsilon=epsilon,
        data_format="NC" if len(input.shape) == 2 else data_layout,
        use_global_stats=use_global_stats or None,
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
    helper = name_layer("layer_norm", name)
    shape = list(input.shape[begin_norm_axis:])
    size = [int(np.prod(shape))]
    weight = make_parameter(helper, param_attr, size, initializer=Constant(1.0)) if scale else None
    bias = make_parameter(helper, bias_attr, size, is_bias=True) if shift else None
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
    """Look rows up.

    Args:
        input: Numbers of rows, of shape (..., 1); the last axis is replaced.
        size: Rows and columns of the table.
        is_sparse: The gradient is dense whatever this says: it changes the speed and not the numbers.
        is_distributed: False; parameter servers are gone.
        padding_idx: Row that gives zeros.
        param_attr: Of the table.
        dtype: `"float32"`.
    """
    if is_distributed or str(dtype) != "float32":
        raise UnsupportedByBackendError(
            f"embedding got is_distributed={is_distributed}, dtype={dtype!r}; accepted: False and 'float32'. Leave "
            f"them out."
        )
    table = make_parameter(name_layer("embedding"), param_attr, size)
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


def _pair(size: Any) -> list[int]:
    return [int(one) for one in size] if isinstance(size, (list, tuple)) else [int(size)] * 2


def _channels(data_format: str) -> int:
    return 1 if data_format == "NCHW" else 3
