"""The published name of `ampx_apex.apex`; `ampx_torch.apex.amp` and all below are the modules there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ampx.rooms import forward

if TYPE_CHECKING:
    from ampx_apex.apex import *  # noqa: F403

forward(__name__, "ampx_apex.apex", "ampx_torch.old.apex")
