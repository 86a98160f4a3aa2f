"""The reporting half of a session: states and events."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from .checks import wrapped_optimizers
from .effective import Effective
from .errors import InvalidOptionError
from .events import Event, Listener
from .group import ScaleGroup
from .session_state import dump_session, load_session
from .values import Values


class Reporting(Values):
    """States and events of one session; `Amp` adds the rest."""

    effective: Effective
    # A loss scale, and those who use it: it is alive as long as one of them is.
    _groups: list[tuple[ScaleGroup, list[weakref.ref[Any]]]]
    _listeners: list[list[Listener]]

    def live_groups(self) -> list[ScaleGroup]:
        """List the loss scales whose optimizers are alive, in order of wrapping."""
        self._groups = [entry for entry in self._groups if any(wrapped() is not None for wrapped in entry[1])]
        groups = [group for group, _ in self._groups]
        for position, group in enumerate(groups):
            group.index = position
        return groups

    def optimizers_of(self, group: ScaleGroup) -> list[Any]:
        """List the wrapped optimizers that a loss scale was made for and that are alive. Sync: none."""
        return [
            one for known, wrapped in self._groups if known is group for made in wrapped if (one := made()) is not None
        ]

    def state_dict(self, opt: Any = None) -> dict[str, Any]:
        """Give the loss scales of all optimizers wrapped here, in order of wrapping, as plain JSON types.

        Args:
            opt: Only that of this optimizer. With optimizer state as values: the state, which is required.

        Sync: where the scale lives on the device.
        """
        return dump_session(self.effective.framework, self._chosen_groups(opt))

    def load_state_dict(self, state: object, opt: Any = None) -> Any:
        """Take over loss scales, before or after the first step; from any framework.

        Args:
            state: What `state_dict` or `ampx.import_state` gave.
            opt: Only that of this optimizer; the state must then hold one. With optimizer state as values: the
                optimizer state, which is required.

        Returns:
            `opt`; where optimizer state is a value, a new state that holds the loaded loss scale.

        Raises:
            UnknownSchemaError: The state is of another schema.
            InvalidStateError: A value is missing or not acceptable, or the number of loss scales differs.

        Sync: where the scale lives on the device.
        """
        if not self.effective.enabled:
            return opt
        groups = self._chosen_groups(opt)
        load_session(state, groups)
        return self.with_scale(opt, groups)

    def on_event(self, listener: Listener) -> Callable[[], None]:
        """Call `listener(event)` for every event of this session.

        Returns:
            A function that removes the listener again.

        Raises:
            InvalidOptionError: It cannot be called.

        Sync: none; where the scale lives on the device, events come some steps late instead.
        """
        if not callable(listener):
            raise InvalidOptionError(
                f"on_event got the listener {listener!r}; accepted: a function of one event. Pass one."
            )
        entry = [listener]  # an identity of its own: a listener may be registered twice
        self._listeners.append(entry)

        def remove() -> None:
            self._listeners[:] = [one for one in self._listeners if one is not entry]

        return remove

    def emit(self, event: Event) -> None:
        """Hand an event to the listeners."""
        for (listener,) in tuple(self._listeners):
            listener(event)

    def _chosen_groups(self, opt: Any) -> list[ScaleGroup]:
        if self.backend.capabilities.state_values:
            return [self.group_of(opt)]
        if opt is None:
            return self.live_groups()
        found: list[ScaleGroup] = []
        for one in wrapped_optimizers(opt, "state_dict"):
            if one.ampx_member.group not in found:
                found.append(one.ampx_member.group)
        return found
