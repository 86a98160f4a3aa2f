"""Opt levels: named bundles of casting, parameter dtype, master weights and loss scaling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from .errors import UnsupportedLevelError
from .policy import Dtype, Policy

OptLevel = Literal["O0", "O1", "O2", "O3"]


@dataclass(frozen=True)
class Level:
    """What an opt level switches on.

    Attributes:
        name: The level's name.
        casts_ops: Operations are cast by the framework's op lists while autocast is on.
        casts_params: `prepare` turns parameters into the compute dtype.
        keeps_norms: `prepare` leaves normalization layers in float32.
        master_weights: `prepare` gives the optimizer float32 copies to update.
        scales_loss: The loss scale is dynamic by default (for float16; bfloat16 needs none).
    """

    name: OptLevel
    casts_ops: bool
    casts_params: bool
    keeps_norms: bool
    master_weights: bool
    scales_loss: bool

    def policy(self, dtype: Dtype) -> Policy:
        """Give the dtypes of parameters, computation and outputs when `dtype` is the compute dtype."""
        if self.name == "O0":
            return Policy()
        return Policy(dtype if self.casts_params else "float32", dtype, "float32")


LEVELS: Final[dict[str, Level]] = {
    "O0": Level("O0", False, False, True, False, False),
    "O1": Level("O1", True, False, True, False, True),
    "O2": Level("O2", False, True, True, True, True),
    "O3": Level("O3", False, True, False, False, False),
}


def find_level(level: object) -> Level:
    """Look a level up by name.

    Raises:
        UnsupportedLevelError: There is no such level.

    Sync: none.
    """
    found = LEVELS.get(level) if isinstance(level, str) else None
    if found is None:
        raise UnsupportedLevelError(
            f"level={level!r} is not an opt level; accepted: 'O0' (float32), 'O1' (casting by op lists), 'O2' "
            f"(low-precision parameters, float32 norms and master weights), 'O3' (all low precision). "
            f"Pass one of these; 'O1' suits most training."
        )
    return found
