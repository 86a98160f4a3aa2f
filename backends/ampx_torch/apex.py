"""The published name of `ampx_torch.old.apex`; `ampx_torch.apex.amp` and all below are the modules there."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from ampx.run.aliases import Aliases

if TYPE_CHECKING:
    from ampx_torch.old.apex import *  # noqa: F403

_MODULE = "ampx_torch.old.apex"
sys.meta_path.insert(0, Aliases({__name__: _MODULE}))
sys.modules[__name__] = importlib.import_module(_MODULE)
