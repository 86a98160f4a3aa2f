"""Optimizer state that is a value, as in JAX: the loss scale is inside, and calls take the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import sessions
from .backend import Backend
from .checks import one_wrapped_optimizer, wrapped_optimizers
from .contract import ScaleValue
from .effective import Effective
from .errors import NotWrappedError, ProtocolError, UnsupportedByBackendError
from .events import StepResult
from .group import ScaleGroup
from .optimizer import WrappedOptimizer
from .scale_state import LossScale


class Values:
    """What a session asks of an optimizer, or of an optimizer state; `Amp` adds the rest."""

    backend: Backend
    effective: Effective
    # How many transformations were wrapped, and the last step of each whose events were sent.
    _wrapped_values: int
    _observed: dict[int, int]

    def last_step(self, opt: Any) -> StepResult | None:
        """Tell what the last step did; None before the first.

        Args:
            opt: A wrapped optimizer, or an optimizer state (or anything that holds one). Where the state is
                traced, the fields are tensors, and before the first step `scale` is 0.

        Raises:
            NotWrappedError: It is neither.

        Sync: where the scale lives on the device, unless traced.
        """
        if isinstance(opt, WrappedOptimizer) or not self.backend.capabilities.state_values:
            return one_wrapped_optimizer(opt, "last_step").last_step
        return self.find_scale(opt, "last_step").result

    def loss_scale(self, opt: Any) -> Any:
        """Give the current loss scale.

        Args:
            opt: As in `last_step`.

        Raises:
            NotWrappedError: It is neither.

        Sync: where the scale lives on the device, unless traced.
        """
        if isinstance(opt, WrappedOptimizer) or not self.backend.capabilities.state_values:
            return one_wrapped_optimizer(opt, "loss_scale").loss_scale
        return self.find_scale(opt, "loss_scale").state.scale

    def observe(self, opt: Any) -> StepResult | None:
        """Send the events of the last step that were not sent yet, and give its result.

        An optimizer object sends its events by itself. A state that is a value cannot: its steps run in compiled
        code, so events come when the host looks. Look after every step to see every event; of several steps since
        the last look, only the last one's events are sent.

        Args:
            opt: A wrapped optimizer, or an optimizer state outside traced code.

        Raises:
            NotWrappedError: It is neither.
            ProtocolError: The state is traced.

        Sync: one.
        """
        if isinstance(opt, WrappedOptimizer) or not self.backend.capabilities.state_values:
            return self.last_step(opt)
        value = self.find_scale(opt, "observe")
        group, result = self._host_group(value, "observe"), value.result
        if result is None or not value.enabled:
            return result
        if self._observed.get(value.group, 0) == value.steps:
            return result
        self._observed[value.group] = value.steps
        before = replace(value.state, scale=result.scale)
        told = (self.backend.name, value.group, 0, value.steps)
        for event in group.events_of(told, before, value.state, bool(result.finite)):
            sessions.emit(self.backend.name, event)
        return result

    # -- for the rest of the session -----------------------------------------------------------------

    def wrap_transformation(self, opt: Any, config: LossScale, settings: Mapping[str, Any]) -> Any:
        """Give an optimizer whose state carries the loss scale."""
        if type(opt) in (list, tuple):
            raise UnsupportedByBackendError(
                f"wrap_optimizer got a list of {len(opt)} optimizers, but backend {self.backend.name!r} keeps the "
                f"loss scale in one optimizer state; accepted: one optimizer. Join them in one before wrapping."
            )
        enabled = self.effective.enabled
        wrapped = self.backend.wrap_transformation(opt, config, enabled, self._wrapped_values, settings)
        self._wrapped_values += 1
        return wrapped

    def find_scale(self, opt: Any, call: str) -> ScaleValue:
        """Find the loss scale in an optimizer state.

        Raises:
            NotWrappedError: There is none.
        """
        value = self.backend.read_scale(opt)
        if value is None:
            raise NotWrappedError(
                f"{call} got {type(opt).__name__}, which an optimizer that wrap_optimizer did not return has made; "
                f"accepted: the state that a wrapped optimizer's init or update gave. Call "
                f"tx = ampx.wrap_optimizer(tx) first and pass its state."
            )
        return value

    def refuse_value(self, opt: Any, call: str) -> None:
        """Raise for a call that needs gradients on parameters, where `opt` is an optimizer state."""
        if self.backend.capabilities.state_values:
            self.find_scale(opt, call)
            raise ProtocolError(
                f"{call} was called, but backend {self.backend.name!r} has gradients as values, which only update "
                f"sees; accepted: wrap_optimizer(opt, max_grad_norm=…). Pass it there."
            )

    def last_steps(self, opt: Any) -> Sequence[Callable[[], StepResult | None]]:
        """Give what tells the last step of each optimizer, for `gate`."""
        if not self.backend.capabilities.state_values:
            return [lambda one=one: one.last_step for one in wrapped_optimizers(opt, "gate")]  # type: ignore[misc]
        found = list(opt) if isinstance(opt, list) else [opt]
        for one in found:
            if not callable(one):
                raise NotWrappedError(
                    f"gate got {type(one).__name__}, which wrap_optimizer did not return; accepted: a function that "
                    f"gives the present state of a wrapped optimizer. Pass lambda: opt_state, after "
                    f"tx = ampx.wrap_optimizer(tx)."
                )
        return [lambda one=one: self.last_step(one()) for one in found]  # type: ignore[misc]

    def group_of(self, opt: Any) -> ScaleGroup:
        """Give the bookkeeping of one optimizer state, for saving and loading."""
        if opt is None:
            raise UnsupportedByBackendError(
                f"state_dict and load_state_dict need the optimizer state, because backend {self.backend.name!r} keeps "
                f"the loss scale there and not in the session; accepted: amp.state_dict(opt_state), "
                f"opt_state = amp.load_state_dict(d, opt_state). Pass it."
            )
        return self._host_group(self.find_scale(opt, "state_dict"), "state_dict")

    def with_scale(self, opt: Any, groups: Sequence[ScaleGroup]) -> Any:
        """Give the optimizer state with what was loaded into its group; an optimizer object as it is."""
        if not self.backend.capabilities.state_values:
            return opt
        (group,) = groups
        return self.backend.write_scale(opt, group.config, group.states[0])

    def _host_group(self, value: ScaleValue, call: str) -> ScaleGroup:
        if value.traced:
            raise ProtocolError(
                f"{call} was called inside traced code, where numbers are not known; accepted: a state outside of it. "
                f"Call it after the compiled function has returned."
            )
        return ScaleGroup(self.backend.name, value.config, value.enabled, index=value.group, states={0: value.state})
