"""What `prepare` does: parameters in low precision, float32 norms and master weights at O2; nothing at O1.

The network computes by MXNet's op lists at both levels, whoever calls it: MXNet has no kernels for many operators in
low precision, and on the CPU some of those that it has in bfloat16 (`transpose`) write beyond their memory.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from ampx.backend import CastPlan, map_leaves
from ampx.errors import ProtocolError, UnsupportedByBackendError
from ampx.modules import check_patterns, float32_modules, is_meant, listed, module_dtypes, name_models

from . import casting, dtypes
from .calls import named
from .compat import mx
from .low_precision import Updater, lower
from .step import AmpTrainer

_nn = mx.gluon.nn
# Gluon's own `cast` leaves these in float32: MXNet's kernels take their statistics in no other dtype.
_ALWAYS_FLOAT32: Final = (_nn.basic_layers._BatchNorm,)
_NORMS: Final = (*_ALWAYS_FLOAT32, _nn.LayerNorm, _nn.InstanceNorm, _nn.GroupNorm)


def prepare(model: Any, optimizer: Any | None, plan: CastPlan) -> Any:
    """Do to a network (or a list of them) and its trainer (or a list of them) what the level needs.

    Doing it again to the same changes nothing.
    """
    models = listed(model, mx.gluon.Block, "model", "gluon.Block")
    trainers = listed(optimizer, (mx.gluon.Trainer, AmpTrainer), "trainer", "gluon.Trainer, wrapped or not")
    names = [name for name, _ in name_models(models, named)]
    check_patterns("prepare", module_dtypes(plan), names, matches=is_meant)
    if plan.level != "O1":
        _lower(models, trainers, plan)
    return model if optimizer is None else (model, optimizer)


def _lower(models: list[Any], trainers: list[Any], plan: CastPlan) -> None:
    raws = [trainer.trainer if isinstance(trainer, AmpTrainer) else trainer for trainer in trainers]
    prepared = [block for block in models if isinstance(block, PreparedBlock)]
    if prepared:
        _check_again(prepared, models, raws, plan)
        return
    if mx.util.is_np_array():
        raise UnsupportedByBackendError(
            f"prepare was called at level={plan.level!r} after npx.set_np(), most of whose operators take no low "
            f"precision; accepted: gluon with mx.nd arrays. Call npx.reset_np() first, or use level='O1'."
        )
    _check_trainers(trainers, raws)
    _lower_parameters(_parameters_to_lower(models, plan), raws, plan)
    for raw in raws:
        raw._updaters[:] = [Updater(updater) for updater in raw._updaters]
    for block in models:
        block.apply(_forget_graphs)
        block.__class__ = _prepared_class(block.__class__)
        block.ampx_plan = plan
    casting.keep(plan)


def _lower_parameters(parameters: list[Any], raws: list[Any], plan: CastPlan) -> None:
    """Cast parameters; at O2, those that a trainer updates get float32 masters."""
    _check_castable(parameters)
    trained = {id(parameter) for raw in raws for parameter in raw._params if parameter.grad_req != "null"}
    for parameter in parameters:
        lower(parameter, plan.dtype, plan.level == "O2" and id(parameter) in trained)


def _check_again(prepared: list[Any], models: list[Any], raws: list[Any], plan: CastPlan) -> None:
    ready = all(isinstance(updater, Updater) for raw in raws for updater in raw._updaters)
    if len(prepared) < len(models) or any(block.ampx_plan != plan for block in prepared) or not ready:
        before = prepared[0].ampx_plan
        raise ProtocolError(
            f"prepare got a network that was prepared before (as {before.level}, {before.dtype}), now with another "
            f"plan, network or trainer; its weights are rounded already. Prepare once, with lists of all networks and "
            f"all trainers."
        )


def _check_trainers(trainers: list[Any], raws: list[Any]) -> None:
    for trainer in trainers:
        if isinstance(trainer, AmpTrainer):
            trainer.ampx_member.check_prepare()
    for raw in raws:
        if raw._kv_initialized and raw._update_on_kvstore:
            raise UnsupportedByBackendError(
                "prepare got a trainer whose store updates the parameters (it stepped before, with several contexts); "
                "accepted: trainers that update outside the store. Make it with update_on_kvstore=False."
            )


def _parameters_to_lower(models: list[Any], plan: CastPlan) -> list[Any]:
    """List every parameter to cast once; one that is shared with a block that stays in float32 stays, too."""
    kept: set[int] = set()
    lowered: dict[int, Any] = {}
    norms = _NORMS if plan.level == "O2" else ()
    modules = name_models(models, named)
    wide = set(map(id, float32_modules(modules, plan, norms)))
    for _, block in modules:
        own = [parameter for parameter in block._reg_params.values() if _is_float32(parameter)]
        if isinstance(block, _ALWAYS_FLOAT32) or id(block) in wide:
            kept.update(map(id, own))
        else:
            lowered.update((id(parameter), parameter) for parameter in own)
    return [parameter for key, parameter in lowered.items() if key not in kept]


def _check_castable(parameters: list[Any]) -> None:
    for parameter in parameters:
        if type(parameter) is not mx.gluon.Parameter or {parameter._stype, parameter._grad_stype} != {"default"}:
            raise UnsupportedByBackendError(
                f"prepare got a network with the parameter {parameter.name!r}, a {type(parameter).__name__} that is "
                f"{parameter._stype} with gradients that are {parameter._grad_stype}; accepted: gluon.Parameter with "
                f"dense values and gradients, because MXNet casts no sparse ones. Keep its block in float32 by "
                f"deny=['module:…'], or use level='O1'."
            )


def _is_float32(parameter: Any) -> bool:
    # A constant takes part in no update, and op lists cast it like any other operand.
    return not isinstance(parameter, mx.gluon.Constant) and dtypes.name_of(parameter.dtype) == "float32"


def _forget_graphs(block: Any) -> None:
    if isinstance(block, mx.gluon.HybridBlock):
        block._clear_cached_op()


class PreparedBlock:
    """A network in low precision: it computes by op lists, and its outputs are float32.

    Attributes:
        ampx_plan: By which it was prepared.
    """

    ampx_plan: CastPlan

    def forward(self, *inputs: Any) -> Any:
        """Compute with casting on; inputs may have any floating dtype."""
        with casting.region(self.ampx_plan, True):
            outputs = super().forward(*inputs)  # type: ignore[misc]
        with casting.switch.Region(None):
            return map_leaves(outputs, _to_float32)


def _to_float32(leaf: Any) -> Any:
    if isinstance(leaf, mx.sym.Symbol):
        return mx.sym.amp_cast(leaf, dtype="float32")
    return dtypes.cast(leaf, "float32")


@functools.cache
def _prepared_class(kind: Any) -> type:
    return type(kind)(kind.__name__, (PreparedBlock, kind), {"__module__": kind.__module__})
