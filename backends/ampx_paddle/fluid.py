"""The modules of `ampx_fluid.fluid` under their published name, and under the name that pickles have."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ampx.rooms import import_part

if TYPE_CHECKING:
    from ampx_fluid.fluid import *  # noqa: F403

_fluid = import_part("ampx_fluid.fluid", __name__)
for _name in (__name__, "ampx_paddle.old.fluid"):
    sys.modules.update(_fluid.modules(_name))
