"""A script's own `torch.autocast`: refused, or carried out.

Where the user asked for a dtype, the regions compute in it. Where not, they compute in the script's, and the session,
which casts nothing by itself then, tells what they did.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch
from torch.amp.autocast_mode import autocast

from ampx.backend import CastPlan
from ampx.policy import Dtype
from ampx.run import Run, asked_by_script
from ampx.scale_state import LossScale
from ampx_torch import devices
from ampx_torch.casting import lstm
from ampx_torch.trees import DTYPES

if TYPE_CHECKING:
    from .manager import TorchManager

OWN: Final = ("torch", "ampx", "ampx_torch")
# Names under which scripts reach the classes; their frames lie between the script and the patch.
ALIASES: Final = ("torch.cuda.amp", "torch.cpu.amp", "torch.amp", "typing_extensions", "warnings")
ADVICE: Final = (
    "accepted: a script without mixed precision of its own. Pass --replace-native to have ampx carry it out, or turn "
    "it off in the script"
)


class Native:
    """What the script's own regions and GradScaler decide, with `--replace-native`.

    Attributes:
        options: What the session gets beyond the settings.
        follows: The regions decide the dtype.
        scales: A GradScaler of the script multiplies the losses.
        config: What the script asked of its first GradScaler.
    """

    def __init__(self, run: Run) -> None:
        """Leave casting to the regions; and the dtype, where the user asked for none."""
        self._run = run
        self._seen: list[Dtype] = []
        self._plans: dict[str, CastPlan] = {}  # by dtype, of regions on the CPU
        self.options: dict[str, Any] = {}
        self.follows = self.scales = False
        self.config: LossScale | None = None
        settings = run.settings
        if settings.replace_native:
            self.options["process_wide"] = False
            self.follows = settings.dtype == "auto" and settings.level != "O0"
            if self.follows:
                self.options["dtype"] = "float32"  # until a region tells another

    @property
    def decides_scale(self) -> bool:
        """Whether the script multiplies losses, or does not, whatever the dtype."""
        return self.follows or self.scales

    @property
    def needs_no_scale(self) -> bool:
        """Whether the user asked for a dtype whose losses are not scaled, whatever the script does."""
        amp = self._run.amp
        return amp is not None and not self.follows and not amp.effective.loss_scale.dynamic

    def replacement(self, device: str, dtype: torch.dtype | None) -> tuple[str, torch.dtype | None, bool]:
        """Return device, dtype and switch of a region: the script's where this machine has them."""
        device, dtype, enabled = self._chosen(device, dtype)
        name = _name(dtype)
        if enabled and device == "cpu" and name is not None and name not in self._plans:
            plan = self._plans[name] = CastPlan(device, name, "O1", (), ())
            lstm.install(plan)  # for the rest of the run: the script may keep the region and enter it whenever
        self.explain()
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
        if not self.follows:
            chosen = self._run.session().effective.dtype
            asked = _name(dtype)
            if asked not in (None, chosen):
                self._run.recorder.note(
                    f"The script's own regions ask for {asked}; they computed in {chosen or 'float32'}, as the options "
                    f"of this run say."
                )
            return device, dtype if chosen is None else DTYPES[chosen], chosen is not None
        if absent:
            preferred = devices.describe("cpu").preferred
            dtype = None if preferred is None else DTYPES[preferred]
        elif dtype is None:
            dtype = torch.get_autocast_dtype(device)
        self._report(device, dtype)
        return device, dtype, dtype is not None

    def _report(self, device: str, dtype: torch.dtype | None) -> None:
        """Have the session tell the dtype of the regions: the first one's, and beside it what others compute in."""
        name = _name(dtype)
        amp = self._run.session()
        if name is None or name in self._seen:
            return
        self._seen.append(name)
        reason = f"as the script's own regions say, which compute in {' and '.join(self._seen)}"
        native = devices.describe(device).native.issuperset(self._seen)
        amp.effective = replace(amp.effective, device=device, dtype=self._seen[0], native=native, reason=reason)

    def explain(self) -> None:
        """Say by hand what the script's own regions and GradScaler did."""
        amp = self._run.amp
        if not self._run.settings.replace_native or amp is None or self._run.stood_down:
            return
        usual = amp.effective.dtype == "float16"
        scale = ""
        if self.config is None:
            scale = ", loss_scale=1.0" if self.follows and usual else ""
        elif self.config != LossScale():
            scale = f", loss_scale={_shown(self.config)}"
        elif not usual:
            scale = ", loss_scale='dynamic'"
        self._run.lines = (
            f"amp = ampx.init('torch', dtype={amp.effective.dtype!r}, process_wide=False{scale})",
            *self._run.optimizer_lines("with amp.autocast(): loss = …  # where torch.autocast is"),
            *(
                ("optimizer.step()  # for scaler.unscale_, scaler.step and scaler.update",)
                if self.config and not self._run.trainer
                else ()
            ),
        )


@contextmanager
def autocast_watched(manager: TorchManager) -> Iterator[None]:
    """Patch the class behind `torch.autocast` and its older names. Regions that switch casting off stay as they are."""
    true, true_enter = autocast.__init__, autocast.__enter__
    run = manager.run

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
        if enabled and ours and asked_by_script(OWN, ALIASES) and not manager.stood_down:
            if not run.settings.replace_native:
                run.refuse(f"the script switches torch.autocast on by itself; {ADVICE}")
            manager.start()
            device_type, dtype, enabled = manager.native.replacement(device_type, dtype)
        true(self, device_type, dtype, enabled, cache_enabled)

    @functools.wraps(true_enter)
    def enter(self: autocast) -> Any:
        enabled = self._enabled
        self._enabled = enabled and not run.float32  # a script may enter one region in every step
        try:
            return true_enter(self)
        finally:
            self._enabled = enabled

    try:
        with mock.patch.object(autocast, "__init__", make), ExitStack() as stack:
            if run.recorder.observer is not None:
                stack.enter_context(mock.patch.object(autocast, "__enter__", enter))
            yield
    finally:
        manager.native.close()


def _name(dtype: torch.dtype | None) -> Dtype | None:
    """Return the name of a low precision; None for what is none."""
    return next((name for name, low in DTYPES.items() if low is dtype and name != "float32"), None)


def _shown(config: LossScale) -> str:
    """Return the line that makes a configuration, without what is usual."""
    usual = LossScale()
    chosen = {field.name: getattr(config, field.name) for field in fields(config)}
    changed = [f"{name}={value!r}" for name, value in chosen.items() if value != getattr(usual, name)]
    return f"ampx.LossScale({', '.join(changed)})"
