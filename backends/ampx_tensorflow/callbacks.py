"""Callbacks for Keras' `fit`: the loss scale among the metrics of an epoch, and an end to training that only skips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from ampx.api import on_event
from ampx.errors import NotWrappedError
from ampx.events import Event, ScaleCollapsed
from ampx.optimizer import WrappedOptimizer
from ampx.protocol import ScaleGroup


class LossScaleMonitor(keras.callbacks.Callback):
    """Add the loss scale and skipped steps to the `logs` of every epoch, and stop training when the scale collapses.

    `History`, `CSVLogger`, `TensorBoard` and other callbacks find there, if they stand behind this one:

    - `loss_scale`: the loss scale after the epoch.
    - `skipped_steps`: the skipped steps of the epoch.
    - `skipped_share`: their share of the epoch's steps, from 0 to 1.
    - `scale_collapses`: how often the scale has collapsed in this `fit`, with `ScaleCollapsed` for each.

    It asks nothing of a step. Sync: one an epoch.

    Attributes:
        stop_on_collapse: Training stops when the scale collapses: at once where steps run eagerly, in functions when
            the host looks, which is about every 256th step and at the end of an epoch.
        collapse: The last event of a collapse; None before.
    """

    def __init__(self, stop_on_collapse: bool = False) -> None:
        super().__init__()
        self.stop_on_collapse = stop_on_collapse
        self.collapse: ScaleCollapsed | None = None
        self._collapses = 0
        self._before = (0, 0)
        self._remove: Callable[[], None] = lambda: None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Listen to the session.

        Raises:
            NotWrappedError: The model was not compiled with a wrapped optimizer.
            NotInitializedError: There is no session.
        """
        group = self._group()
        group.resolve()
        self._collapses, self.collapse, self._before = 0, None, _counts(group)
        self._remove()  # of a fit that an exception ended
        self._remove = on_event(self._hear)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the numbers of the epoch. Sync: one."""
        group = self._group()
        group.resolve()
        steps, skipped = (now - before for now, before in zip(_counts(group), self._before, strict=True))
        self._before = _counts(group)
        if logs is not None:
            logs["loss_scale"] = float(group.states[0].scale)
            logs["skipped_steps"] = skipped
            logs["skipped_share"] = skipped / steps if steps else 0.0
            logs["scale_collapses"] = self._collapses

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Listen no more."""
        self._remove()
        self._remove = lambda: None

    def _group(self) -> ScaleGroup:
        optimizer = self.model.optimizer
        if not isinstance(optimizer, WrappedOptimizer):
            raise NotWrappedError(
                f"LossScaleMonitor got a model that was compiled with {type(optimizer).__name__}, which has no loss "
                f"scale of ampx; accepted: wrapped optimizers. Call model.compile(ampx.wrap_optimizer(opt), …)."
            )
        return optimizer.ampx_group

    def _hear(self, event: Event) -> None:
        group = self._group()
        if isinstance(event, ScaleCollapsed) and (event.framework, event.group) == (group.framework, group.index):
            self._collapses += 1
            self.collapse = event
            if self.stop_on_collapse:
                # Not in `on_train_batch_end`: with that, Keras waits for the metrics of every batch.
                self.model.stop_training = True


def _counts(group: ScaleGroup) -> tuple[int, int]:
    return group.steps, group.skipped.get(0, 0)
