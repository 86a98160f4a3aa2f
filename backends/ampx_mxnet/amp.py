"""The published name of `ampx_mxnet.old.amp`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ampx.rooms import import_part

if TYPE_CHECKING:
    from .old.amp import *  # noqa: F403

sys.modules[__name__] = import_part("ampx_mxnet.old.amp", __name__)
