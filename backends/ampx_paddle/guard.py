"""Keep the raw optimizer from being stepped by mistake."""

from __future__ import annotations

from typing import Any, Final

from ampx.errors import RawStepError
from ampx.group import Member

MARK: Final = "found_inf"


class StepGuard:
    """Stands where Paddle's own scaler marks an overflow: every optimizer asks it before it updates anything.

    Its truth is False, so that steps run. That closes a native defect too: after a step that Paddle's own scaler
    skipped, its mark would make every plain step do nothing.

    Attributes:
        open: The wrapper itself is stepping.
    """

    def __init__(self, member: Member) -> None:
        """Watch one member."""
        self._member = member
        self.open = False

    def __bool__(self) -> bool:
        """Answer the raw optimizer's question whether to skip: no.

        Raises:
            RawStepError: Gradients would be applied scaled, or without having been checked.
        """
        if not self.open and self._member.pending:
            raise RawStepError(
                "the raw optimizer was stepped while gradients of scale_loss are pending; they would be applied scaled "
                "or unchecked. Call step() on the object that ampx.wrap_optimizer returned."
            )
        return False

    def watch(self, optimizer: Any) -> None:
        """Take the mark's place on a raw optimizer, whatever stood there. Sync: none."""
        if optimizer._get_auxiliary_var(MARK) is not self:
            optimizer._set_auxiliary_var(MARK, self)

    @staticmethod
    def leave(optimizer: Any) -> None:
        """Clear the mark. Sync: none."""
        optimizer._set_auxiliary_var(MARK, None)
