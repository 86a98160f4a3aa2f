"""What `initialize` leaves behind, under the name and with the attributes that scripts look for."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .properties import Properties

if TYPE_CHECKING:
    from .scaler import LossScaler


@dataclass
class AmpState:
    """The state of `apex.amp` in this process."""

    # The properties in force; `enabled` is False before `initialize`.
    opt_properties: Properties = field(default_factory=Properties)
    loss_scalers: list[LossScaler] = field(default_factory=list)  # one loss scale a loss id
    handle: Any = None  # what switches casting off and on; None before the first `initialize` at O1, or `init`
    verbosity: int = 1  # 0 says nothing
    allow_incoming_model_not_fp32: bool = False  # take models that hold low-precision parameters already
    session: Any = None  # the ampx session behind it; None before `initialize` and where it was disabled
    initialized: bool = False  # `initialize` was called, perhaps with `enabled=False`
    switched_off: bool = False  # `initialize` or `init` was called with `enabled=False`
    # Those that `initialize` returned and that are alive.
    optimizers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    models: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)  # likewise

    def tell(self, message: str) -> None:
        """Print a line, unless `verbosity=0` or another process of the job prints it."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self.verbosity > 0 and not (distributed and torch.distributed.get_rank()):
            sys.stdout.write(f"{message}\n")


_amp_state = AmpState()


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Print a line, unless `verbosity=0`. Other processes of the job print it too, unless `rank0`."""
    if rank0:
        _amp_state.tell(msg)
    elif _amp_state.verbosity > 0:
        sys.stdout.write(f"{msg}\n")


def master_params(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    """Walk over the parameters that an optimizer updates: the float32 masters where there are some.

    After a `scale_loss` block their gradients are unscaled, so this is what to clip.
    """
    for group in optimizer.param_groups:
        yield from group["params"]
