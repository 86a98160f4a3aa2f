"""`scale_loss`, `disable_casts`, and the handle of the older calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

import ampx
from ampx.errors import InvalidOptionError, NotWrappedError, ProtocolError
from ampx.protocol import Member
from ampx.scaling import check_loss
from ampx_torch import casting
from ampx_torch.delegation import DelegatingOptimizer

from . import decorators, registry, sessions
from ._amp_state import _amp_state
from .checks import flatten
from .errors import LossIdError
from .opt import ApexOptimizer, make, wrap
from .scaler import LossScaler, send, settle


@contextlib.contextmanager
def scale_loss(
    loss: torch.Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[torch.Tensor]:
    """Return the loss in float32 times its loss scale; when the block ends, gradients are unscaled.

    A loss of several elements needs its own way of calling backward. Nothing needs `model`.

    Args:
        loss: Floating tensor.
        optimizers: All optimizers whose gradients this backward makes: one, or a list. With an empty list the loss
            is scaled and nothing is unscaled, for gradients of inputs.
        loss_id: Which loss scale, below `num_losses`.
        model: Accepted.
        delay_unscale: Leave the gradients scaled when the block ends; the next block without it, or the step,
            unscales them.
        delay_overflow_check: Move the loss scale, and decide about skipping, in the step.

    Raises:
        NotInitializedError: `initialize` was not called.
        NotWrappedError: An optimizer did not go through `initialize`.
        LossIdError: There is no such loss id.
        LossDtypeError, DetachedLossError, AlreadyScaledError: The loss is not floating, detached, or scaled before.

    Sync: one a device when the block ends, unless delayed.
    """
    if _amp_state.initialized and not _amp_state.opt_properties.enabled:
        yield loss
        return
    session = sessions.present("scale_loss")
    chosen, scaler = _checked(optimizers, loss_id)
    if not chosen:
        check_loss(session.backend, _one_element(loss), session.check_nan)
        with disable_casts():
            yield session.backend.scale(loss, scaler.loss_scale())
        return
    scaler.clear_overflow_state()
    with block(session, loss, chosen, loss_id, delay_unscale) as scaled:
        yield scaled
    overflowed = not chosen[0].verdict.finite
    if overflowed:
        scaler._overflow_buf.fill_(1)
    if not delay_overflow_check:
        scaler._has_overflow = overflowed
        send([event for optimizer in chosen for event in settle(optimizer, loss_id)])


def _checked(optimizers: Any, loss_id: int) -> tuple[list[ApexOptimizer], LossScaler]:
    chosen = [_inner(optimizer) for optimizer in flatten(optimizers)]
    for optimizer in chosen:
        if not isinstance(optimizer, ApexOptimizer):
            raise NotWrappedError(
                f"scale_loss got {type(optimizer).__name__}, which amp.initialize did not return; accepted: optimizers "
                f"that went through it. Pass it to amp.initialize with the others."
            )
    scalers = _amp_state.loss_scalers
    if isinstance(loss_id, bool) or not isinstance(loss_id, int) or not 0 <= loss_id < len(scalers):
        raise LossIdError(
            f"loss_id={loss_id!r} is not the id of a loss; accepted: integers from 0 to {len(scalers) - 1}, because "
            f"num_losses={len(scalers)}. Pass a larger num_losses to amp.initialize."
        )
    return chosen, scalers[loss_id]


def _inner(optimizer: Any) -> Any:
    """Return what a wrapper made after `initialize`, such as LARC, holds."""
    while isinstance(optimizer, DelegatingOptimizer) and not isinstance(optimizer, ApexOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


@contextlib.contextmanager
def block(
    session: ampx.Amp, loss: torch.Tensor, optimizers: list[ApexOptimizer], loss_id: int, delays: bool
) -> Iterator[torch.Tensor]:
    """Scale a loss; afterwards have the optimizers unscale their gradients, unless delayed. Sync: one a device."""
    for optimizer in optimizers:
        optimizer.delays = delays
    element = _one_element(loss)
    with session.scale_loss(element, optimizers, loss_id=loss_id) as scaled:
        for optimizer in optimizers:
            optimizer.verdict = optimizers[0].verdict
        yield scaled if element is loss else session.backend.scale(loss, optimizers[0].ampx_member.factors[loss_id])


def _one_element(loss: Any) -> Any:
    """Return a loss of one element as it is, and for one of several their sum, which can be checked in its place."""
    several = isinstance(loss, torch.Tensor) and loss.numel() > 1 and loss.is_floating_point()
    return loss.float().sum() if several else loss


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Return a region in which operations are not cast; may be nested, and restores after exceptions."""
    plan = decorators.casting_plan()
    with contextlib.nullcontext() if plan is None else casting.off(plan.device):
        yield


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
        """Scale the next loss; when the block ends, gradients are unscaled.

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


def _wrap_in_turn(optimizer: Any, member: Member, options: Mapping[str, Any]) -> LossesInTurn:
    """Turn a script's optimizer into one of the older calls, in place."""
    return make(optimizer, LossesInTurn, member, options)


