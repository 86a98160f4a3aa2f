"""A script's own `torch.autocast`: refused, or carried out.

Where the user asked for a dtype, the regions compute in it. Where not, they compute in the script's. The session casts
nothing by itself then, so it tells what the regions did that the script has entered: float32 where there are none.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import starmap
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch
from torch.amp.autocast_mode import autocast

from ampx.backend import CastPlan
from ampx.policy import Dtype
from ampx.run import Run, asking_code, is_script_code
from ampx.scale_state import LossScale
from ampx_torch import devices
from ampx_torch.casting import lstm
from ampx_torch.trees import DTYPES

if TYPE_CHECKING:
    from ampx.policy import Effective
    from ampx.session import Amp

    from .manager import TorchManager

OWN: Final = ("torch", "ampx", "ampx_torch")
# Names under which scripts reach the classes; their frames lie between the script and the patch.
ALIASES: Final = ("torch.cuda.amp", "torch.cpu.amp", "torch.amp", "typing_extensions", "warnings")
ADVICE: Final = (
    "accepted: a script without mixed precision of its own. Pass --replace-native to have ampx carry it out, or turn "
    "it off in the script"
)
_ASKED: Final = "_ampx_asked"  # on a region of the script: who made it, the device and the dtype that it asked for
_NONE_ENTERED: Final = "with --replace-native only the script's own regions are cast, and it entered none"


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
        # The makers of the regions that were entered, the device and dtype that they asked for, and got.
        self._entered: dict[tuple[str, str, Dtype | None, str, Dtype | None], None] = {}
        self._plans: dict[str, CastPlan] = {}  # by dtype, of regions on the CPU
        self._session: Effective | None = None  # as the session began
        self.options: dict[str, Any] = {}
        self.follows = self.scales = False
        self.config: LossScale | None = None
        settings = run.settings
        if settings.replace_native:
            self.options["process_wide"] = False
            self.follows = settings.dtype == "auto" and settings.level != "O0"
            if self.follows:
                self.options["dtype"] = "float32"  # until a region tells another

    def begin(self, amp: Amp) -> None:
        """Have a session that has just started report what the regions did."""
        self._session = amp.effective
        self._tell()

    @property
    def dtype(self) -> Dtype | None:
        """The dtype that the user asked for, or else that of the regions so far; None before the session."""
        return self._asked or next(iter(self._low()), None)

    @property
    def _asked(self) -> Dtype | None:
        return None if self._session is None else self._session.dtype

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
            # For the rest of the run: the script may keep the region and enter it whenever.
            lstm.install(plan, owner=plan)
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
            chosen = self._asked
            return device, dtype if chosen is None else DTYPES[chosen], chosen is not None
        if absent:
            preferred = devices.describe("cpu").preferred
            dtype = None if preferred is None else DTYPES[preferred]
            return device, dtype, dtype is not None
        return device, dtype, True

    def entered(self, region: autocast) -> None:
        """Note what a region computes in that the script enters."""
        if not self._run.settings.replace_native or self._run.stood_down:
            return
        name = _name(region.fast_dtype) if region._enabled else None
        asked = getattr(region, _ASKED, None)
        if asked is None:  # torch's own: of a compiled function, or one of the script's again, in a checkpoint
            if name is None or name in self._low():
                return
            asked = ("", region.device, name)
        entry = (*asked, region.device, name)
        if entry in self._entered:
            return
        self._entered[entry] = None
        _, _, wanted = asked
        if not self.follows and wanted not in (None, name):
            self._run.recorder.note(
                f"The script's own regions ask for {wanted}; they computed in {name or 'float32'}, as the options of "
                f"this run say."
            )
        self._tell()
        self.explain()

    def _low(self) -> dict[Dtype, str]:
        """Return the low precisions that regions computed in, each with the device of the first."""
        low: dict[Dtype, str] = {}
        for *_, device, dtype in self._entered:
            if dtype is not None:
                low.setdefault(dtype, device)
        return low

    def _tell(self) -> None:
        """Have the session tell the dtype of the first region that cast, and beside it what all asked for and got."""
        amp, effective = self._run.amp, self._session
        if amp is None or effective is None or not self._run.settings.replace_native:
            return
        low = self._low()
        if not self.follows and (self._asked is None or self._asked in low):
            amp.effective = effective  # as the user asked
            return
        dtype, device = next(iter(low.items()), (None, effective.device))
        reason = "; ".join(dict.fromkeys(starmap(_told, self._entered))) or _NONE_ENTERED
        native = devices.describe(device).native.issuperset(low)
        amp.effective = replace(effective, device=device, dtype=dtype, native=native, reason=reason)

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
        file, module = asking_code(ALIASES)
        if not (enabled and ours) or module.partition(".")[0] in OWN or manager.stood_down:
            true(self, device_type, dtype, enabled, cache_enabled)
            return
        if not run.settings.replace_native:
            run.refuse(f"the script switches torch.autocast on by itself; {ADVICE}")
        manager.start()
        wanted = torch.get_autocast_dtype(device_type) if dtype is None else dtype
        true(self, *manager.native.replacement(device_type, dtype), cache_enabled)
        setattr(self, _ASKED, (_library(file, module), device_type, _name(wanted)))

    @functools.wraps(true_enter)
    def enter(self: autocast) -> Any:
        if not run.float32:
            manager.native.entered(self)
            return true_enter(self)
        enabled, self._enabled = self._enabled, False
        try:
            return true_enter(self)
        finally:
            self._enabled = enabled  # a script may enter one region in every step

    try:
        with mock.patch.multiple(autocast, __init__=make, __enter__=enter):
            yield
    finally:
        manager.native.close()


@functools.cache
def _library(file: str, module: str) -> str:
    """Return the library that code belongs to; "" where it is the script's own."""
    generated = file.startswith("<")
    return "" if generated or is_script_code(file, module) else module.partition(".")[0]


def _told(library: str, asked_on: str, asked: Dtype | None, device: str, computed: Dtype | None) -> str:
    """Return what a region asked for, and where it got something else, what and why."""
    regions = f"the regions of {library}" if library else "the script's own regions"
    wanted = f"{regions} ask for {asked or 'float32'}"
    if asked_on == device:
        return wanted
    return (
        f"{wanted} on {asked_on}, which this machine lacks: on the {device} they compute in {computed or 'float32'}, "
        f"because {devices.describe(device).reason}"
    )


def _name(dtype: torch.dtype | None) -> Dtype | None:
    """Return the name of a low precision; None for what is none."""
    return next((name for name, low in DTYPES.items() if low is dtype and name != "float32"), None)


def _shown(config: LossScale) -> str:
    """Return the line that makes a configuration, without what is usual."""
    usual = LossScale()
    chosen = {field.name: getattr(config, field.name) for field in fields(config)}
    changed = [f"{name}={value!r}" for name, value in chosen.items() if value != getattr(usual, name)]
    return f"ampx.LossScale({', '.join(changed)})"
