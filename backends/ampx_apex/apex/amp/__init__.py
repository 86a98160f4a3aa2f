"""`apex.amp` on ampx: the same calls, the same property table, the same checkpoints.

What a script typed runs as it is: `initialize`, `scale_loss`, `master_params`, checkpoints, the registries, and the
older `init` with its handle. Casting is torch's autocast with apex's op lists, losses are scaled by ampx's state
machine, and events, `last_step` and the other calls of ampx work beside it. The manual's page on migrating from apex
lists what differs and why.
"""

from __future__ import annotations

from ._amp_state import _amp_state as _amp_state, master_params as master_params
from .amp import (
    float_function as float_function,
    half_function as half_function,
    init as init,
    promote_function as promote_function,
    register_float_function as register_float_function,
    register_half_function as register_half_function,
    register_promote_function as register_promote_function,
)
from .frontend import initialize as initialize, load_state_dict as load_state_dict, state_dict as state_dict
from .handle import disable_casts as disable_casts, scale_loss as scale_loss
