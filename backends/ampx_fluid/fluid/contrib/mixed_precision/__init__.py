"""`fluid.contrib.mixed_precision`."""

from __future__ import annotations

from ampx_fluid.fluid.missing import refuse_missing

from . import decorator, fp16_lists
from .decorator import decorate
from .fp16_lists import AutoMixedPrecisionLists

__all__ = ["AutoMixedPrecisionLists", "decorate", "decorator", "fp16_lists"]

__getattr__ = refuse_missing(__name__)
