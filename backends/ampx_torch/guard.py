"""Keep the raw optimizer from being stepped by mistake."""

from __future__ import annotations

from typing import Any

from ampx.errors import RawStepError
from ampx.protocol import Member


class StepGuard:
    """A step hook of the raw optimizer that raises while gradients of `scale_loss` are pending.

    Attributes:
        open: The wrapper itself is stepping.
        begins: It asks to note, when all hooks have run, that the update begins.
    """

    def __init__(self, member: Member) -> None:
        """Watch one member."""
        self._member = member
        self.open = self.begins = False

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Raise unless the wrapper steps or nothing is pending.

        Raises:
            RawStepError: Gradients would be applied scaled, or without having been checked.
        """
        if self.begins:
            self.begins = False
            self._member.begin_change()
        if not self.open and self._member.pending:
            raise RawStepError(
                f"the raw {type(optimizer).__name__} was stepped while gradients of scale_loss are pending; they would "
                f"be applied scaled or unchecked. Call step() on the object that ampx.wrap_optimizer returned."
            )
