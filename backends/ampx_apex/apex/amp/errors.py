"""Errors that also are what apex raised, so that scripts which catch those go on to work."""

from __future__ import annotations

from ampx.errors import AlreadyWrappedError, AmpxWarning, InvalidOptionError, StateError


class PropertyError(InvalidOptionError, RuntimeError):
    """An option of `initialize` does not go with the opt level, or a model or optimizer is not fit for it."""


class ArgumentTypeError(InvalidOptionError, TypeError):
    """`initialize` was given something that is no model or no optimizer."""


class InitializedTwiceError(AlreadyWrappedError, RuntimeError):
    """An optimizer went through `initialize` before."""


class LossIdError(InvalidOptionError, IndexError):
    """`scale_loss` was asked for a loss scale that there is not."""


class CheckpointError(StateError, RuntimeError):
    """A state given to `load_state_dict` has entries that apex never wrote."""


class CheckpointWarning(AmpxWarning):
    """A state given to `load_state_dict` holds more or fewer loss scales than there are."""
