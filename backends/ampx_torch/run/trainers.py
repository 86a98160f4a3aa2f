"""Whether a trainer of another library runs the script's backward: by hand, ampx has a part for it."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Final

_ATTACH: Final = "from ampx_torch.trainers.accelerate import attach"
_FLAGS: Final = {"float16": "fp16", "bfloat16": "bf16"}


def trainer_lines(dtype: str | None) -> tuple[str, ...]:
    """Return the lines that give the trainer at work its part by hand; none where the loop is the script's own."""
    flag = _FLAGS.get(str(dtype))
    modules = _modules_at_work()
    if flag is None or not modules:
        return ()
    # Each runs by what stands below it here, too.
    if "transformers.trainer" in modules:
        return _ATTACH, f"attach(trainer, amp)  # before trainer.train(), with {flag}=True in its TrainingArguments"
    for package, start, trainer in (
        ("lightning", "lightning.pytorch.", "lightning.Trainer"),
        ("pytorch_lightning", "pytorch_lightning.", "pytorch_lightning.Trainer"),
    ):
        if any(module.startswith(start) for module in modules):
            return _plugin(package, "AmpxPrecision", trainer)
    for package, start, trainer in (
        ("lightning", "lightning.fabric.", "lightning.Fabric"),
        ("pytorch_lightning", "lightning_fabric.", "lightning_fabric.Fabric"),
    ):
        if any(module.startswith(start) for module in modules):
            manage = "precision.manage(optimizer)  # behind fabric.setup, which returns it"
            return (*_plugin(package, "AmpxFabricPrecision", trainer), manage)
    if any(module.startswith("accelerate.") for module in modules):
        return _ATTACH, f"attach(accelerator, amp)  # behind accelerator = Accelerator(mixed_precision={flag!r})"
    return ()


def _plugin(package: str, name: str, trainer: str) -> tuple[str, ...]:
    return (
        f"from ampx_torch.trainers.{package} import {name}",
        f"precision = {name}(amp)  # for {trainer}(plugins=precision), in place of its precision=",
    )


def _modules_at_work() -> set[str]:
    """Return the modules whose functions are running, within the script."""
    modules: set[str] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module == "ampx.run.program":  # a launcher may have called that
            break
        modules.add(module)
        frame = frame.f_back
    return modules
