from collections.abc import Callable, Iterable
from typing import Any, overload

from torch import Tensor

from . import lr_scheduler as lr_scheduler

class Optimizer:
    param_groups: list[dict[str, Any]]
    def add_param_group(self, param_group: dict[str, Any]) -> None: ...
    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...

class AdamW(Optimizer):
    def __init__(self, params: Iterable[Tensor], lr: float | Tensor = 1e-3) -> None: ...
