from collections.abc import Callable
from typing import Any

from . import numpy as numpy

class Array:
    def __matmul__(self, other: Array) -> Array: ...

def grad(fun: Callable[..., Any]) -> Callable[..., Any]: ...
