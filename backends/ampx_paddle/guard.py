"""Keep the raw optimizer from being stepped by mistake."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

from ampx.errors import RawStepError
from ampx.protocol import Member

MARK: Final = "found_inf"


class StepGuard:
    """Stands where Paddle's own scaler marks an overflow: every optimizer asks it before it updates anything.

    Its truth is False, so that steps run. That closes a native defect too: after a step that Paddle's own scaler
    skipped, its mark would make every plain step do nothing.
    """

    def __init__(self, member: Member, are_scaled: weakref.WeakMethod[Callable[[], bool]]) -> None:
        """Watch a member.

        Args:
            member: The optimizer's place in the protocol.
            are_scaled: Refers to what returns whether gradients are not unscaled though nothing is pending.
        """
        self._member = member
        self._are_scaled = are_scaled
        self._stepping = threading.Lock()

    def opened(self, optimizer: Any) -> AbstractContextManager[Any]:
        """Return a region in which the wrapper itself steps a raw optimizer.

        A lock, though nobody waits for it: leaving it is not Python code, in which a signal could be handled.
        """
        self.watch(optimizer)
        self._stepping = threading.Lock()
        return self._stepping

    def __bool__(self) -> bool:
        """Answer the raw optimizer's question whether to skip: no, or an error."""
        if self._stepping.locked():
            return False
        if self._member.pending:
            raise RawStepError(
                "the raw optimizer was stepped while gradients of scale_loss are pending; they would be applied scaled "
                "or unchecked. Call step() on the object that ampx.wrap_optimizer returned."
            )
        are_scaled = self._are_scaled()
        if are_scaled is not None and are_scaled():
            raise RawStepError(
                "the raw optimizer was stepped on gradients that a skipped step, an exception or a scaled loss of "
                "other optimizers left; they would be applied scaled or unchecked. Call clear_grad() before the "
                "backward whose gradients it shall apply."
            )
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> StepGuard:
        """Return a guard of the copied member; locks cannot be copied."""
        return StepGuard(copy.deepcopy(self._member, memo), self._are_scaled)

    def watch(self, optimizer: Any) -> None:
        """Take the mark's place on a raw optimizer, whatever stood there."""
        optimizer._set_auxiliary_var(MARK, self)

    @staticmethod
    def leave(optimizer: Any) -> None:
        """Clear the mark."""
        optimizer._set_auxiliary_var(MARK, None)
