"""What a type checker is told of the frameworks' optimizers and dtypes; nothing here exists when a program runs.

Optimizers are known by what they have, so that it makes no difference which frameworks are installed. What
`wrap_optimizer` returns derives from the framework's class, where that is installed, and from Any: it is accepted
wherever the raw optimizer is, as in `optimizer = ampx.wrap_optimizer(optimizer)`.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeAlias

from keras.optimizers import Optimizer as _KerasBase
from mxnet.gluon import Trainer as _MXNetBase
from optax import GradientTransformationExtraArgs as _OptaxBase
from paddle.optimizer import Optimizer as _PaddleBase
from torch.optim import Optimizer as _TorchBase

from .optimizer import WrappedOptimizer
from .scale_state import LossScale

# A plugin registers further names.
Framework: TypeAlias = Literal["torch", "tensorflow", "mxnet", "paddle", "jax"] | str
DtypeName: TypeAlias = Literal["float16", "fp16", "half", "f16", "bfloat16", "bf16", "float32", "fp32", "float", "f32"]
ScaleOption: TypeAlias = LossScale | float | Literal["dynamic"]

class _Named(Protocol):
    @property
    def name(self) -> str: ...

class _TorchDtype(Protocol):
    @property
    def is_floating_point(self) -> bool: ...

# `torch.float16`, `tf.float16`, `jnp.float16`: every framework has its own kind of object.
DtypeObject: TypeAlias = _Named | _TorchDtype | type[Any]

class TorchRaw(Protocol):
    @property
    def param_groups(self) -> Any: ...
    @property
    def add_param_group(self) -> Callable[..., Any]: ...

class KerasRaw(Protocol):
    @property
    def apply_gradients(self) -> Callable[..., Any]: ...

class MXNetRaw(Protocol):
    @property
    def allreduce_grads(self) -> Callable[..., Any]: ...

class PaddleRaw(Protocol):
    @property
    def clear_grad(self) -> Callable[..., Any]: ...
    @property
    def get_lr(self) -> Callable[..., Any]: ...

class OptaxRaw(Protocol):
    @property
    def init(self) -> Callable[..., Any]: ...
    @property
    def update(self) -> Callable[..., Any]: ...

class OtherRaw(Protocol):
    @property
    def step(self) -> Callable[..., Any]: ...

class _Wrapped(WrappedOptimizer):
    def ampx_unscale(self) -> None: ...
    def ampx_clip_grad_norm(self, max_norm: float) -> Any: ...

class TorchOptimizer(_Wrapped, _TorchBase, Any): ...
class KerasOptimizer(_Wrapped, _KerasBase, Any): ...
class MXNetTrainer(_Wrapped, _MXNetBase, Any): ...
class PaddleOptimizer(_Wrapped, _PaddleBase, Any): ...
class OptaxTransformation(_OptaxBase, Any): ...
class OtherOptimizer(_Wrapped, Any): ...
