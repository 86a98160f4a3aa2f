"""Follow a session that the script started itself: its steps and loss scales, without deciding any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ampx.events import Event, StepSkipped

from .recorder import Recorder

if TYPE_CHECKING:
    from ampx.protocol import ScaleGroup
    from ampx.session import Amp


class Following:
    """Has the recorder tell of one session that the script started."""

    def __init__(self, recorder: Recorder, amp: Amp, kind_of: Callable[[Any], str]) -> None:
        self.amp = amp
        self._recorder = recorder
        self._kind_of = kind_of
        self._groups: dict[int, ScaleGroup] = {}
        self._before: dict[int, int] = {}  # steps that a group has made for somebody else: the parent of this process
        amp.on_event(self._hear)

    def look(self) -> None:
        """Meet the loss scales that the session has by now, and count the steps that the host knows of."""
        met = {id(group) for group in self._groups.values()}
        for group in self.amp.live_groups():
            if id(group) not in met and group.members:
                position = len(self._recorder.optimizers)
                for wrapped in self.amp.optimizers_of(group):
                    self._recorder.add_optimizer(self._kind_of(wrapped), float(group.states[0].scale), position)
                self._groups[position] = group
        for position, group in self._groups.items():
            done = group.steps - self._before.get(position, 0)
            self._recorder.stepped(position, done - self._recorder.optimizers[position].steps)

    def begin_child(self) -> None:
        """Count from here, in a copy of the process."""
        self._before = {position: group.steps for position, group in self._groups.items()}

    def finish(self) -> None:
        """Take the last steps over, at the end of the run. Sync: where the scale lives on the device."""
        for group in self._groups.values():
            group.ledger.close(group)  # a graph of TensorFlow 1 cannot be asked any more
        self.look()
        for position, group in self._groups.items():
            if len(group.states) > 1:
                kind = self._recorder.optimizers[position].kind
                self._recorder.notes.append(
                    f"{kind} has {len(group.states)} loss scales; the one of loss_id 0 is told."
                )

    def _hear(self, event: Event) -> None:
        # The last one met: positions move up when an optimizer goes, and those of the dead stay.
        positions = [position for position, group in self._groups.items() if group.index == event.group][-1:]
        for position in positions:
            skipped = isinstance(event, StepSkipped)
            if skipped and event.step in self._recorder.optimizers[position].skipped:
                continue  # several losses of one step
            if skipped or event.loss_id == 0:
                self._recorder.hear(replace(event, group=position))
