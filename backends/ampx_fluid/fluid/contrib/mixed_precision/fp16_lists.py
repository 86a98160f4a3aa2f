"""Which operators a script wants to have in low precision."""

from __future__ import annotations

from collections.abc import Collection

from ampx.backend import CastPlan
from ampx.errors import UnsupportedOpError
from ampx_fluid.fluid.missing import refuse_missing
from ampx_paddle.casting import check_plan

__all__ = ["AutoMixedPrecisionLists", "CustomOpLists"]


class AutoMixedPrecisionLists:
    """Changes to Paddle's lists."""

    def __init__(
        self,
        custom_white_list: Collection[str] | None = None,
        custom_black_list: Collection[str] | None = None,
        custom_black_varnames: Collection[str] | None = None,
    ) -> None:
        plan = CastPlan("cpu", "bfloat16", "O1", tuple(custom_white_list or ()), tuple(custom_black_list or ()))
        if "*" in plan.deny:
            raise UnsupportedOpError("custom_black_list got '*'; accepted: names of operators. Name them.")
        checked = check_plan(plan)
        self.white = checked.allow  # operators to compute in low precision, beyond Paddle's list
        self.black = checked.deny  # operators to compute in float32
        # Names of parameters and inputs whose operators compute in float32.
        self.black_varnames = frozenset(custom_black_varnames or ())


CustomOpLists = AutoMixedPrecisionLists

__getattr__ = refuse_missing(__name__)
