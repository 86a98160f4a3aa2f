"""Float32 master weights: a variable of Keras that layers read in low precision and that is written in float32.

The pair is one variable, so that whatever writes or saves the model's weights means the masters: `assign`,
`set_weights`, `load_weights`, checkpoints, whole models. What optimizers update is `of`; `push` then rounds it into
what layers read.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from ampx.errors import LowPrecisionParametersError

from . import retracing


class _Lowered:
    """How many variables of this process became low precision, on which traces depend that update them."""

    count = 0


@retracing.decided_by
def lowered() -> int:
    """Return how many variables became low precision."""
    return _Lowered.count


class _Penalty(keras.regularizers.Regularizer):
    """A regularizer that computes in float32: Keras adds its value to a loss in float32, and cannot add others."""

    def __init__(self, native: Any) -> None:
        self.native = native

    def __call__(self, values: Any) -> Any:
        """Return the penalty of the values that layers read."""
        return self.native(tf.cast(tf.convert_to_tensor(values), tf.float32))


class Master(keras.Variable):
    """A float32 variable that an optimizer updates.

    Attributes:
        low: The variable of the model, which has this as its master.
    """

    low: Any


class LowPrecisionVariable(keras.Variable):
    """A variable that is low precision to layers and tapes, and float32 to all that saves it."""

    # Its graph is being written as a SavedModel, which then writes the values that the graph reads.
    _exported = False

    def _exact(self) -> Any:
        """Return what is saved."""
        return tf.cast(self._value, tf.float32)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return what is saved, as an array."""
        exact = self._exact().numpy()
        return exact if dtype is None else exact.astype(dtype)

    def numpy(self) -> Any:
        """Return what is saved, as an array."""
        return self.__array__()

    # Checkpoints load into plain float32 models, and those of these load here.

    def _serialize_to_tensors(self) -> Any:
        exported, self._exported = self._exported, False
        return self._value._serialize_to_tensors() if exported else {"VARIABLE_VALUE": self._exact()}

    def _export_to_saved_model_graph(self, *args: Any, **options: Any) -> Any:
        self._exported = True
        return super()._export_to_saved_model_graph(*args, **options)

    def _restore_from_tensors(self, restored: Any) -> Any:
        self.assign(restored["VARIABLE_VALUE"])
        return self._value


class TrainedVariable(LowPrecisionVariable):
    """A low-precision variable with a float32 master, which is what is written.

    Attributes:
        master: The float32 variable.
    """

    master: Any

    def _exact(self) -> Any:
        """Return the master, or what was written to `value` itself."""
        low, master = self._value, self.master._value
        return tf.where(tf.cast(master, low.dtype) == low, master, tf.cast(low, tf.float32))

    def assign(self, value: Any) -> Any:
        """Write the master exactly, and round it into what layers read."""
        value = self.master.assign(value)
        if self._value is not None:
            self._value.assign(tf.cast(value, self._dtype))
        return value

    def assign_add(self, value: Any) -> Any:
        """Add to the master."""
        return self.assign(tf.convert_to_tensor(self.master) + tf.cast(value, tf.float32))

    def assign_sub(self, value: Any) -> Any:
        """Subtract from the master."""
        return self.assign(tf.convert_to_tensor(self.master) - tf.cast(value, tf.float32))

    def _initialize_with_initializer(self, initializer: Any) -> None:
        self.master._initialize_with_initializer(initializer)
        self._initialize(tf.cast(self.master._value, self._dtype))


def attach(variable: Any, dtype: str) -> None:
    """Make a variable of Keras one with a master: what it was itself, where it is float32; else that in float32.

    The master keeps TensorFlow's variable, by which optimizers know those that they were built on.
    """
    if isinstance(variable, TrainedVariable):
        return
    before, was_low = variable._value, variable._dtype != "float32"
    master = copy.copy(variable)
    master.__class__, master._dtype, master.low = Master, "float32", variable
    lower(variable, dtype)
    variable.__class__, variable.master = TrainedVariable, master
    if was_low and before is not None:
        with tf.init_scope(), _scope(before):
            master._initialize(tf.cast(before, tf.float32))


