"""Trained Paddle layers in low precision: a copy whose weights are cast, as an inference program.

Paddle's own `paddle.inference.convert_to_mixed_precision` reads no program of Paddle 3, whose files are JSON now, and
needs a GPU build. So a copy of the layer gets low weights, is traced with the casts between its layers, saved and
loaded: eager Paddle has no low-precision kernels on a CPU, and programs have those of bfloat16.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import paddle

from ampx.backend import Array, Backend, map_leaves
from ampx.errors import ConversionError, InvalidOptionError, UnsupportedDtypeError
from ampx.shipping import layers as shipping
from ampx.shipping.converter import Conversion, Converted, Converter

from . import devices
from .calls import named
from .casting import LOW

_NORMS: Final = tuple(
    getattr(paddle.nn, name)
    for name in (
        *("BatchNorm", "BatchNorm1D", "BatchNorm2D", "BatchNorm3D", "SyncBatchNorm", "LayerNorm", "GroupNorm"),
        *("InstanceNorm1D", "InstanceNorm2D", "InstanceNorm3D", "LocalResponseNorm", "RMSNorm"),
    )
    if hasattr(paddle.nn, name)
)
_FLOATS: Final = (paddle.float16, paddle.bfloat16, paddle.float32)


def convert(backend: Backend, model: Any, conversion: Conversion) -> Converted:
    """Convert a layer to an inference program, which is a layer, too: save it by `paddle.jit.save`."""
    _check(model)
    _check_computed(backend, conversion.dtype)
    if not conversion.keep_io and paddle.get_device() == "cpu":
        raise InvalidOptionError(
            "keep_io=False asks for low-precision outputs, and a program that returns one ends Paddle 3 on a CPU by a "
            "segmentation fault; accepted on 'cpu': keep_io=True. Pass that, or convert on a GPU."
        )
    if conversion.batch is None:
        raise InvalidOptionError(
            "convert got no batch, and has to trace the layer to make an inference program of it; accepted: "
            "batches=[…] with one batch at least. Pass some of what the layer is called with."
        )
    layers = dict(named(model))
    denied = shipping.denied_names(conversion.deny, layers)
    copied = copy.deepcopy(model)
    copied.eval()
    if conversion.dtype != "float32":
        _lower(copied, denied, conversion)
    for parameter in copied.parameters():
        parameter.stop_gradient = True
    names = [name for name in layers if name not in denied]
    return Converted(_program(copied, conversion.batch), shipping.leaves_first(names))


def infer(model: Any, batch: Any) -> Mapping[str, Array]:
    """Call an inference program."""
    with paddle.no_grad():
        return shipping.named_outputs(model(*_arrays(batch)), _array)


def _array(value: Any) -> Array | None:
    if not isinstance(value, paddle.Tensor):
        return None
    return np.asarray((value.astype("float32") if value.dtype in _FLOATS else value).numpy())


def _arrays(batch: Any) -> tuple[Any, ...]:
    return shipping.positional(batch, paddle.Tensor, "tensors of Paddle, which inference programs take")


def _check(model: Any) -> None:
    if not isinstance(model, paddle.nn.Layer) or isinstance(model, paddle.DataParallel):
        raise InvalidOptionError(
            f"convert got {type(model).__name__}; accepted: a paddle.nn.Layer that is not wrapped. Pass the layer "
            f"itself; of paddle.Model, model.network; of paddle.DataParallel, model._layers."
        )
    shipping.check_float32([name for name, value in model.state_dict().items() if value.dtype in LOW])


def _check_computed(backend: Backend, dtype: str) -> None:
    if paddle.get_device() != "cpu":
        shipping.check_computed(backend, paddle.get_device(), dtype)
        return
    computed = {"float32", *(["bfloat16"] if devices.programs_compute_bfloat16() else [])}
    if dtype not in computed:
        raise UnsupportedDtypeError(
            f"dtype={dtype!r} is not computed by programs of Paddle on 'cpu', where the model is; accepted: "
            f"{', '.join(sorted(computed))}. Choose one of these, or move the model to a device that computes it."
        )


def _own(layer: Any) -> list[Any]:
    """Return a layer's own weights and buffers, those of the layers inside left out."""
    return [value for table in (layer._parameters, layer._buffers) for value in table.values() if value is not None]