class AmpHandle:
    """What `init` returns, and what `initialize` keeps at O1: the older way to scale losses."""

    def __init__(self, session: ampx.Amp, loss_scale: Any = "dynamic") -> None:
        self._session = session
        self._loss_scale = loss_scale
        self._first: ApexOptimizer | None = None
        self._wraps = False

    def is_active(self) -> bool:
        """Return whether operations are cast at this moment."""
        return decorators.casting_plan() is not None

    @property
    def _is_active(self) -> bool:
        return self.is_active()

    def disable_casts(self) -> contextlib.AbstractContextManager[None]:
        """Return a region in which operations are not cast."""
        return disable_casts()

    _disable_casts = disable_casts

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> LossesInTurn:
        """Return the optimizer, whose `optimizer.scale_loss(loss)` has a loss scale for each of its `num_loss` losses.

        Raises:
            NotAnOptimizerError, AlreadyWrappedError, InvalidOptionError: It is no optimizer, was wrapped before, or
            the number is not positive.
        """
        if isinstance(num_loss, bool) or not isinstance(num_loss, int) or num_loss < 1:
            raise InvalidOptionError(f"num_loss={num_loss!r} is not accepted; accepted: an integer from 1. Change it.")
        self._wraps = True
        wrapped: LossesInTurn = self._session.wrap_optimizer(
            optimizer, loss_scale=self._loss_scale, wrapper=_wrap_in_turn
        )
        wrapped.start(self._session, num_loss)
        return wrapped

    @contextlib.contextmanager
    def scale_loss(self, loss: torch.Tensor, optimizer: Any) -> Iterator[torch.Tensor]:
        """Scale a loss; when the block ends, gradients are unscaled, and the next step may be skipped.

        A raw optimizer becomes one that can skip, in place. All optimizers of a handle share its loss scale.

        Raises:
            ProtocolError: `wrap_optimizer` was used, so that the optimizers have their own `scale_loss`.

        Sync: one a device when the block ends.
        """
        if self._wraps:
            raise ProtocolError(
                "handle.scale_loss was called after handle.wrap_optimizer; accepted: one of the two ways. Use "
                "optimizer.scale_loss(loss) with every optimizer that wrap_optimizer returned."
            )
        if not isinstance(optimizer, ApexOptimizer):
            self._session.wrap_optimizer(optimizer, loss_scale=self._loss_scale, wrapper=wrap)
            if self._first is None:
                self._first = optimizer
            else:  # one loss scale for all
                optimizer.join(self._first.ampx_member.group)
        with block(self._session, loss, [optimizer], 0, False) as scaled:
            yield scaled
        send(settle(optimizer, 0))

    # -- what apex's own code and some scripts looked at -------------------------------------------

    @property
    def has_cache(self) -> bool:
        """Whether casts of weights are kept: never, so that none is stale."""
        return False

    @property
    def cache(self) -> dict[Any, Any]:
        """Kept casts: none."""
        return {}

    @property
    def verbose(self) -> bool:
        """Whether casts are printed: never."""
        return False

    def remove_cache(self, param: Any) -> None:
        """Do nothing: no cast of the parameter is kept."""

    def _clear_cache(self) -> None:
        torch.clear_autocast_cache()

    def _deactivate(self) -> None:
        registry.restore()
        self._session.shutdown()


class NoOpHandle:
    """What `init(enabled=False)` returns: everything is transparent."""

    has_cache = False
    verbose = False

    def is_active(self) -> bool:
        """Note that operations are not cast."""
        return False

    def disable_casts(self) -> contextlib.AbstractContextManager[None]:
        """Return a region that changes nothing."""
        return contextlib.nullcontext()

    _disable_casts = disable_casts

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Return the optimizer with a `scale_loss` that changes nothing."""
        optimizer.scale_loss = contextlib.nullcontext
        return optimizer

    def scale_loss(self, loss: Any, optimizer: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a region that yields the loss as it is."""
        return contextlib.nullcontext(loss)

    def _clear_cache(self) -> None:
        """Do nothing."""

    def _deactivate(self) -> None:
        """Do nothing."""
