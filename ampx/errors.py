"""Every error and warning that ampx raises.

Each message says what was passed, what is accepted and what to do. An error leaves weights, optimizer
state and loss scale as they were.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


def shown(value: object) -> str:
    """Return a value as an error message shows it: short, and without raising, whatever the value is."""
    try:
        return _SHORT.repr(value)
    except Exception:  # an integer of more digits than Python prints, or a __repr__ that fails
        return f"{type(value).__name__} object that cannot be shown"


def meant(name: object, accepted: Iterable[str]) -> str:
    """Return the end of an error message that names what may have been meant; "" where nothing is near."""
    by_lower = {word.lower(): word for word in accepted}
    near = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.75)
    return f" Did you mean {by_lower[near[0]]!r}?" if near else ""


class AmpxError(Exception):
    """Base of all errors raised by ampx."""

    # Of errors in functions that it rewrites, TensorFlow's AutoGraph keeps the type only where this is set.
    ag_pass_through = True


class AmpxWarning(UserWarning):
    """Base of all warnings issued by ampx.

    `init` issues it where tests of ampx are known to fail with the installed release of a framework; the message has
    the tested range, and the line that installs it.
    """


class PrecisionWarning(AmpxWarning):
    """Mixed precision was asked for and is off, emulated or changed; the message says why.

    In PyTorch also: an LSTM computes in float32 because the CPU has nothing for it in this dtype; or a script changes
    gradients of the model while the optimizer updates master weights, which has no effect.
    """


class ScaleCollapsedWarning(AmpxWarning):
    """Many steps in a row were skipped; the message names the parameters whose gradients are not finite."""


class NoGradientsWarning(AmpxWarning):
    """Several steps in a row found no gradient although losses were scaled for them: nothing is trained.

    The optimizer was made from another model than the one that computes the loss, or gradients are cleared between
    backward and step.
    """


class UnknownFrameworkError(AmpxError, ValueError):
    """No plugin registers the framework that was asked for."""


class AmbiguousFrameworkError(AmpxError, ValueError):
    """The framework was not named, and none or several are imported."""


class FrameworkNotInstalledError(AmpxError, ImportError):
    """The framework has a plugin, but cannot be imported here."""


class BackendLoadError(AmpxError):
    """The framework or its backend is installed, but failed while it was imported; the cause is chained."""


class DuplicateBackendError(AmpxError):
    """Two plugins claim the same framework name."""


class PluginError(AmpxError):
    """A plugin failed to import or implements a hook that does not exist."""


class MissingPartError(AmpxError, ModuleNotFoundError):
    """An optional part of ampx that a call needs was removed from this installation."""


class NotInitializedError(AmpxError, RuntimeError):
    """A call needs `ampx.init` first."""


class InvalidOptionError(AmpxError, ValueError):
    """An argument has a value that is not accepted."""


class UnsupportedDtypeError(InvalidOptionError):
    """The dtype is unknown, or the device cannot compute in it."""


class UnsupportedDeviceError(InvalidOptionError):
    """The device is unknown to the backend or absent."""


class UnsupportedLevelError(InvalidOptionError):
    """The opt level is not one of O0, O1, O2, O3."""


class UnsupportedOpError(InvalidOptionError):
    """An entry of an allow or deny list cannot be honoured."""


class UnsupportedByBackendError(AmpxError, NotImplementedError):
    """The backend does not declare the capability that the call needs."""


class NotAnOptimizerError(AmpxError, TypeError):
    """The object given to `wrap_optimizer` is not an optimizer of the framework."""


class AlreadyWrappedError(AmpxError, ValueError):
    """The optimizer is wrapped already.

    After a second `init` wrap the raw optimizer again: what a former session wrapped does not belong to the new one.
    """


class LowPrecisionParametersError(AmpxError, ValueError):
    """The optimizer holds float16 or bfloat16 parameters without master weights."""


class ProtocolError(AmpxError, RuntimeError):
    """Calls came in an order that would corrupt training."""


class NotWrappedError(ProtocolError):
    """A call was given an optimizer that `wrap_optimizer` did not return."""


class NotScaledError(ProtocolError):
    """A step was asked for, but the loss of its gradients never went through `scale_loss`.

    In PyTorch, PaddlePaddle and TensorFlow also, up to the first correct step: backward was called on the loss itself,
    and not on what the block of `scale_loss` yields. In JAX: `update` is traced or called, and neither `scale_loss` nor
    `ampx.loss_scale` has read the scale of such a state.
    """


class NestedScaleError(ProtocolError):
    """`scale_loss` was entered twice for one optimizer."""


class NotEnteredError(ProtocolError, AttributeError):
    """`scale_loss` was used as if it were the scaled loss, which only its `with` block has."""


class RawStepError(ProtocolError):
    """The raw optimizer was stepped while scaled gradients were pending.

    In PyTorch also: an optimizer that was never wrapped was stepped on gradients of a scaled loss, or on master weights
    that `prepare` gave it.
    """


class LossError(AmpxError, ValueError):
    """Base of the errors about the loss given to `scale_loss`."""


class LossShapeError(LossError):
    """The loss is not a scalar."""


class LossDtypeError(LossError, TypeError):
    """The loss is not a floating tensor of the framework."""


class DetachedLossError(LossError):
    """No gradient can flow from the loss. TensorFlow and JAX cannot tell."""


class AlreadyScaledError(LossError):
    """The loss came out of `scale_loss`: scaling it again would scale the gradients twice."""


class NonFiniteLossError(LossError):
    """The loss is NaN before it is scaled: no loss scale can help."""


class StateError(AmpxError, ValueError):
    """Base of the errors about a saved state."""


class UnknownSchemaError(StateError):
    """ampx cannot read states of this schema."""


class InvalidStateError(StateError):
    """Values of the state are missing or not acceptable."""


class TrialError(AmpxError, RuntimeError):
    """A script that `ampx compare`, `diagnose` or `tune` ran failed, was refused, or trained nothing."""


class PolicyFileError(InvalidOptionError):
    """A policy file cannot be read, holds what no policy may have, or is for another framework."""


class ConversionError(AmpxError, ValueError):
    """A model cannot be converted for inference, or what it returns would be too far from float32's."""


class RunRefusedError(AmpxError, RuntimeError):
    """`ampx run` cannot automate what the script does, and says why."""
