"""A script's own `torch.autocast`: refused, or carried out with the dtype and device that ampx found."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final
from unittest import mock

import torch
from torch.amp.autocast_mode import autocast

import ampx
from ampx_torch.trees import DTYPES

from .managing import Manager

_OWN: Final = ("torch", "ampx", "ampx_torch")
# Names under which scripts reach the classes; their frames lie between the script and the patch.
_ALIASES: Final = ("torch.cuda.amp", "torch.cpu.amp", "torch.amp", "typing_extensions", "warnings")
ADVICE: Final = (
    "accepted: a script without mixed precision of its own. Pass --replace-native to have ampx carry it out, or turn "
    "it off in the script"
)


def asked_by_script() -> bool:
    """Tell whether the script asks, and not torch for itself (in checkpointing, say) or ampx."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith(_ALIASES):
            return module.partition(".")[0] not in _OWN
        frame = frame.f_back
    return True


@contextmanager
def autocast_watched(manager: Manager) -> Iterator[None]:
    """Patch the class behind `torch.autocast` and its older names. Regions that switch casting off stay as they are."""
    true = autocast.__init__
    run = manager.run
    if run.settings.replace_native:
        manager.options = {"process_wide": False}

    def make(
        self: autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if enabled and asked_by_script() and not manager.stood_down:
            if not run.settings.replace_native:
                run.refuse(f"the script switches torch.autocast on by itself; {ADVICE}")
            amp = run.session(**manager.options)
            device_type, dtype, enabled = _replacement(run.settings.dtype, amp, device_type, dtype)
        true(self, device_type, dtype, enabled, cache_enabled)

    with mock.patch.object(autocast, "__init__", make):
        yield


def _replacement(
    wanted: str, amp: ampx.Amp, device_type: str, dtype: torch.dtype | None
) -> tuple[str, torch.dtype | None, bool]:
    """Give device, dtype and switch of a region: the script's where this machine has them, else the session's."""
    effective = amp.effective
    if effective.dtype is None:
        return device_type, dtype, False
    absent = device_type == "cuda" and not torch.cuda.is_available()
    if absent:
        device_type = "cpu"
    if absent or dtype is None or wanted != "auto":
        dtype = DTYPES[effective.dtype]
    return device_type, dtype, True