def _kept(copied: Any, denied: frozenset[str]) -> set[str]:
    """Name the layers that stay in float32: those denied, norms, and what shares a weight with one that stays."""
    kept: set[str] = set()
    more = {name for name, layer in named(copied) if name in denied or isinstance(layer, _NORMS)}
    while more > kept:
        kept = more
        wide = {id(value) for name, layer in named(copied) if name in kept for value in _own(layer)}
        more = kept | {name for name, layer in named(copied) if not wide.isdisjoint(map(id, _own(layer)))}
    return kept


def _lower(copied: Any, denied: frozenset[str], conversion: Conversion) -> None:
    """Cast the weights of a copy, and what its layers receive."""
    kept = _kept(copied, denied)
    lowered: dict[int, tuple[str, Any]] = {}
    for name, layer in named(copied):
        if name in kept:
            layer.register_forward_pre_hook(_Received("float32"))
            if isinstance(layer, _NORMS) and name not in denied:
                layer.register_forward_post_hook(_Returned(conversion.dtype))
            continue
        floats = [value for value in _own(layer) if value.dtype == paddle.float32]
        lowered |= {id(value): (name, value) for value in floats}
        if floats:
            layer.register_forward_pre_hook(_Received(conversion.dtype))
    magnitudes = {f"{name}: {value.name}": shipping.largest(value.numpy()) for name, value in lowered.values()}
    shipping.check_fits(conversion.dtype, magnitudes)
    for _, value in lowered.values():
        low = value.astype(conversion.dtype)
        value.get_tensor()._share_data_with(low.get_tensor())
    copied.register_forward_post_hook(_Returned("float32" if conversion.keep_io else conversion.dtype))


class _Received:
    """Hook before a forward: casts floating arguments."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def __call__(self, layer: Any, args: Any) -> Any:
        """Cast."""
        return map_leaves(args, lambda value: _cast(value, self.dtype))


class _Returned(_Received):
    """Hook after a forward: casts floating outputs."""

    def __call__(self, layer: Any, args: Any, outputs: Any = None) -> Any:
        """Cast."""
        return map_leaves(outputs, lambda value: _cast(value, self.dtype))


def _cast(value: Any, dtype: str) -> Any:
    floating = getattr(value, "dtype", None) in _FLOATS or str(getattr(value, "dtype", "")) in {
        "paddle.float16",
        "paddle.bfloat16",
        "paddle.float32",
    }
    return value.astype(dtype) if floating else value


def _program(layer: Any, batch: Any) -> Any:
    specs = [
        paddle.static.InputSpec([None, *value.shape[1:]], value.dtype, name=f"input_{place}")
        for place, value in enumerate(_arrays(batch))
    ]
    try:
        with tempfile.TemporaryDirectory() as folder, paddle.no_grad():
            path = str(Path(folder) / "model")
            paddle.jit.save(paddle.jit.to_static(layer, full_graph=True, input_spec=specs), path)
            loaded = paddle.jit.load(path)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        raise ConversionError(
            f"convert cannot make an inference program of {type(layer).__name__} ({type(error).__name__}: "
            f"{lines[-1]}); accepted: layers that paddle.jit.save saves, whose operations compute in the dtype. Keep "
            f"in float32 what mixes dtypes, by deny=['module:…']."
        ) from error
    loaded.eval()
    return loaded


class PaddleConverter(Converter):
    """Converts layers of Paddle."""

    infer = staticmethod(infer)

    def convert(self, model: Any, conversion: Conversion) -> Converted:
        return convert(self.backend, model, conversion)
