"""`log_to`: from now on what steps report is written down, every so many steps. Knows no target: see `targets`.

Nothing here runs in a step that is not logged. A step that is due sends the event `Progress`, which reaches a log as it
reaches every plugin: through the hook `ampx_event`.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

from ampx import api
from ampx.errors import InvalidOptionError
from ampx.events import LOG_EVERY, Event, Progress, ScaleChanged, UpdateMetered
from ampx.plugins import default_registry, hookimpl, implemented_hooks
from ampx.session import sessions

from .progress import report_every
from .targets import Row, Target, find

_numbers: Final = itertools.count(1)


@dataclass(frozen=True)
class _Written:
    """The last row of one loss scale."""

    step: int = 0
    skipped: int = 0


class Log:
    """Writes what steps report to a target, until it is closed; a context manager.

    Events come to it through the hook `ampx_event`.

    Attributes:
        every: Every so many steps of a loss scale a row is written.
        rows: How many rows were written.
    """

    def __init__(self, target: Any, every: int, framework: str | None) -> None:
        """Open the target and listen; None for the events of every framework."""
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise InvalidOptionError(
                f"log_to got every={every!r}; accepted: a number of steps from 1 on. Pass one, such as "
                f"every={LOG_EVERY}."
            )
        self.every = every
        self.rows = 0
        self._framework = framework
        self._written: dict[tuple[str, int, int], _Written] = {}
        self._looks = 0
        self._process = os.getpid()
        self._lock = threading.RLock()  # compiled code of JAX calls back from threads of its own
        own_plugin = "ampx_event" in implemented_hooks(target)
        self._target: Target | None = None if own_plugin else find(target)
        self._closing = ExitStack()
        with ExitStack() as opened:
            if self._target is not None:
                opened.callback(self._target.close)
            self._follow_groups()
            self._register(target if own_plugin else self, opened)
            opened.callback(report_every(every))
            self._closing = opened.pop_all()
        atexit.register(self.close)

    def _follow_groups(self) -> None:
        """Begin with the steps that come from now on. Sync: where the scale lives on the device."""
        sessions_of = [session for session in sessions.all_sessions() if self._framework in (None, session.framework)]
        for group in itertools.chain.from_iterable(session.live_groups() for session in sessions_of):
            group.ledger.close(group)
            for loss_id in group.states:
                skipped = group.skipped.get(loss_id, 0)
                self._written[group.framework, group.index, loss_id] = _Written(group.steps, skipped)

    def _register(self, plugin: Any, opened: ExitStack) -> None:
        registry = default_registry()
        if not registry.manager.is_registered(plugin):
            registry.register_plugin(plugin, f"ampx.log_to {next(_numbers)}")
            opened.callback(registry.manager.unregister, plugin)

    @hookimpl
    def ampx_event(self, event: Event) -> None:
        """Write an event that is due; in copies of the process nothing."""
        if self._target is None or os.getpid() != self._process or self._framework not in (None, event.framework):
            return
        with self._lock:
            # A change of the scale in a step that has a row of its own is in that.
            drawn = isinstance(event, (Progress, UpdateMetered))
            drawn = drawn or (isinstance(event, ScaleChanged) and not self._is_due(event))
            values = self._values(event)
            if values is not None:
                self.rows += 1
                self._target.write(Row(event, values, drawn))

    def _is_due(self, event: Event) -> bool:
        """Return whether a step is the first one after so many."""
        last = self._last(event)
        return event.step // self.every > last.step // self.every

    def _last(self, event: Event) -> _Written:
        """Return the last row of the event's loss scale, if that has not begun anew since."""
        last = self._written.get((event.framework, event.group, event.loss_id), _Written())
        anew = event.step < last.step or (isinstance(event, Progress) and event.skipped < last.skipped)
        return _Written() if anew else last

    def _values(self, event: Event) -> dict[str, float] | None:
        """Return the numbers of an event by their names; None where it is not this log's turn."""
        if isinstance(event, UpdateMetered):
            values = {"meter/lost": event.lost, "meter/flushed": event.flushed}
            return values if event.headroom is None else {**values, "meter/headroom": event.headroom}
        values = {"loss_scale": event.next_scale, "consecutive_skips": event.consecutive_skips}
        if not isinstance(event, Progress):
            return values
        if not self._is_due(event):
            return None
        last = self._last(event)
        self._written[event.framework, event.group, event.loss_id] = _Written(event.step, event.skipped)
        values["skipped_steps"] = event.skipped
        values["skipped_share"] = (event.skipped - last.skipped) / (event.step - last.step)
        return values if event.grad_norm is None else {**values, "grad_norm": event.grad_norm}

    def observe(self, *opts: Any) -> None:
        """Look at optimizer states, once a step, where steps run without Python; in every `every`-th call they are read.

        That is in JAX, where only the script has the optimizer state, and in PyTorch where a CUDA graph replays steps.
        Elsewhere rows come by themselves.

        Args:
            *opts: The optimizer states, or wrapped optimizers, of this step.

        Raises:
            NotWrappedError: One of them is neither.

        Sync: one a state in every `every`-th call, else none.
        """
        self._looks += 1
        if self._looks % self.every == 0:
            for opt in opts:
                api.observe(opt)

    def call_at_end(self, function: Callable[[], None]) -> None:
        """Call a function when this is closed."""
        self._closing.callback(function)

    def flush(self) -> None:
        """Have what was written reach its file. Sync: where the scale lives on the device."""
        for group in sessions.living_groups():
            if self._framework in (None, group.framework):
                group.ledger.close(group)
        if self._target is not None:
            self._target.flush()

    def close(self) -> None:
        """Write what is due, and end; repeated calls do nothing. Sync: where the scale lives on the device.

        What `log_to` opened is closed; a writer or run of the script's own is flushed and stays open.
        """
        atexit.unregister(self.close)
        with self._closing.pop_all():
            if os.getpid() == self._process:
                self.flush()

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def log_to(target: Any, every: int = LOG_EVERY, *, framework: str | None = None) -> Log:
    """Write what steps report to a target: the loss scale, skipped steps, gradient norms and the meter's numbers.

    Args:
        target: A path that ends in `.jsonl`; `"tensorboard:FOLDER"`, `"wandb:PROJECT"` (offline, unless WANDB_MODE says
            otherwise) or `"mlflow:TRACKING_URI"`; a `SummaryWriter` or a writer of `tf.summary`; a W&B run or `wandb`,
            an MLflow run or `mlflow`; a function of the numbers by name and `step=`, or an object with such a method
            `log_metrics`; or a plugin with the hook `ampx_event`.
        every: Every so many steps of a loss scale a row is written. A change of the scale, and what the meter sees,
            are written when they come.
        framework: The framework whose steps are meant; by default that of the only session.

    Returns:
        A log. It ends when it is closed, when its block is left, or with the process.

    Raises:
        NotInitializedError: There is no session, or there are several and `framework` names none.
        InvalidOptionError: The target is not understood, its package is missing, or `every` is no number of steps.

    Sync: where the scale lives on the device, one when it starts, and one every `every` steps.

    Example:
        >>> log = ampx.log_to("run.jsonl", every=10)
    """
    session = sessions.only("log_to", framework)
    log = Log(target, every, session.framework)
    log.call_at_end(session.at_shutdown(log.close))
    return log
