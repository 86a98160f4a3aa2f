"""The values that core and backends hand to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from .events import StepResult
from .levels import OptLevel
from .policy import Dtype
from .scale_state import LossScale, LossScaleState, Scalar

# Values of the framework: only a backend looks inside.
Tree: TypeAlias = Any
Loss: TypeAlias = Any
Grads: TypeAlias = Any
Optimizer: TypeAlias = Any


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do. The defaults promise nothing.

    Attributes:
        devices: Kinds of device, the preferred first.
        dtypes: Low-precision dtypes that some device supports.
        levels: Opt levels.
        gradients: `"implicit"`: gradients hang on the parameters and `opt.step()` takes none.
            `"explicit"`: gradients are values and `opt.step(grads)` takes them.
        autocast: `"scoped"`: a region. `"process"`: only for the whole process. `"explicit"`: the user
            applies a function transform. `"none"`: no casting.
        op_lists: `allow` and `deny` of `init` are honoured.
        promotes: `promote_function` works: the verb `widest` is there.
        clipping: `max_grad_norm`, `max_grad_value` and `clip_grad_norm` work: the verb `clip`, or a wrapper's own.
        master_weights: `prepare` for O2 gives the optimizer float32 copies.
        per_loss_scales: `scale_loss(…, loss_id=…)` accepts several ids for one optimizer.
        closures: `opt.step(closure)` works.
        sparse: Sparse gradients work.
        vector_losses: `scale_loss` takes losses of any shape, whose elements the framework's backward adds up.
        distributed: Finiteness is agreed on across processes.
        device_scale: The scale can live on the device, so that a step need not sync.
        traceable: Everything traces under the framework's compiler.
        state_values: Optimizer state is a value that the user carries, and the loss scale is in it: calls take the
            state where those of other backends take the wrapped optimizer.
        names_gradients: The parameters with non-finite gradients can be named.
        traces_overflow: The first module whose output overflows can be named.
        automates: `ampx run` trains scripts that know nothing of mixed precision: the verb `automate` is there.
    """

    devices: tuple[str, ...] = ("cpu",)
    dtypes: frozenset[Dtype] = frozenset()
    levels: frozenset[OptLevel] = frozenset({"O0"})
    gradients: Literal["implicit", "explicit"] = "implicit"
    autocast: Literal["scoped", "process", "explicit", "none"] = "none"
    op_lists: bool = False
    promotes: bool = False
    clipping: bool = False
    master_weights: bool = False
    per_loss_scales: bool = False
    closures: bool = False
    sparse: bool = False
    vector_losses: bool = False
    distributed: bool = False
    device_scale: bool = False
    traceable: bool = False
    state_values: bool = False
    names_gradients: bool = False
    traces_overflow: bool = False
    automates: bool = False


@dataclass(frozen=True)
class Device:
    """What one device computes.

    Attributes:
        name: The framework's name for it, such as `"cuda"` or `"cpu"`.
        native: Low-precision dtypes it computes in hardware.
        emulated: Low-precision dtypes that work, but slowly.
        preferred: What `dtype="auto"` picks, or None for no mixed precision.
        reason: Why, in one sentence for `amp.effective` and `ampx doctor`.
        details: Further facts for `ampx doctor`.
    """

    name: str
    native: frozenset[Dtype] = frozenset()
    emulated: frozenset[Dtype] = frozenset()
    preferred: Dtype | None = None
    reason: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CastPlan:
    """Which casting a session wants. A backend's `check_plan` may replace it by a richer one of its own.

    Attributes:
        device: Name of the device.
        dtype: The compute dtype.
        level: The opt level.
        allow: What to compute in `dtype` beyond the framework's own list.
        deny: What to compute in float32.
    """

    device: str
    dtype: Dtype
    level: OptLevel = "O1"
    allow: tuple[Any, ...] = ()
    deny: tuple[Any, ...] = ()


class LossInfo(NamedTuple):
    """What core checks about a loss.

    Attributes:
        elements: Number of elements.
        dtype: Name of the dtype, for messages.
        floating: Whether the dtype is floating.
        attached: Whether gradients can flow from it.
        nan: Whether it is NaN; None where the answer would need a sync that was not asked for.
    """

    elements: int
    dtype: str
    floating: bool
    attached: bool
    nan: bool | None


class Unscaled(NamedTuple):
    """True gradients, and whether all are finite (a bool, or a boolean scalar on the device)."""

    grads: Grads
    finite: Scalar


@dataclass(frozen=True)
class ScaleValue:
    """A loss scale that was found inside an optimizer state.

    Attributes:
        config: Its configuration.
        enabled: False where the optimizer was wrapped by a disabled session.
        traced: The numbers below belong to a running trace: their values are not known.
        state: Where it stands; Python numbers, or tensors where traced.
        result: What the last step did; None before the first, where that is known.
        group: Position in the order of wrapping.
        steps: Counted steps.
    """

    config: LossScale
    enabled: bool
    traced: bool
    state: LossScaleState
    result: StepResult | None
    group: Scalar
    steps: Scalar
