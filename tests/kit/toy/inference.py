"""Conversion of the toy's models for inference."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np

from ampx.backend import Array
from ampx.shipping.converter import Conversion, Converted, Converter
from ampx.shipping.layers import arguments, check_computed, check_fits, denied_names, leaves_first, named_outputs
from toy.framework import FLOATING, Dense, Module, Norm, Tensor


class LowDense(Dense):
    """Casts its input to the dtype of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return super().forward(x.to(self.parameters["weight"].dtype))


class Border(Module):
    """A whole model that returns one dtype."""

    dtype = "float32"

    def forward(self, x: Tensor) -> Tensor:
        """Run the modules inside."""
        return super().forward(x).to(self.dtype)


class ToyConverter(Converter):
    """Converts the toy's modules."""

    def convert(self, model: Module, conversion: Conversion) -> Converted:
        """Round the weights of a copy."""
        check_computed(self.backend, "cpu", conversion.dtype)
        denied = denied_names(conversion.deny, dict(model.named_modules()))
        copied = copy.deepcopy(model)
        border = Border(**copied.modules)
        border.dtype = "float32" if conversion.keep_io else conversion.dtype
        lowered = {
            name: module
            for name, module in copied.named_modules()
            if module.parameters and name not in denied and not isinstance(module, Norm)
        }
        check_fits(
            conversion.dtype,
            {name: max(map(abs, module.parameters["weight"].data)) for name, module in lowered.items()},
        )
        for module in lowered.values():
            weight = module.parameters["weight"]
            module.parameters["weight"] = Tensor(weight.data, conversion.dtype)
            module.__class__ = LowDense
        return Converted(border, leaves_first([name for name, _ in copied.named_modules() if name not in denied]))

    def infer(self, model: Module, batch: Any) -> Mapping[str, Array]:
        """Call a model."""
        args, _ = arguments(batch)
        return named_outputs(model(*args), self._array)

    @staticmethod
    def _array(value: Any) -> Array | None:
        if not isinstance(value, Tensor):
            return None
        return np.array(value.data, np.float32 if value.dtype in FLOATING else None)
