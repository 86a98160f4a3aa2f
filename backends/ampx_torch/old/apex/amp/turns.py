"""The optimizer of the older calls: it scales its losses itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ampx.errors import ProtocolError
from ampx.protocol import Member

from .opt import ApexOptimizer, make
from .scaler import send, settle


class LossesInTurn(ApexOptimizer):
    """An optimizer of the older calls: `number` losses with scales of their own come before each step."""

    own = ApexOptimizer.own | {"number", "turn", "_session"}
    number: int
    turn: int

    def start(self, session: Any, number: int) -> None:
        """Wait for the first loss."""
        self._session = session
        self.number = number
        self.turn = 0

    @contextlib.contextmanager
    def scale_loss(self, loss: torch.Tensor) -> Iterator[torch.Tensor]:
        """Scale the next loss; when the block ends, gradients are true.

        Raises:
            ProtocolError: There were as many losses as `num_loss` says, and no step since.

        Sync: one a device when the block ends.
        """
        if self.turn >= self.number:
            raise ProtocolError(
                f"optimizer.scale_loss was called {self.turn + 1} times before a step; accepted: "
                f"num_loss={self.number} times. Call optimizer.step(), or pass a larger num_loss to wrap_optimizer."
            )
        self.delays = False
        with self._session.scale_loss(loss, self, loss_id=self.turn) as scaled:
            yield scaled
        events = settle(self, self.turn)
        self.turn += 1
        send(events)

    def _clear(self) -> None:
        """Begin with the first loss again."""
        super()._clear()
        self.turn = 0


def wrap(optimizer: Any, member: Member, options: Mapping[str, Any]) -> LossesInTurn:
    """Turn a script's optimizer into one of the older calls, in place."""
    return make(optimizer, LossesInTurn, member, options)  # type: ignore[return-value]
