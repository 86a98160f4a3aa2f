"""What `prepare` does: module rules at O1; low-precision parameters and master weights at O2 and O3.

At O2 and O3 parameters and buffers change their dtype in place. Modules that stay in float32 (normalization at
O2, and what `deny` names) get their inputs in float32 and give their outputs in the compute dtype. The model as
a whole takes inputs of any floating dtype and gives outputs in float32; methods other than `forward` are left
alone. Prepare a model on its device and before DDP or FSDP wrap it. Weights changed by hand count until the first
`scale_loss`; later they are overwritten by the next step, which starts from the masters: use `load_state_dict`. True
gradients are the masters': clip with `ampx.clip_grad_norm` or `max_grad_norm`, or over `opt.param_groups`, not over
`model.parameters()`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ampx.backend import CastPlan
from ampx.errors import InvalidOptionError, ProtocolError, UnsupportedByBackendError, UnsupportedOpError
from ampx_torch.casting import module_rules
from ampx_torch.casting.oplists import TorchPlan
from ampx_torch.trees import DTYPES, LOW

from . import low_precision_models, masters

_MARK = "_ampx_prepared"


def prepare(model: Any, optimizer: Any | None, plan: CastPlan) -> Any:
    """Do to a model and its optimizer what the level needs. Doing it again to the same changes nothing.

    Args:
        model: A module, or a list of modules that the name patterns of `allow` and `deny` are about.
        optimizer: Raw or wrapped, or a list of all that train the model; None trains nothing, or O1.
        plan: Device, dtype, level and rules.
    """
    models = [_unwrapped(one) for one in (model if isinstance(model, (list, tuple)) else [model])]
    found = module_rules.matches(models, plan)
    if plan.level == "O1":
        module_rules.attach(found)
    else:
        _lower(models, _optimizers(optimizer), found, plan)
    if isinstance(plan, TorchPlan):
        plan.resolved.update(entry for _, entry in plan.modules)
    return model if optimizer is None else (model, optimizer)


def _unwrapped(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise InvalidOptionError(
            f"prepare got {type(model).__name__} as the model; accepted: nn.Module or a list of them. Pass that."
        )
    inner = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    return inner if isinstance(inner, nn.Module) else model


def _optimizers(optimizer: Any) -> list[Any]:
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


def _lower(models: list[nn.Module], optimizers: list[Any], found: dict[nn.Module, Any], plan: CastPlan) -> None:
    raws = [getattr(one, "optimizer", one) for one in optimizers]
    mark = (plan.level, plan.dtype)
    marks = [vars(model).get(_MARK) for model in models]
    if all(one == mark for one in marks) and all(plan.level == "O3" or masters.of(raw) for raw in raws):
        return
    if any(one is not None for one in marks):
        raise ProtocolError(
            f"prepare got a model that was prepared before (as {next(one for one in marks if one)}), now {mark} with "
            f"an optimizer that has no part in it; its weights are rounded already. Prepare it once, with a list of "
            f"all its optimizers."
        )
    _check(models, optimizers, raws, plan)
    kept = _kept(models, found, plan)
    exempt = {module for one in kept for module in one.modules()}
    lowered = _tensors_to_lower(models, exempt)
    copies = _make_masters(lowered, raws) if plan.level == "O2" else {}
    dtype = DTYPES[plan.dtype]
    for tensor in lowered:
        low_precision_models.convert(tensor, dtype)
    if plan.level == "O2":
        for wrapper, given in zip(optimizers, masters.give(raws, copies), strict=True):
            _tell(wrapper, given)
        _guard_checkpoints(models, exempt, copies)
    else:
        for raw in raws:
            _lower_state(raw, lowered)
    for module in {one: None for model in models for one in model.modules()}:
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN wants them in one piece again
    for module in kept:
        module.register_forward_pre_hook(
            low_precision_models.CastArguments(torch.float32, only=LOW),
            prepend=True,
            with_kwargs=True,
        )
        module.register_forward_hook(low_precision_models.CastOutputs(dtype, only=(torch.float32,)))
    for model in models:
        model.register_forward_pre_hook(low_precision_models.CastArguments(dtype), prepend=True, with_kwargs=True)
        model.register_forward_hook(low_precision_models.CastOutputs(torch.float32, only=LOW))
        vars(model)[_MARK] = mark


def _check(models: list[nn.Module], optimizers: list[Any], raws: list[Any], plan: CastPlan) -> None:
    if any(getattr(getattr(one, "ampx_member", None), "stage", "idle") != "idle" for one in optimizers):
        raise ProtocolError("prepare was called while scaled gradients are pending. Call opt.step() first.")
    wrapped = [type(one).__name__ for one in models if isinstance(one, nn.parallel.DistributedDataParallel)]
    sharded = [name for one in models for name, p in one.named_parameters() if type(p).__name__ == "DTensor"]
    if wrapped or sharded:
        raise UnsupportedByBackendError(
            f"prepare got a model wrapped by {(wrapped or ['FSDP'])[0]}, whose buckets and shards have their dtype "
            f"already. Call ampx.prepare before DistributedDataParallel; with FSDP use its MixedPrecisionPolicy."
        )
    for raw in raws:
        masters.check_movable(raw)


def _kept(models: list[nn.Module], found: dict[nn.Module, Any], plan: CastPlan) -> list[nn.Module]:
    """List the outermost modules that stay in float32."""
    kept: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        kind = found[module][0] if module in found else None
        if kind == "deny" or (kind is None and plan.level == "O2" and isinstance(module, low_precision_models.NORMS)):
            kept[module] = None
            _check_inside(module, found)
            return
        for child in module.children():
            visit(child)

    for model in models:
        visit(model)
    return list(kept)


def _check_inside(kept: nn.Module, found: dict[nn.Module, Any]) -> None:
    for inner in kept.modules():
        kind, entry = found.get(inner, (None, None))
        if kind == "allow":
            raise UnsupportedOpError(
                f"allow got {entry!r}, a {type(inner).__name__} inside a {type(kept).__name__} that stays in "
                f"float32 as a whole at this level. Deny less, or use level='O1'."
            )


def _tensors_to_lower(models: list[nn.Module], exempt: set[nn.Module]) -> list[torch.Tensor]:
    """List every parameter and buffer to cast once; one that is shared with a kept module stays."""
    staying = {id(tensor) for module in exempt for _, tensor in low_precision_models.tensors(module)}
    found: dict[int, torch.Tensor] = {}
    for model in models:
        for module in model.modules():
            for _, tensor in low_precision_models.tensors(module):
                if id(tensor) not in staying:
                    found[id(tensor)] = tensor
    return list(found.values())


def _make_masters(lowered: list[torch.Tensor], raws: list[Any]) -> dict[nn.Parameter, nn.Parameter]:
    """Return a float32 copy of every parameter that an optimizer updates, taken before anything is rounded."""
    updated = {id(p) for raw in raws for group in raw.param_groups for p in group["params"]}
    copies: dict[nn.Parameter, nn.Parameter] = {}
    for own in lowered:
        if isinstance(own, nn.Parameter) and id(own) in updated:
            master = nn.Parameter(own.detach().to(torch.float32, copy=True), own.requires_grad)
            master.grad = None if own.grad is None else own.grad.to(torch.float32)
            copies[own] = master
    return copies


def _tell(wrapper: Any, given: masters.MasterWeights) -> None:
    """Note in an optimizer that was wrapped before that its parameters are others now."""
    if hasattr(wrapper, "ampx_member"):
        wrapper.masters = given


def _guard_checkpoints(
    models: list[nn.Module], exempt: set[nn.Module], copies: dict[nn.Parameter, nn.Parameter]
) -> None:
    """Hook every module with low-precision tensors of its own, so that parts of a model save and load right too."""
    for module in {one: None for model in models for one in model.modules() if one not in exempt}:
        named = dict(low_precision_models.tensors(module))
        if not named:
            continue
        own = {name: copies[p] for name, p in named.items() if isinstance(p, nn.Parameter) and p in copies}
        module.register_state_dict_post_hook(low_precision_models.SaveFloat32(own))
        module.register_load_state_dict_pre_hook(low_precision_models.LoadFloat32(own))


def _lower_state(raw: torch.optim.Optimizer, lowered: list[torch.Tensor]) -> None:
    """Cast optimizer state that has the shape of its parameter, as the optimizer would have made it."""
    for parameter in lowered:
        for key, value in raw.state.get(parameter, {}).items() if isinstance(parameter, nn.Parameter) else ():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == parameter.shape:
                raw.state[parameter][key] = value.to(parameter.dtype)
