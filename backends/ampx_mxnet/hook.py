"""The place where MXNet's trainer asks a loss scaler: after adding up the contexts, before updating."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final, NoReturn

from ampx.errors import RawStepError
from ampx.protocol import Member, NotCopied

from .casting import switch
from .compat import amp
from .gradients import restore_fresh

_NUMBERS: Final = ("_loss_scale", "_next_loss_scale", "_max_loss_scale", "_scale_seq_len", "_unskipped")


class SavedScaler(amp.loss_scaler.LossScaler):
    """The numbers of a trainer's loss scale, by MXNet's names, as they were copied or pickled; it checks nothing."""

    def __init__(self, numbers: dict[str, float]) -> None:
        self.__dict__.update(numbers)

    def has_overflow(self, params: Iterable[Any]) -> bool:
        """Return False: a copied trainer has nothing that is scaled."""
        return False


class OverflowHook(NotCopied):
    """Stands where MXNet keeps the scaler of a raw trainer, which asks it before every update.

    Native defect: MXNet's scaler moves the scale one step late, looks at the first context only, and fails on
    parameters of different dtypes. This one asks ampx, and holds no scale: its numbers are the group's, by MXNet's
    names for them.
    """

    def __init__(self, member: Member, drop: Callable[[], Callable[[], None] | None]) -> None:
        """Watch one member; `drop` is a weak reference to what forgets the pending gradients."""
        self.finite = True  # whether all gradients of the wrapper's last step were finite
        self._member = member
        self._drop = drop
        self._trainer: Callable[[], Any] = type(None)
        self._check: Callable[[], bool] | None = None
        self._scale: float | None = None  # the raw trainer's own factor, while a step has another in its place

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Copy as the numbers alone: the copy of a wrapper makes its own."""
        return SavedScaler, ({name: getattr(self, name) for name in _NUMBERS},)

    def take_over(self, scaler: Any) -> None:
        """Go on with the numbers of a scaler of MXNet's, or of one that was saved."""
        numbers = [getattr(scaler, name) for name in _NUMBERS[1:]]
        self._next_loss_scale, self._max_loss_scale, self._scale_seq_len, self._unskipped = numbers

    def has_overflow(self, parameters: Iterable[Any]) -> bool:
        """Answer MXNet's question whether to skip the update; it passes its parameters.

        Sync: as the wrapper's check.
        """
        check, self._check = self._check, None  # once a step: what an exception leaves behind must not check another
        if check is not None:
            self.finite = check()
            return not self.finite
        if self._member.pending and self._member.group.enabled:
            self._refuse()
        return False

    def _refuse(self) -> NoReturn:
        trainer, drop = self._trainer(), self._drop()
        dropped = ""
        if trainer is not None and trainer._kvstore and drop is not None:
            # MXNet's `step` has added up the contexts by now, its `update` has not: a second sum would be wrong.
            drop()
            dropped = " The gradients of several contexts were dropped; run backward again."
        raise RawStepError(
            f"the raw trainer was stepped while gradients of scale_loss are pending; they would be applied scaled or "
            f"unchecked. Call step() on the object that ampx.wrap_optimizer returned.{dropped}"
        )

    def run(
        self,
        trainer: Any,
        step: Callable[[float, bool], None],
        batch_size: float,
        ignore_stale_grad: bool,
        is_ready: Callable[[], bool],
        divisor: float | None = None,
    ) -> bool:
        """Run a raw trainer's `step` or `update`, casting off; return what `is_ready` answered MXNet, or True.

        The update divides gradients by `divisor` on the way; None: they are unscaled by then.
        """
        self.restore_scale(trainer)
        self.watch(trainer)
        before = self._scale = trainer._scale
        try:
            if divisor is not None:
                trainer._scale = before / divisor
            self.finite, self._check = True, is_ready
            with switch.Region(None):
                step(batch_size, ignore_stale_grad)
        except UserWarning as error:
            restore_fresh(trainer, str(error))
            raise
        finally:
            self._check = None
            # Native defect: left as it is, the factor would shrink the next step that was not scaled.
            self.restore_scale(trainer)
            if divisor is not None:
                trainer._optimizer.rescale_grad = before / batch_size
        return self.finite

    def restore_scale(self, trainer: Any) -> None:
        """Put a raw trainer's own factor back, where a step had put another there."""
        if self._scale is not None:
            trainer._scale, self._scale = self._scale, None

    def watch(self, trainer: Any) -> None:
        """Take the scaler's place on a raw trainer, whatever stood there."""
        trainer._amp_loss_scaler = self
        self._trainer = weakref.ref(trainer)

    @staticmethod
    def leave(trainer: Any) -> None:
        """Leave a raw trainer without a scaler."""
        vars(trainer).pop("_amp_loss_scaler", None)

    # -- MXNet's numbers, which scripts read, save and set ---------------------------------------------

    @property
    def loss_scale(self) -> float:
        """The loss scale that pending gradients carry; the present one while there are none."""
        group, factor = self._member.group, self._member.factor
        return float(group.states[0].scale if factor is None else factor)

    def _load(self, **values: Any) -> None:
        group = self._member.group
        group.load(group.config, {**group.states, 0: replace(group.states[0], **values)})

    def _configure(self, **values: Any) -> None:
        group = self._member.group
        group.load(replace(group.config, **values), group.states)

    _loss_scale = property(lambda hook: hook.loss_scale, lambda hook, value: hook._load(scale=float(value)))
    _next_loss_scale = property(
        lambda hook: float(hook._member.group.states[0].scale), lambda hook, value: hook._load(scale=float(value))
    )
    _unskipped = property(
        lambda hook: int(hook._member.group.states[0].growth_tracker),
        lambda hook, value: hook._load(growth_tracker=int(value)),
    )
    _scale_seq_len = property(
        lambda hook: int(hook._member.group.config.growth_interval),
        lambda hook, value: hook._configure(growth_interval=int(value)),
    )
    _max_loss_scale = property(
        lambda hook: float(hook._member.group.config.max_scale),
        lambda hook, value: hook._configure(max_scale=float(value)),
    )
