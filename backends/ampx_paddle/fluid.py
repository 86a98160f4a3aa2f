"""The published name of `ampx_paddle.old.fluid`: the modules there, by this name too."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .old import fluid

if TYPE_CHECKING:
    from .old.fluid import *  # noqa: F403

sys.modules.update(fluid.modules(__name__))
