"""`fluid.nets`: convolutions with pooling behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import layers
from .missing import refuse_missing

__all__ = ["img_conv_group", "simple_img_conv_pool"]


def simple_img_conv_pool(
    input: Any,
    num_filters: int,
    filter_size: Any,
    pool_size: Any,
    pool_stride: Any,
    pool_padding: Any = 0,
    pool_type: str = "max",
    global_pooling: bool = False,
    conv_stride: Any = 1,
    conv_padding: Any = 0,
    conv_dilation: Any = 1,
    conv_groups: int = 1,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    use_cudnn: bool = True,
) -> Any:
    """Convolve, then pool; the arguments are fluid's."""
    conv = (num_filters, filter_size, conv_stride, conv_padding, conv_dilation, conv_groups, param_attr, bias_attr)
    out = layers.conv2d(input, *conv, act=act)
    return layers.pool2d(out, pool_size, pool_type, pool_stride, pool_padding, global_pooling)


def img_conv_group(
    input: Any,
    conv_num_filter: Sequence[int],
    pool_size: Any,
    conv_padding: Any = 1,
    conv_filter_size: Any = 3,
    conv_act: str | None = None,
    param_attr: Any = None,
    conv_with_batchnorm: Any = False,
    conv_batchnorm_drop_rate: Any = 0.0,
    pool_stride: Any = 1,
    pool_type: str = "max",
    use_cudnn: bool = True,
) -> Any:
    """Convolve several times, with batch normalisation and dropout if asked, then pool; the arguments are fluid's."""
    count = len(conv_num_filter)

    def each(value: Any) -> list[Any]:
        return list(value) if isinstance(value, (list, tuple)) else [value] * count

    settings = (conv_padding, conv_filter_size, param_attr, conv_with_batchnorm, conv_batchnorm_drop_rate)
    out = input
    for filters, padding, size, attr, normalises, drop_rate in zip(conv_num_filter, *map(each, settings), strict=True):
        act = None if normalises else conv_act
        out = layers.conv2d(out, filters, size, padding=padding, param_attr=attr, act=act)
        if normalises:
            out = layers.batch_norm(out, act=conv_act)
            out = layers.dropout(out, drop_rate) if drop_rate else out
    return layers.pool2d(out, pool_size, pool_type, pool_stride)


__getattr__ = refuse_missing(__name__)
