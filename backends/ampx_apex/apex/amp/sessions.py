"""The ampx session behind `apex.amp`."""

from __future__ import annotations

import os
from typing import Any, Final

import torch

import ampx
from ampx.errors import InvalidOptionError, NotInitializedError
from ampx.policy import normalise_dtype
from ampx_torch.trees import DTYPES

from . import lists, registry
from ._amp_state import _amp_state

VARIABLE: Final = "AMPX_APEX_DTYPE"


def choose_low(option: object) -> torch.dtype:
    """Return the dtype that stands where apex had float16: the option, else what AMPX_APEX_DTYPE says, else float16."""
    passed = os.environ.get(VARIABLE) or "float16" if option is None else option
    wanted = normalise_dtype(str(passed).removeprefix("torch."))
    if wanted == "float32":
        raise InvalidOptionError(
            f"dtype={passed!r} is no low precision; accepted: 'float16', 'bfloat16'. Pass one of these as dtype or in "
            f"{VARIABLE}, or use opt_level='O0'."
        )
    return DTYPES[wanted]


def start(level: Any, low: torch.dtype, device: str, scale: Any, allow_banned: bool) -> ampx.Amp:
    """Start a session, in place of the former one."""
    allow: list[Any] = []
    deny: list[Any] = []
    if level == "O1":
        own_allow, own_deny = registry.entries(device)
        # What the script registered goes before the lists, as it did in apex.
        allow = [*_without(lists.allowed(device), own_deny), *own_allow]
        allow_banned = allow_banned or not lists.bans()
        deny = [*_without(lists.denied(device, allow_banned), own_allow), *own_deny]
    dtype = next(name for name, candidate in DTYPES.items() if candidate is low)
    former = _amp_state.session
    session = ampx.init(
        "torch", dtype=dtype, level=level, device=device, loss_scale=scale, nan_loss="skip", allow=allow, deny=deny
    )
    session.recipe = "apex.amp"
    _amp_state.session = session
    if level == "O1":
        registry.patch()
    elif former is not None:
        registry.restore()
    return session


def _without(entries: list[Any], others: list[Any]) -> list[Any]:
    taken = {registry.operation(entry) for entry in others}
    return [entry for entry in entries if registry.operation(entry) not in taken]


def end() -> None:
    """End the session, if there is one; torch is as it was."""
    registry.restore()
    if _amp_state.session is not None:
        _amp_state.session.shutdown()
        _amp_state.session = _amp_state.handle = None


def present(call: str) -> ampx.Amp:
    """Return the session, or raise where `initialize` was not called or the session was shut down since."""
    session: ampx.Amp | None = _amp_state.session
    if session is None or not session.active:
        raise NotInitializedError(
            f"{call} was called without amp.initialize; accepted: after model, optimizer = amp.initialize(model, "
            f"optimizer, opt_level=…), and before ampx.shutdown or another ampx.init. Call it first."
        )
    return session
