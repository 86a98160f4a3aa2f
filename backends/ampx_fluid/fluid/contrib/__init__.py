"""`fluid.contrib`."""

from __future__ import annotations

from ampx_fluid.fluid.missing import refuse_missing

from . import mixed_precision

__all__ = ["mixed_precision"]

__getattr__ = refuse_missing(__name__)
