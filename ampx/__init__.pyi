"""The public names of ampx, each with the module that it is in; `__init__.py` reads them here."""

from . import debug as debug
from .api import (
    autocast as autocast,
    backends as backends,
    clip_grad_norm as clip_grad_norm,
    current as current,
    enter_thread as enter_thread,
    float_function as float_function,
    gate as gate,
    half_function as half_function,
    last_step as last_step,
    load_state_dict as load_state_dict,
    loss_scale as loss_scale,
    meter as meter,
    observe as observe,
    on_event as on_event,
    prepare as prepare,
    promote_function as promote_function,
    register_plugin as register_plugin,
    scale_loss as scale_loss,
    shutdown as shutdown,
    state_dict as state_dict,
    unscale as unscale,
    wrap_optimizer as wrap_optimizer,
)
from .backend import (
    Backend as Backend,
    Capabilities as Capabilities,
    CastPlan as CastPlan,
    Device as Device,
    GenericBackend as GenericBackend,
    LossInfo as LossInfo,
    Unscaled as Unscaled,
)
from .errors import (
    AlreadyScaledError as AlreadyScaledError,
    AlreadyWrappedError as AlreadyWrappedError,
    AmbiguousFrameworkError as AmbiguousFrameworkError,
    AmpxError as AmpxError,
    AmpxWarning as AmpxWarning,
    BackendLoadError as BackendLoadError,
    ConversionError as ConversionError,
    DetachedLossError as DetachedLossError,
    DuplicateBackendError as DuplicateBackendError,
    FrameworkNotInstalledError as FrameworkNotInstalledError,
    InvalidOptionError as InvalidOptionError,
    InvalidStateError as InvalidStateError,
    LossDtypeError as LossDtypeError,
    LossError as LossError,
    LossShapeError as LossShapeError,
    LowPrecisionParametersError as LowPrecisionParametersError,
    NestedScaleError as NestedScaleError,
    NoGradientsWarning as NoGradientsWarning,
    NonFiniteLossError as NonFiniteLossError,
    NotAnOptimizerError as NotAnOptimizerError,
    NotEnteredError as NotEnteredError,
    NotInitializedError as NotInitializedError,
    NotScaledError as NotScaledError,
    NotWrappedError as NotWrappedError,
    PluginError as PluginError,
    PolicyFileError as PolicyFileError,
    PrecisionWarning as PrecisionWarning,
    ProtocolError as ProtocolError,
    RawStepError as RawStepError,
    RunRefusedError as RunRefusedError,
    ScaleCollapsedWarning as ScaleCollapsedWarning,
    StateError as StateError,
    TrialError as TrialError,
    UnknownFrameworkError as UnknownFrameworkError,
    UnknownSchemaError as UnknownSchemaError,
    UnsupportedByBackendError as UnsupportedByBackendError,
    UnsupportedDeviceError as UnsupportedDeviceError,
    UnsupportedDtypeError as UnsupportedDtypeError,
    UnsupportedLevelError as UnsupportedLevelError,
    UnsupportedOpError as UnsupportedOpError,
)
from .events import (
    Event as Event,
    PrecisionLost as PrecisionLost,
    Progress as Progress,
    ScaleChanged as ScaleChanged,
    ScaleCollapsed as ScaleCollapsed,
    StepResult as StepResult,
    StepSkipped as StepSkipped,
    UpdateMetered as UpdateMetered,
)
from .foreign_states import import_state as import_state
from .loggers.log import Log as Log, log_to as log_to
from .numerics.compare import Comparison as Comparison, compare as compare
from .numerics.diagnose import Diagnosis as Diagnosis, diagnose as diagnose
from .numerics.overflow import trace_overflow as trace_overflow
from .numerics.probe import (
    Reading as Reading,
    Replayed as Replayed,
    Stats as Stats,
    Watch as Watch,
    Watching as Watching,
)
from .numerics.tune import TunedPolicy as TunedPolicy, tune as tune
from .optimizer import WrappedOptimizer as WrappedOptimizer
from .plugins import Register as Register, hookimpl as hookimpl
from .policy import Effective as Effective, Policy as Policy
from .scale_state import LossScale as LossScale, LossScaleState as LossScaleState, next_state as next_state
from .session import Amp as Amp, init as init
from .shipping.convert import convert as convert
from .shipping.converter import Conversion as Conversion, Converted as Converted

__version__: str
