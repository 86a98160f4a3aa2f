"""What of a wrapped optimizer can be copied, and what cannot because Paddle's own optimizer cannot."""

from __future__ import annotations

import abc
import copy
from typing import Any, NoReturn

from ampx.errors import UnsupportedByBackendError


class CopiesWithCare(abc.ABC):
    """Copies before the first step, as Paddle's optimizers do; refuses what they fail at, with advice."""

    optimizer: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy optimizer and loss scale; parameters travel along, gradients do not.

        Raises:
            UnsupportedByBackendError: The optimizer has stepped: Paddle's own cannot be copied then.
        """
        try:
            raw = copy.deepcopy(self.optimizer, memo)
        except TypeError as error:
            raise UnsupportedByBackendError(
                f"copy.deepcopy got a wrapped {type(self.optimizer).__name__} that has stepped, which Paddle cannot "
                f"copy ({error}); accepted: one that has not. Make a new optimizer, wrap it, and load opt.state_dict() "
                f"into it and amp.state_dict() into the session."
            ) from error
        new = object.__new__(type(self))
        memo[id(self)] = new
        anew = ("optimizer", "_mixer", "_guard", "_writes")
        kept = {key: value for key, value in self.__dict__.items() if key not in anew}
        new.ampx_restore({**copy.deepcopy(kept, memo), "optimizer": raw})
        return new

    @abc.abstractmethod
    def ampx_restore(self, state: dict[str, Any]) -> None:
        """Take over what was copied; the rest is made anew."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled.

        Raises:
            UnsupportedByBackendError: Always: Paddle's own optimizers cannot be pickled.
        """
        raise UnsupportedByBackendError(
            f"a wrapped {type(self.optimizer).__name__} cannot be pickled, because Paddle's optimizers cannot; "
            f"accepted: their states. Save opt.state_dict() with paddle.save, and amp.state_dict() as JSON."
        )
