"""Check a raw optimizer and wrap it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import paddle

from ampx.backend import GenericBackend, reject_unknown
from ampx.errors import UnsupportedByBackendError
from ampx.protocol import Member

from . import sharding
from .closures import ClosureOptimizer
from .gradients import parameters
from .static import StaticOptimizer
from .step import AmpOptimizer, refuse_low_precision


def make_wrapper(
    backend: GenericBackend, optimizer: Any, member: Member, options: Mapping[str, Any]
) -> AmpOptimizer | StaticOptimizer:
    """Wrap a raw optimizer, or refuse what could not be stepped rightly."""
    reject_unknown("paddle", options, ())
    if type(optimizer).__module__.startswith("paddle.distributed."):
        sharding.refuse(f"wrap_optimizer got {type(optimizer).__name__}, which Paddle's distribution made")
    if type(optimizer).__module__ == "paddle.incubate.optimizer.lbfgs":
        raise UnsupportedByBackendError(
            "wrap_optimizer got paddle.incubate.optimizer.LBFGS, which Paddle has replaced; accepted: its successor. "
            "Use paddle.optimizer.LBFGS."
        )
    if not paddle.in_dynamic_mode():
        return _wrap_static(backend, optimizer, member, options)
    if member.group.enabled:
        refuse_low_precision(optimizer, options["plan"], parameters(optimizer))
    kind = ClosureOptimizer if isinstance(optimizer, paddle.optimizer.LBFGS) else AmpOptimizer
    return kind(backend, optimizer, member, options)


def _wrap_static(
    backend: GenericBackend, optimizer: Any, member: Member, options: Mapping[str, Any]
) -> StaticOptimizer:
    if not paddle.framework.in_pir_mode():
        raise UnsupportedByBackendError(
            "wrap_optimizer was called for a static graph of the old kind; accepted: eager mode, and static graphs in "
            "Paddle's present form. Leave FLAGS_enable_pir_api as it is by default."
        )
    if len(member.group.members) > 1:
        raise UnsupportedByBackendError(
            "wrap_optimizer got several optimizers for a static graph; accepted: one. Wrap them one by one."
        )
    if options["plan"] is not None and options["plan"].level in ("O2", "O3"):
        raise UnsupportedByBackendError(
            f"wrap_optimizer was called for a static graph at level {options['plan'].level}; accepted: O0 and O1 "
            f"there. Use level='O1'."
        )
    return StaticOptimizer(backend, optimizer, member, options)
