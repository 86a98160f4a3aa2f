"""A script's own `Accelerator` with `mixed_precision="fp16"` on a CPU, which Accelerate passes over in silence.

Native defect: it then computes in float32, scales nothing and says nothing; so does a Trainer with `fp16=True`. With
`--replace-native` it gets what it has on a GPU: regions that cast, and a GradScaler. Without, the report says so.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

from ampx.run.imports import ImportWatch

from .manager import TorchManager

_MODULE: Final = "accelerate"


@contextmanager
def accelerators_carried_out(manager: TorchManager) -> Iterator[None]:
    """Patch `Accelerator.__init__` once the script has imported Accelerate."""
    with ExitStack() as patches:

        def patch(_: str) -> None:
            from accelerate import Accelerator

            make = functools.wraps(Accelerator.__init__)(_carried_out(manager, Accelerator.__init__))
            patches.enter_context(mock.patch.object(Accelerator, "__init__", make))

        watch = ImportWatch({_MODULE: _MODULE}, patch)
        patches.enter_context(watch.installed())
        watch.look()  # it may be there already
        yield


def _carried_out(manager: TorchManager, true: Any) -> Any:
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        from accelerate.accelerator import get_grad_scaler  # which asks for a scaler in Accelerate's name
        from accelerate.utils import DistributedType

        true(self, *args, **kwargs)
        ours = self.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU) and not manager.stood_down
        if not (ours and self.mixed_precision == "fp16" and self.device.type == "cpu" and self.scaler is None):
            return
        if manager.run.settings.replace_native:
            self.native_amp = True
            options = {} if self.scaler_handler is None else self.scaler_handler.to_kwargs()
            self.scaler = get_grad_scaler(self.distributed_type, **options)
        else:
            manager.run.recorder.note(
                "The script asks Accelerate, or a Trainer, for fp16, which computes in float32 on a CPU and does not "
                "say so. What is cast here is cast by this run; --replace-native carries the fp16 out."
            )

    return make
