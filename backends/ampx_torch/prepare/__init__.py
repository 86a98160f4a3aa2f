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
from ampx.errors import ProtocolError, RawStepError, UnsupportedByBackendError, UnsupportedOpError
from ampx.modules import listed
from ampx_torch import fused, unwrapped_steps
from ampx_torch.casting import module_rules
from ampx_torch.casting.oplists import TorchPlan
from ampx_torch.trees import DTYPES, LOW

from . import low_precision_models, masters

_MARK = "_ampx_prepared"


def prepare(model: Any, optimizer: Any | None, plan: CastPlan) -> Any:
    """Do to a model and its optimizer what the level needs. Doing it again to the same changes nothing."""
    models = [_unwrapped(module) for module in listed(model, nn.Module, "model", "nn.Module")]
    optimizers = listed(optimizer, torch.optim.Optimizer, "optimizer", "torch.optim.Optimizer, wrapped or not")
    rules = module_rules.matches(models, plan)
    if plan.level == "O1":
        module_rules.attach(rules)
    else:
        _lower(models, optimizers, rules, plan)
    if isinstance(plan, TorchPlan):
        plan.resolved.update(entry for _, entry in plan.modules)
    return model if optimizer is None else (model, optimizer)


def _unwrapped(model: nn.Module) -> nn.Module:
    inner = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    return inner if isinstance(inner, nn.Module) else model


def _lower(models: list[nn.Module], optimizers: list[Any], rules: dict[nn.Module, Any], plan: CastPlan) -> None:
    raws = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
    if _are_prepared(models, raws, plan):
        return
    _check(models, optimizers, raws, plan)
    kept, dtype = _kept(models, rules, plan), DTYPES[plan.dtype]
    exempt = low_precision_models.inside(kept)
    lowered = _tensors_to_lower(models, exempt)
    if plan.level == "O2":
        copies = _make_masters(lowered, raws)
        _convert(lowered, dtype)
        _hand_out(masters.give(raws, copies), optimizers)
        _guard_checkpoints(models, exempt, copies)
        unwrapped_steps.note_lowered(p for p in lowered if isinstance(p, nn.Parameter) and p not in copies)
    else:
        for raw in raws:
            fused.check_kernel(raw, lowered, dtype)
        _convert(lowered, dtype)
        for raw in raws:
            _lower_state(raw, lowered)
    low_precision_models.flatten_recurrent(_modules(models))
    for module in kept:
        low_precision_models.keep_float32(module, dtype)
    for model in models:
        model.register_forward_pre_hook(low_precision_models.CastArguments(dtype), prepend=True, with_kwargs=True)
        model.register_forward_hook(low_precision_models.CastOutputs(torch.float32, only=LOW))
        vars(model)[_MARK] = plan.level, plan.dtype


def _are_prepared(models: list[nn.Module], raws: list[Any], plan: CastPlan) -> bool:
    """Return whether models and optimizers were prepared as the plan says; raise where they were otherwise."""
    mark = (plan.level, plan.dtype)
    marks = [vars(model).get(_MARK) for model in models]
    if all(before == mark for before in marks) and all(plan.level == "O3" or masters.of(raw) for raw in raws):
        return True
    before = next(filter(None, marks), None)
    if before is not None:
        raise ProtocolError(
            f"prepare got a model that was prepared before (as {before}), now {mark} with "
            f"an optimizer that has no part in it; its weights are rounded already. Prepare it once, with a list of "
            f"all its optimizers."
        )
    return False


def _convert(lowered: list[torch.Tensor], dtype: torch.dtype) -> None:
    for tensor in lowered:
        low_precision_models.convert(tensor, dtype)


def _hand_out(weights: list[masters.MasterWeights], optimizers: list[Any]) -> None:
    """Attach master weights to their wrappers; a raw optimizer refuses to step until it has a wrapper."""
    for own, optimizer in zip(weights, optimizers, strict=True):
        if hasattr(optimizer, "ampx_member"):  # wrapped before: its parameters are others now
            optimizer.masters = own
        else:
            optimizer.ampx_refusal = optimizer.register_step_pre_hook(_refuse_unwrapped)


def _refuse_unwrapped(raw: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise where gradients wait that only a wrapper hands to the master weights: nothing would be trained."""
    weights = masters.of(raw)
    if weights is not None and any(own.grad is not None for own in weights.model_parameters()):
        raise RawStepError(
            f"the raw {type(raw).__name__}, which ampx.prepare gave float32 master weights, was stepped before it was "
            f"wrapped; it would change nothing, for the gradients are the model's. Call opt = ampx.wrap_optimizer(opt) "
            f"after prepare, and step that."
        )


def _check(models: list[nn.Module], optimizers: list[Any], raws: list[Any], plan: CastPlan) -> None:
    for optimizer in optimizers:
        if (member := getattr(optimizer, "ampx_member", None)) is not None:
            member.check_prepare()
    wrapped = [type(model).__name__ for model in models if isinstance(model, nn.parallel.DistributedDataParallel)]
    sharded = any(type(parameter).__name__ == "DTensor" for model in models for parameter in model.parameters())
    if wrapped or sharded:
        raise UnsupportedByBackendError(
            f"prepare got a model wrapped by {(wrapped or ['FSDP'])[0]}, whose buckets and shards have their dtype "
            f"already. Call ampx.prepare before DistributedDataParallel; with FSDP use its MixedPrecisionPolicy."
        )
    for raw in raws:
        masters.check_movable(raw)


def _kept(models: list[nn.Module], rules: dict[nn.Module, Any], plan: CastPlan) -> list[nn.Module]:
    """List the outermost modules that stay in float32."""
    kept: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        kind = rules[module][0] if module in rules else None
        if kind == "deny" or (kind is None and plan.level == "O2" and isinstance(module, low_precision_models.NORMS)):
            kept[module] = None
            _check_inside(module, rules)
            return
        for child in module.children():
            visit(child)

    for model in models:
        visit(model)
    return list(kept)


def _check_inside(kept: nn.Module, rules: dict[nn.Module, Any]) -> None:
    for inner in kept.modules():
        kind, entry = rules.get(inner, (None, None))
        if kind == "allow":
            raise UnsupportedOpError(
                f"allow got {entry!r}, a {type(inner).__name__} inside a {type(kept).__name__} that stays in "
                f"float32 as a whole at this level. Deny less, or use level='O1'."
            )


def _modules(models: list[nn.Module]) -> list[nn.Module]:
    """List every module once."""
    return list({module: None for model in models for module in model.modules()})


def _tensors_to_lower(models: list[nn.Module], exempt: set[nn.Module]) -> list[torch.Tensor]:
    """List every parameter and buffer to cast once; one that is shared with a kept module stays."""
    staying = {id(tensor) for module in exempt for _, tensor in low_precision_models.tensors(module)}
    every = {id(tensor): tensor for module in _modules(models) for _, tensor in low_precision_models.tensors(module)}
    return [tensor for key, tensor in every.items() if key not in staying]


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


def _guard_checkpoints(
    models: list[nn.Module], exempt: set[nn.Module], copies: dict[nn.Parameter, nn.Parameter]
) -> None:
    """Hook every module with low-precision tensors of its own, so that parts of a model save and load right too."""
    for module in _modules(models):
        named = {} if module in exempt else dict(low_precision_models.tensors(module))
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
