"""The published name of `ampx_mxnet.old.amp`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .old import amp

if TYPE_CHECKING:
    from .old.amp import *  # noqa: F403

sys.modules[__name__] = amp
