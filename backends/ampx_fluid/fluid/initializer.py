"""`fluid.initializer`: Paddle 3 keeps the classes under other names."""

from __future__ import annotations

from paddle.nn.initializer import Bilinear as BilinearInitializer
from paddle.nn.initializer.assign import NumpyArrayInitializer
from paddle.nn.initializer.constant import ConstantInitializer
from paddle.nn.initializer.kaiming import MSRAInitializer
from paddle.nn.initializer.normal import NormalInitializer, TruncatedNormalInitializer
from paddle.nn.initializer.uniform import UniformInitializer
from paddle.nn.initializer.xavier import XavierInitializer

from .missing import refuse_missing

__all__ = [
    "MSRA",
    "Bilinear",
    "BilinearInitializer",
    "Constant",
    "ConstantInitializer",
    "MSRAInitializer",
    "Normal",
    "NormalInitializer",
    "NumpyArrayInitializer",
    "TruncatedNormal",
    "TruncatedNormalInitializer",
    "Uniform",
    "UniformInitializer",
    "Xavier",
    "XavierInitializer",
]

Bilinear, Constant, MSRA, Normal = BilinearInitializer, ConstantInitializer, MSRAInitializer, NormalInitializer
TruncatedNormal, Uniform, Xavier = TruncatedNormalInitializer, UniformInitializer, XavierInitializer

__getattr__ = refuse_missing(__name__)
