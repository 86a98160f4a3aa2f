"""A loss scale that lives in variables of TensorFlow, moved by the specification inside any function or graph."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import tensorflow as tf

from ampx.errors import AmpxWarning, ProtocolError
from ampx.events import StepResult
from ampx.protocol import Ledger, Outcome, ScaleGroup
from ampx.scale_state import LossScale, LossScaleState, next_state
from ampx_tensorflow import history, retracing
from ampx_tensorflow.device_scale import follow, where
from ampx_tensorflow.replicas import read, write

# The first two are called as in TensorFlow's own loss scales, so that their checkpoints load.
_NAMES = {"scale": "current_loss_scale", "growth_tracker": "good_steps"}
_STATE = tuple(field.name for field in fields(LossScaleState))
_FLOATS = ("scale", "used", "grad_norm")


class ScaleVariables:
    """The variables of one loss scale.

    Attributes:
        config: The loss scale's configuration.
        traced: A function or graph was built with the configuration, which therefore cannot change any more.
        variables: By name: the four numbers of the specification, and what the last step did (`used`, the scale that
            its gradients carried, `finite`, `grad_norm`) and how many steps were counted (`steps`).
    """

    def __init__(self, config: LossScale, first: LossScaleState, add: Callable[..., Any]) -> None:
        """Make the variables by `add`, which takes `name`, `initial_value` and `dtype`."""
        self.config = config
        self.traced = False
        self.history = history.History()
        # None: the variables are eager ones.
        self._graph = None if tf.compat.v1.executing_eagerly_outside_functions() else tf.compat.v1.get_default_graph()
        numbers = {name: getattr(first, name) for name in _STATE}
        last = {"used": first.scale, "finite": 1, "steps": 0, "grad_norm": 0.0}
        self.variables = {
            name: add(
                name=_NAMES.get(name, name),
                initial_value=value,
                dtype=tf.float32 if name in _FLOATS else tf.int64,
            )
            for name, value in {**numbers, **last}.items()
        }

    def state(self) -> LossScaleState:
        """Return the state as tensors."""
        return LossScaleState(*(tf.convert_to_tensor(self.variables[name]) for name in _STATE))

    def move(self, finite: Any) -> list[Any]:
        """Move the state by one step; return the operations that do it, for graphs."""
        self.traced = self.traced or not tf.executing_eagerly()
        retracing.depend()  # the host looks when the function is called
        state = self.state()
        after = next_state(self.config, state, finite, where)
        changes = {name: getattr(after, name) for name in _STATE}
        changes |= {"used": state.scale, "finite": tf.cast(finite, tf.int64)}
        done = [self.variables[name].assign(value) for name, value in changes.items()]
        return [*done, self.variables["steps"].assign_add(1), *self.history.note(finite)]

    def numbers(self) -> dict[str, Any] | None:
        """Return the values; None where they cannot be read: there is no session, or it has not started them.

        Sync: one on an accelerator.
        """
        if self._graph is None and tf.inside_function():
            return None
        if self._graph is None:
            return {name: read(variable).item() for name, variable in self.variables.items()}
        session = tf.compat.v1.get_default_session()
        if session is None or session.graph is not self._graph:
            return None
        try:
            values = session.run(self.variables)
        except tf.errors.FailedPreconditionError:
            return None
        return {name: value.item() for name, value in values.items()}

    def load(self, state: LossScaleState) -> None:
        """Write the values; in a graph into its session, which must have started the variables.

        Sync: one on an accelerator.
        """
        values = {self.variables[name]: getattr(state, name) for name in _STATE}
        if self._graph is None:
            for variable, value in values.items():
                write(variable, value)
            return
        if self.numbers() is None:
            raise ProtocolError(
                "a state was loaded into a graph whose variables no session has started yet, so that starting them "
                "would overwrite it; accepted: loading inside `with session.as_default():` after the initializer ran. "
                "Call load_state_dict there."
            )
        session = tf.compat.v1.get_default_session()
        for variable, value in values.items():
            variable.load(value, session)

    def result(self, norm: bool) -> StepResult | None:
        """Return what the last step did; tensors while a function or graph is built, None before the first step.

        `norm`: the steps measured the gradients' norm. Sync: one on an accelerator, unless something is built.
        """
        numbers = self.numbers()
        if numbers is None:
            tensors = {name: tf.convert_to_tensor(variable) for name, variable in self.variables.items()}
            return _result(tensors, tf.not_equal(tensors["finite"], 0), tensors["grad_norm"] if norm else None)
        if not numbers["steps"]:
            return None
        finite = bool(numbers["finite"])
        return _result(numbers, finite, numbers["grad_norm"] if norm and finite else None)


def _result(numbers: Mapping[str, Any], finite: Any, norm: Any) -> StepResult:
    return StepResult(finite, finite, numbers["used"], numbers["scale"], numbers["consecutive_skips"], norm)


class NamedLedger(Ledger):
    """The scale is a variable, moved where gradients are applied; the host reads it when asked."""

    def __init__(self, scale: ScaleVariables) -> None:
        self.scale = scale
        self._session: weakref.ref[Any] | None = None

    def factor(self, group: ScaleGroup, loss_id: int) -> Any:
        """Return the variable itself: a function that is traced reads it anew in every call."""
        return self.scale.variables["scale"]

    def settle(self, group: ScaleGroup, window: Sequence[Outcome]) -> None:
        """Do nothing: the variables were moved with the step."""

    def resolve(self, group: ScaleGroup) -> None:
        """Read the variables; events of steps since then become due. In a graph this takes its session."""
        if tf.inside_function():
            return
        numbers = self.scale.numbers()
        if numbers is None:
            raise ProtocolError(
                "the loss scale is a variable of a graph, and it was asked for outside a session that has started it; "
                "accepted: inside `with session.as_default():` (or `with Session() as session:`), after the "
                "initializer ran. Ask there."
            )
        session = tf.compat.v1.get_default_session() if self.scale.history.in_graph else None
        if session is not None and (self._session is None or self._session() is not session):
            self._session = weakref.ref(session)
            self.scale.history.restart()
            group.states[0] = group.config.initial_state()
        missed = self.scale.history.read()
        group.steps = numbers["steps"] - missed.steps
        state = LossScaleState(*(numbers[name] for name in _STATE))
        try:
            follow(group, missed, state)
        finally:  # a listener may raise; or a checkpoint was restored
            group.states[0], group.steps = state, numbers["steps"]

    def look(self, group: ScaleGroup) -> None:
        """Follow functions, if they made steps, and send the events; sessions tell when asked. Sync: one or two."""
        log = self.scale.history
        if not log.in_graph and not tf.inside_function() and log.grew():
            group.resolve()

    def close(self, group: ScaleGroup) -> None:
        """Send what is still due, where it can be read."""
        if not tf.inside_function() and self.scale.numbers() is not None:
            group.resolve()

    def read(self, outcome: Outcome) -> dict[int, bool]:
        """Return what the outcome holds; there are none."""
        return outcome.finite

    def reload(self, group: ScaleGroup) -> None:
        """Write the variables."""
        self.scale.load(group.states[0])
        if group.config != self.scale.config and self.scale.traced:
            warnings.warn(
                "the state holds another configuration of the loss scale than functions or graphs were built with; the "
                "numbers were taken over, the configuration was not",
                AmpxWarning,
                stacklevel=5,
            )
            group.config = self.scale.config
        self.scale.config = group.config
