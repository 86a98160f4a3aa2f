"""Mistakes in the conversion of models for inference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

from ampx.shipping.converter import Conversion, Converted
from toy import inference
from toy.framework import Dropout, Module
from toy.inference import ToyConverter

Convert = Callable[[ToyConverter, Module, Conversion], Converted]


def asked(**others: Any) -> Convert:
    """Convert as if something else had been asked for."""
    return lambda self, model, conversion: ToyConverter.convert(self, model, replace(conversion, **others))


def in_place(self: ToyConverter, model: Module, conversion: Conversion) -> Converted:
    """Round the weights of the model itself."""
    with mock.patch.object(copy, "deepcopy", lambda model: model):
        return ToyConverter.convert(self, model, conversion)


def norms_too(self: ToyConverter, model: Module, conversion: Conversion) -> Converted:
    """Round the weights of normalization, too."""
    with mock.patch.object(inference, "Norm", Dropout):
        return ToyConverter.convert(self, model, conversion)


def names_nothing(self: ToyConverter, model: Module, conversion: Conversion) -> Converted:
    """Say that no module could be denied."""
    return ToyConverter.convert(self, model, conversion)._replace(modules=())
