"""The published name of `ampx_mxnet.old.convert`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .old import convert

if TYPE_CHECKING:
    from .old.convert import *  # noqa: F403

sys.modules[__name__] = convert
