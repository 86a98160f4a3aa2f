"""Which operators ran in which dtype, looked at in the first steps only."""

from __future__ import annotations

from typing import Final

import paddle

from ampx.run import Sampler

_FLAG: Final = "FLAGS_low_precision_op_list"
_DTYPES: Final = ("float16", "bfloat16", "float32")
# They move or make memory and compute nothing, or belong to the check and the optimizer.
_IDLE: Final = (
    *("assign", "cast", "fill", "flatten", "full", "onednn_to", "reshape", "slice", "squeeze", "stack", "transpose"),
)
_STEP: Final = ("check_finite", "squared_l2_norm", "memcpy", "share_data", "isfinite", "where", "increment")


class PaddleSampler(Sampler):
    """Switches Paddle's own count of operators on with the first optimizer, and off after some steps."""

    _on = False

    def start(self) -> None:
        """Count from now on, with nothing counted so far; nothing where the script counts by itself."""
        if self._on or not paddle.get_flags(_FLAG)[_FLAG]:
            self._on = True
            paddle.base.core.clear_low_precision_op_list()
            paddle.set_flags({_FLAG: 1})

    def stop(self) -> None:
        """Stop, and hand over what was counted."""
        if not self._on:
            return
        self._on = False
        paddle.set_flags({_FLAG: 0})
        for name, counted in paddle.base.core.get_low_precision_op_list().items():
            short = name.rpartition(".")[2]  # programs have prefixes
            if not short.startswith((*_IDLE, *_STEP)) and not short.endswith(("_grad", "_")):
                for dtype, count in zip(_DTYPES, counted.split(","), strict=False):
                    if int(count):
                        self.recorder.count_op(short, dtype, int(count))
        paddle.base.core.clear_low_precision_op_list()
