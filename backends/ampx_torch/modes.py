"""Dispatch modes of ours, which end in any order; those of torch end in the order of a stack."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode


class Mode(TorchDispatchMode):
    """One that does nothing once `leave` was called, however long it stays on the stack."""

    ended = False


def leave(mode: Mode) -> None:
    """End a mode, and take all ended ones from the top of the stack: any other stays until those above it end."""
    mode.ended = True
    while isinstance(top := _get_current_dispatch_mode(), Mode) and top.ended:
        top.__exit__(None, None, None)
