"""Check a raw trainer and wrap it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampx.backend import CastPlan, GenericBackend, reject_unknown
from ampx.errors import (
    LowPrecisionParametersError,
    ProtocolError,
    UnsupportedByBackendError,
    UnsupportedDtypeError,
)
from ampx.protocol import Member

from .delegation import move_out
from .dtypes import name_of
from .hook import OverflowHook, SavedScaler
from .low_precision import LowParameter
from .step import AmpTrainer


def make_wrapper(backend: GenericBackend, trainer: Any, member: Member, options: Mapping[str, Any]) -> AmpTrainer:
    """Wrap a raw trainer; with the option `in_place`, the trainer itself becomes the wrapped one.

    `in_place` may also be a class made from `AmpTrainer`: then it becomes one of these.
    """
    reject_unknown("mxnet", options, ("in_place",))
    if not member.group.enabled:
        return _wrap(backend, trainer, member, options)
    _check_native(trainer)
    _check_contexts(trainer, options["plan"])
    _check_store(trainer, options["plan"])
    _check_dtypes(trainer, options["plan"])
    wrapped = _wrap(backend, trainer, member, options)
    trainer = wrapped.trainer
    # Native defect: by default several contexts update while their gradients are added up, before the overflow check.
    trainer._kvstore_params["update_on_kvstore"] = False
    plan = options["plan"]
    if plan is not None and plan.dtype == "bfloat16":
        wrapped.ampx_adopt_adding()
    return wrapped


def _wrap(backend: GenericBackend, trainer: Any, member: Member, options: Mapping[str, Any]) -> AmpTrainer:
    kind = options.get("in_place")
    if not kind:
        return AmpTrainer(backend, trainer, member, options)
    raw = move_out(trainer, AmpTrainer if kind is True else kind)
    AmpTrainer.__init__(trainer, backend, raw, member, options)
    wrapped: AmpTrainer = trainer
    return wrapped


def _check_native(trainer: Any) -> None:
    scaler = getattr(trainer, "_amp_loss_scaler", None)
    if scaler is not None and not isinstance(scaler, (OverflowHook, SavedScaler)):
        raise ProtocolError(
            "wrap_optimizer got a trainer for which mxnet's amp.init_trainer was called; its gradients would be "
            "unscaled twice. Leave amp.init_trainer out."
        )


def _check_contexts(trainer: Any, plan: CastPlan | None) -> None:
    if plan is not None and plan.dtype == "float16" and is_on_cpu(trainer):
        raise UnsupportedDtypeError(
            f"wrap_optimizer got a trainer whose parameters are on {trainer._contexts[0]}, in a session that computes "
            f"float16 on a GPU: MXNet casts no arrays on a CPU to it, and has no products in it there; accepted: "
            f"parameters on mx.gpu(). Initialize the network with ctx=mx.gpu(), or use ampx.init(device='cpu')."
        )


def is_on_cpu(trainer: Any) -> bool:
    """Return whether no parameter of a trainer is on a GPU."""
    return all(context.device_type == "cpu" for context in trainer._contexts)


def _check_store(trainer: Any, plan: CastPlan | None) -> None:
    store = trainer._kvstore_params["kvstore"]
    name = store if isinstance(store, str) else getattr(store, "type", "")
    _check_updates(trainer, name)
    _check_sums(trainer, name, plan)


def _check_updates(trainer: Any, name: str) -> None:
    """Raise where a trainer's store would update the parameters."""
    updates = {
        "update_on_kvstore=True": trainer._kvstore_params["update_on_kvstore"],
        "a store that has begun to update (it stepped before it was wrapped, with several contexts)": (
            trainer._kv_initialized and trainer._update_on_kvstore
        ),
        "sparse parameters, which MXNet updates in the store": trainer._contains_sparse_weight,
        f"kvstore={name!r}": "async" in name,
        f"sparse gradients and kvstore={name!r}": "dist" in name and trainer._contains_sparse_grad,
    }
    if passed := next((what for what, applies in updates.items() if applies), None):
        raise UnsupportedByBackendError(
            f"wrap_optimizer got a trainer with {passed}: it would update before gradients can be checked; accepted: "
            f"trainers that update outside the store. Make it with gluon.Trainer(…, update_on_kvstore=False), and wrap "
            f"it before its first step."
        )


def _check_sums(trainer: Any, name: str, plan: CastPlan | None) -> None:
    """Raise where a trainer's store would round the gradients that it adds up, or knows no such arrays."""
    if trainer._compression_params and ("dist" in name or len(trainer._contexts) > 1):
        raise UnsupportedByBackendError(
            f"wrap_optimizer got a trainer with compression_params={trainer._compression_params!r}, by which MXNet "
            f"would round scaled gradients to its threshold, and infinities with them; accepted: None. Leave it out."
        )
    if "dist" in name and plan is not None and plan.dtype == "bfloat16" and plan.level in ("O2", "O3"):
        raise UnsupportedByBackendError(
            f"wrap_optimizer got a trainer with kvstore={name!r} at level={plan.level!r} in bfloat16, of which MXNet's "
            f"servers know no arrays: the first step would end them; accepted: level='O1', or float16 on GPUs. Choose "
            f"level='O1', whose gradients are float32."
        )


def _check_dtypes(trainer: Any, plan: CastPlan | None) -> None:
    if plan is not None and plan.level == "O3":
        return
    masters = getattr(trainer._optimizer, "multi_precision", False)
    low = {"bfloat16"} if masters else {"bfloat16", "float16"}  # MXNet keeps masters of float16 parameters only
    names = [
        parameter.name
        for parameter in trainer._params
        if parameter.grad_req != "null"
        and name_of(parameter.dtype) in low
        and not (isinstance(parameter, LowParameter) and parameter.ampx_has_masters)
    ]
    if names:
        raise LowPrecisionParametersError(
            f"the trainer holds {len(names)} low-precision parameters ({', '.join(names[:5])}); updates smaller than "
            f"their precision would be lost; accepted: float32, and low precision with masters. Use "
            f"ampx.init(level='O2') and net, trainer = ampx.prepare(net, trainer), or make the trainer of float16 "
            f"parameters with multi_precision=True."
        )
