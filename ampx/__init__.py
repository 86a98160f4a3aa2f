"""One mixed-precision API for every framework.

```python
import ampx

amp = ampx.init(framework="torch")
opt = ampx.wrap_optimizer(opt)
for x, y in data:
    loss = loss_fn(model(x), y)
    with ampx.scale_loss(loss, opt) as scaled:
        scaled.backward()
    opt.step()
    opt.zero_grad()
```
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import debug as debug
    from .amp import Amp as Amp
    from .api import autocast as autocast
    from .api import backends as backends
    from .api import clip_grad_norm as clip_grad_norm
    from .api import current as current
    from .api import enter_thread as enter_thread
    from .api import float_function as float_function
    from .api import gate as gate
    from .api import half_function as half_function
    from .api import last_step as last_step
    from .api import load_state_dict as load_state_dict
    from .api import loss_scale as loss_scale
    from .api import observe as observe
    from .api import on_event as on_event
    from .api import prepare as prepare
    from .api import promote_function as promote_function
    from .api import register_plugin as register_plugin
    from .api import scale_loss as scale_loss
    from .api import shutdown as shutdown
    from .api import state_dict as state_dict
    from .api import trace_overflow as trace_overflow
    from .api import unscale as unscale
    from .api import wrap_optimizer as wrap_optimizer
    from .backend import Backend as Backend
    from .contract import Capabilities as Capabilities
    from .contract import CastPlan as CastPlan
    from .contract import Device as Device
    from .contract import LossInfo as LossInfo
    from .contract import ScaleValue as ScaleValue
    from .contract import Unscaled as Unscaled
    from .effective import Effective as Effective
    from .errors import AlreadyScaledError as AlreadyScaledError
    from .errors import AlreadyWrappedError as AlreadyWrappedError
    from .errors import AmbiguousFrameworkError as AmbiguousFrameworkError
    from .errors import AmpxError as AmpxError
    from .errors import AmpxWarning as AmpxWarning
    from .errors import BackendLoadError as BackendLoadError
    from .errors import DetachedLossError as DetachedLossError
    from .errors import DuplicateBackendError as DuplicateBackendError
    from .errors import FrameworkNotInstalledError as FrameworkNotInstalledError
    from .errors import InvalidOptionError as InvalidOptionError
    from .errors import InvalidStateError as InvalidStateError
    from .errors import LossDtypeError as LossDtypeError
    from .errors import LossError as LossError
    from .errors import LossShapeError as LossShapeError
    from .errors import LowPrecisionParametersError as LowPrecisionParametersError
    from .errors import NestedScaleError as NestedScaleError
    from .errors import NonFiniteLossError as NonFiniteLossError
    from .errors import NotAnOptimizerError as NotAnOptimizerError
    from .errors import NotInitializedError as NotInitializedError
    from .errors import NotScaledError as NotScaledError
    from .errors import NotWrappedError as NotWrappedError
    from .errors import PluginError as PluginError
    from .errors import PrecisionWarning as PrecisionWarning
    from .errors import ProtocolError as ProtocolError
    from .errors import RawStepError as RawStepError
    from .errors import RunRefusedError as RunRefusedError
    from .errors import ScaleCollapsedWarning as ScaleCollapsedWarning
    from .errors import StateError as StateError
    from .errors import UnknownFrameworkError as UnknownFrameworkError
    from .errors import UnknownSchemaError as UnknownSchemaError
    from .errors import UnsupportedByBackendError as UnsupportedByBackendError
    from .errors import UnsupportedDeviceError as UnsupportedDeviceError
    from .errors import UnsupportedDtypeError as UnsupportedDtypeError
    from .errors import UnsupportedLevelError as UnsupportedLevelError
    from .errors import UnsupportedOpError as UnsupportedOpError
    from .events import Event as Event
    from .events import ScaleChanged as ScaleChanged
    from .events import ScaleCollapsed as ScaleCollapsed
    from .events import StepResult as StepResult
    from .events import StepSkipped as StepSkipped
    from .hookspecs import Register as Register
    from .hookspecs import hookimpl as hookimpl
    from .interop import import_state as import_state
    from .optimizer import WrappedOptimizer as WrappedOptimizer
    from .policy import Policy as Policy
    from .scale_state import LossScale as LossScale
    from .scale_state import LossScaleState as LossScaleState
    from .scale_state import next_state as next_state
    from .starting import init as init

    __version__: str

# Which module a public name lives in. They load on first use: a script that imports ampx and then fails, or
# only asks for --help, does not wait for what it does not need.
_MODULES = {
    "amp": ("Amp",),
    "api": (
        "autocast",
        "backends",
        "clip_grad_norm",
        "current",
        "enter_thread",
        "float_function",
        "gate",
        "half_function",
        "last_step",
        "load_state_dict",
        "loss_scale",
        "observe",
        "on_event",
        "prepare",
        "promote_function",
        "register_plugin",
        "scale_loss",
        "shutdown",
        "state_dict",
        "trace_overflow",
        "unscale",
        "wrap_optimizer",
    ),
    "backend": ("Backend",),
    "contract": (
        "Capabilities",
        "CastPlan",
        "Device",
        "LossInfo",
        "ScaleValue",
        "Unscaled",
    ),
    "effective": ("Effective",),
    "errors": (
        "AlreadyScaledError",
        "AlreadyWrappedError",
        "AmbiguousFrameworkError",
        "AmpxError",
        "AmpxWarning",
        "BackendLoadError",
        "DetachedLossError",
        "DuplicateBackendError",
        "FrameworkNotInstalledError",
        "InvalidOptionError",
        "InvalidStateError",
        "LossDtypeError",
        "LossError",
        "LossShapeError",
        "LowPrecisionParametersError",
        "NestedScaleError",
        "NonFiniteLossError",
        "NotAnOptimizerError",
        "NotInitializedError",
        "NotScaledError",
        "NotWrappedError",
        "PluginError",
        "PrecisionWarning",
        "ProtocolError",
        "RawStepError",
        "RunRefusedError",
        "ScaleCollapsedWarning",
        "StateError",
        "UnknownFrameworkError",
        "UnknownSchemaError",
        "UnsupportedByBackendError",
        "UnsupportedDeviceError",
        "UnsupportedDtypeError",
        "UnsupportedLevelError",
        "UnsupportedOpError",
    ),
    "events": (
        "Event",
        "ScaleChanged",
        "ScaleCollapsed",
        "StepResult",
        "StepSkipped",
    ),
    "hookspecs": (
        "Register",
        "hookimpl",
    ),
    "interop": ("import_state",),
    "scale_state": (
        "LossScale",
        "LossScaleState",
        "next_state",
    ),
    "optimizer": ("WrappedOptimizer",),
    "policy": ("Policy",),
    "starting": ("init",),
    "debug": ("debug",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

if not TYPE_CHECKING:  # to a checker a module with __getattr__ has every name, misspelt ones included

    def __getattr__(name: str) -> Any:
        """Load the module of a public name on first use."""
        home = _HOMES.get(name)
        if name == "__version__":
            value = _version()
        elif home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        else:
            module = importlib.import_module(f"{__name__}.{home}")
            value = module if name == home else getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(_HOMES)


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("ampx")
    except metadata.PackageNotFoundError:  # a source tree on the path
        return "0+unknown"