def lower(variable: Any, dtype: str) -> None:
    """Make a variable of Keras a low-precision one, in place."""
    before, was_low = variable._value, variable._dtype == dtype
    variable.__class__ = LowPrecisionVariable
    variable._dtype = dtype
    if variable.regularizer is not None and not isinstance(variable.regularizer, _Penalty):
        variable.regularizer = _Penalty(variable.regularizer)
    if before is not None and not was_low:
        _Lowered.count += 1
        # A frozen weight stays one that a tape watches: it may be trained later.
        trainable, variable._trainable = variable._trainable, before.trainable
        try:
            with tf.init_scope(), _scope(before):
                variable._initialize(tf.cast(before, dtype))
        finally:
            variable._trainable = trainable


def _scope(value: Any) -> Any:
    """Return the scope of the strategy that holds a variable of TensorFlow."""
    return (getattr(value, "distribute_strategy", None) or tf.distribute.get_strategy()).scope()


def of(variable: Any) -> Any:
    """Return what an optimizer updates: the master of a variable that has one, else the variable."""
    return variable.master if isinstance(variable, TrainedVariable) else variable


def owner(variable: Any) -> Any:
    """Return the model's variable: that of a master, else the variable."""
    return variable.low if isinstance(variable, Master) else variable


def push(variables: Sequence[Any]) -> None:
    """Round the masters of variables into what layers read; also on one of several replicas."""
    pairs = [variable for variable in variables if isinstance(variable, TrainedVariable)]

    def write(low: Any, master: Any) -> None:
        low.assign(tf.cast(master, low.dtype))

    def across(strategy: Any, lows: Sequence[Any], masters: Sequence[Any]) -> None:
        for low, master in zip(lows, masters, strict=True):
            strategy.extended.update(low, write, args=(master,), group=False)

    if not pairs:
        return
    lows, masters = [pair._value for pair in pairs], [pair.master._value for pair in pairs]
    if tf.distribute.has_strategy():
        tf.__internal__.distribute.interim.maybe_merge_call(across, tf.distribute.get_strategy(), lows, masters)
        return
    for low, master in zip(lows, masters, strict=True):
        write(low, master)


def check_none(variables: Sequence[Any]) -> None:
    """Raise for variables with masters, given to an optimizer that would update what layers read.

    Raises:
        LowPrecisionParametersError: There are some.
    """
    names = [variable.path for variable in variables if isinstance(variable, TrainedVariable)]
    if names:
        raise LowPrecisionParametersError(
            f"the optimizer got {len(names)} variables with float32 masters ({', '.join(names[:5])}), and was wrapped "
            f"at a level that has none; accepted: an optimizer that was wrapped at O2. Call "
            f"ampx.init(level='O2') before wrap_optimizer."
        )


def build(raw: Any, variables: Sequence[Any]) -> None:
    """Build a raw optimizer on the masters of variables."""
    excluded: set[Any] = getattr(raw, "_exclude_from_weight_decay", set())  # Keras makes it where something is excluded
    excluded.update([raw._var_key(of(variable)) for variable in variables if raw._var_key(variable) in excluded])
    raw.build([of(variable) for variable in variables])


def adopt(raw: Any) -> None:
    """Let a raw optimizer that was built on variables of Keras update their masters from now on.

    Raises:
        LowPrecisionParametersError: It was built when they were low precision: so is what it keeps for each.
    """
    masters = [of(variable) for variable in raw._trainable_variables]
    late = [master.path for master in masters if isinstance(master, Master) and not _knows(raw, master)]
    if late:
        raise LowPrecisionParametersError(
            f"the optimizer was built on {len(late)} low-precision variables ({', '.join(late[:5])}), and what it "
            f"keeps for each is low precision, too; accepted: an optimizer that was built before prepare, or not at "
            f"all. Pass a new one to ampx.wrap_optimizer, and build what that returns."
        )
    # Past the attribute's tracking, which would save the list again.
    vars(raw)["_trainable_variables"] = masters


def _knows(raw: Any, variable: Any) -> bool:
    return raw._var_key(variable) in raw._trainable_variables_indices
