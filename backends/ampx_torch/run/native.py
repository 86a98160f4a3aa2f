"""A script's own `torch.autocast`: refused, or carried out.

Where the user asked for a dtype, the regions compute in it. Where not, they compute in the script's, and the session,
which casts nothing by itself then, tells what they did.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Final
from unittest import mock

import torch
from torch.amp.autocast_mode import autocast

from ampx.backend import CastPlan
from ampx.policy import Dtype
from ampx_torch import devices
from ampx_torch.casting import lstm
from ampx_torch.trees import DTYPES

from .manager import Manager

_OWN: Final = ("torch", "ampx", "ampx_torch")
# Names under which scripts reach the classes; their frames lie between the script and the patch.
_ALIASES: Final = ("torch.cuda.amp", "torch.cpu.amp", "torch.amp", "typing_extensions", "warnings")
ADVICE: Final = (
    "accepted: a script without mixed precision of its own. Pass --replace-native to have ampx carry it out, or turn "
    "it off in the script"
)


def asked_by_script() -> bool:
    """Return whether the script asks, and not torch for itself (in checkpointing, say) or ampx."""
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
    regions = _Regions(manager)

    @functools.wraps(true)
    def make(
        self: autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        # Errors of the script are torch's to raise, and other devices are none of ours.
        ours = device_type in ("cpu", "cuda") and (dtype is None or isinstance(dtype, torch.dtype))
        if enabled and ours and asked_by_script() and not manager.stood_down:
            if not run.settings.replace_native:
                run.refuse(f"the script switches torch.autocast on by itself; {ADVICE}")
            manager.start()
            device_type, dtype, enabled = regions.replacement(device_type, dtype)
        true(self, device_type, dtype, enabled, cache_enabled)

    try:
        with mock.patch.object(autocast, "__init__", make):
            yield
    finally:
        regions.close()


class _Regions:
    """What the script's regions become."""

    def __init__(self, manager: Manager) -> None:
        """Leave casting to the regions; and the dtype, where the user asked for none."""
        self._manager = manager
        self._seen: list[Dtype] = []
        self._plans: dict[str, CastPlan] = {}  # by dtype, of regions on the CPU
        settings = manager.run.settings
        if not settings.replace_native:
            return
        manager.options = {"process_wide": False}
        manager.follows = settings.dtype == "auto" and settings.level != "O0"
        if manager.follows:
            manager.options["dtype"] = "float32"  # until a region tells another

    def replacement(self, device: str, dtype: torch.dtype | None) -> tuple[str, torch.dtype | None, bool]:
        """Return device, dtype and switch of a region: the script's where this machine has them."""
        device, dtype, enabled = self._chosen(device, dtype)
        name = _name(dtype)
        if enabled and device == "cpu" and name is not None and name not in self._plans:
            plan = self._plans[name] = CastPlan(device, name, "O1", (), ())
            lstm.install(plan)  # for the rest of the run: the script may keep the region and enter it whenever
        self._manager.explain()
        return device, dtype, enabled

    def close(self) -> None:
        """Leave torch's kernels as they were."""
        for plan in self._plans.values():
            lstm.uninstall(plan)
        self._plans = {}

    def _chosen(self, device: str, dtype: torch.dtype | None) -> tuple[str, torch.dtype | None, bool]:
        absent = device == "cuda" and not torch.cuda.is_available()
        if absent:
            device = "cpu"
        if not self._manager.follows:
            amp = self._manager.run.amp
            assert amp is not None
            chosen = amp.effective.dtype
            return device, dtype if chosen is None else DTYPES[chosen], chosen is not None
        if absent:
            preferred = devices.describe("cpu").preferred
            dtype = None if preferred is None else DTYPES[preferred]
        elif dtype is None:
            dtype = torch.get_autocast_dtype(device)
        self._tell(device, dtype)
        return device, dtype, dtype is not None

    def _tell(self, device: str, dtype: torch.dtype | None) -> None:
        """Have the session tell the dtype of the regions: the first one's, and beside it what others compute in."""
        name = _name(dtype)
        amp = self._manager.run.amp
        assert amp is not None
        if name is None or name in self._seen:
            return
        self._seen.append(name)
        reason = f"as the script's own regions say, which compute in {' and '.join(self._seen)}"
        native = all(one in devices.describe(device).native for one in self._seen)
        amp.effective = replace(amp.effective, device=device, dtype=self._seen[0], native=native, reason=reason)


def _name(dtype: torch.dtype | None) -> Dtype | None:
    """Return the name of a low precision; None for what is none."""
    return next((name for name, one in DTYPES.items() if one is dtype and name != "float32"), None)
