"""`initialize` and the checkpoints of the loss scales."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from ampx.errors import InvalidStateError
from ampx.saved_state import parse_loss_state
from ampx.session import new_group
from ampx_torch.prepare import masters
from ampx_torch.trees import LOW

from . import models as casts, sessions
from ._amp_state import _amp_state
from .checks import check_losses, check_models, check_optimizers, device_of, flatten
from .errors import CheckpointError, CheckpointWarning
from .handle import AmpHandle, NoOpHandle
from .opt import ApexOptimizer, wrap
from .properties import Properties, choose
from .scaler import LossScaler, configure


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: Any = None,
    patch_torch_functions: Any = None,
    keep_batchnorm_fp32: Any = None,
    master_weights: Any = None,
    loss_scale: Any = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = 2.0**24,
    *,
    dtype: object = None,
) -> Any:
    """Turn mixed precision on for models and optimizers. They are changed in place and returned.

    Args:
        models: A model in float32, or a list of them, or lists of lists.
        optimizers: All that train them, in the same forms; None for inference.
        enabled: False changes nothing and makes all other calls transparent.
        opt_level: `"O0"` float32; `"O1"` operations are cast by op lists; `"O2"` the model is cast but for batch
            norms, with float32 master weights; `"O3"` the model is cast. The next five options override it.
        cast_model_type: Dtype of the model; False casts nothing.
        patch_torch_functions: False: operations are not cast at O1.
        keep_batchnorm_fp32: Leave batch norms in float32; a bool or a string of one.
        master_weights: Update float32 copies of low-precision parameters.
        loss_scale: `"dynamic"`, a number or a string of one.
        cast_model_outputs: Cast the models' outputs to this dtype, at every level.
        num_losses: How many loss scales there are, to be chosen by `loss_id`.
        verbosity: 0 prints nothing.
        min_loss_scale: Floor of dynamic loss scales; None for none but 2**-24.
        max_loss_scale: Ceiling of dynamic loss scales.
        dtype: What stands for float16: `"float16"` or `"bfloat16"`; None for what AMPX_APEX_DTYPE says, else float16.

    Returns:
        `models`, or `(models, optimizers)`: the objects that were passed, in the containers that were passed.

    Raises:
        PropertyError: An option does not go with the level, or a model holds low-precision parameters already.
        ArgumentTypeError: Something is no model or no optimizer.
        InitializedTwiceError: An optimizer went through `initialize` before.
        ProtocolError: A model is wrapped by DistributedDataParallel or its like.
        UnsupportedByBackendError: An optimizer cannot have master weights.
        InvalidOptionError: Another option is not acceptable.
    """
    passed = models if optimizers is None else (models, optimizers)
    _amp_state.verbosity = verbosity
    if not enabled:
        _amp_state.switched_off = True
        sessions.end()
        _amp_state.opt_properties = Properties()
        _amp_state.loss_scalers = []
        _amp_state.initialized = True
        return passed
    low = sessions.choose_low(dtype)
    overrides = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
    }
    properties = choose(opt_level, low, overrides)
    check_losses(num_losses)
    scale = configure(properties.loss_scale, min_loss_scale, max_loss_scale)
    all_models, all_optimizers = flatten(models), [] if optimizers is None else flatten(optimizers)
    check_models(all_models, _amp_state.allow_incoming_model_not_fp32)
    check_optimizers(all_optimizers, bool(properties.master_weights))
    device = device_of(all_models, all_optimizers)
    level = "O1" if properties.patch_torch_functions else {"O1": "O0"}.get(opt_level, opt_level)
    session = sessions.start(level, low, device, scale, allow_banned=False)
    _wrap(session, all_optimizers, scale)
    _cast(all_models, all_optimizers, properties, cast_model_outputs)
    _amp_state.opt_properties = properties
    _amp_state.initialized = True
    _amp_state.handle = AmpHandle(session) if level == "O1" else None
    group = all_optimizers[0].ampx_member.group if all_optimizers else new_group("torch", scale)
    for optimizer in list(_amp_state.optimizers):  # as in apex, what came before shares the loss scales from now on
        optimizer.join(group)
    _amp_state.optimizers.update(all_optimizers)
    _amp_state.models.update(all_models)
    _amp_state.loss_scalers = [LossScaler.of(group, loss_id, device) for loss_id in range(num_losses)]
    options = ", ".join(f"{name}={value}" for name, value in properties.options.items() if name != "opt_level")
    _amp_state.tell(f"amp: opt_level={opt_level} with {str(low).removeprefix('torch.')} on {device}: {options}")
    return passed


def _wrap(session: Any, optimizers: list[Any], scale: Any) -> None:
    if optimizers:
        session.wrap_optimizer(optimizers, loss_scale=scale, wrapper=wrap)


def _cast(
    models: list[torch.nn.Module],
    optimizers: list[ApexOptimizer],
    properties: Properties,
    outputs: torch.dtype | None,
) -> None:
    """Cast the models and give the optimizers their masters."""
    dtype = properties.cast_model_type or None
    keep = bool(properties.keep_batchnorm_fp32)
    raws = [optimizer.optimizer for optimizer in optimizers]
    copies = casts.make_masters(raws, models, dtype, keep) if properties.master_weights else {}
    _cast_models(models, dtype, keep, outputs)
    if properties.master_weights:
        for optimizer, copies_of in zip(optimizers, masters.give(raws, copies), strict=True):
            optimizer.masters = copies_of
    elif dtype is not None:
        for raw in raws:
            casts.lower_state(raw)
    if dtype in LOW or copies:
        casts.guard_checkpoints(models, copies, all_of=dtype in LOW)


def _cast_models(
    models: list[torch.nn.Module], dtype: torch.dtype | None, keep: bool, outputs: torch.dtype | None
) -> None:
    """Cast parameters, inputs and outputs, or of models that stay in float32 the outputs if asked to."""
    for model in models:
        if dtype is not None:
            casts.cast_model(model, dtype, keep)
            casts.cast_calls(model, dtype, outputs or torch.float32)
        elif outputs is not None:
            casts.cast_calls(model, None, outputs)


def begin_handle(enabled: bool, loss_scale: Any, allow_banned: bool, dtype: object) -> AmpHandle | NoOpHandle:
    """Do what `init` says."""
    if not enabled:
        _amp_state.switched_off = True
        return NoOpHandle()
    low = sessions.choose_low(dtype)
    scale = configure(choose("O1", low, {"loss_scale": loss_scale}).loss_scale, None, None)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    session = sessions.start("O1", low, device, scale, allow_banned)
    handle = _amp_state.handle = AmpHandle(session, scale)
    return handle


def state_dict(destination: Any = None) -> Any:
    """Return the loss scales as apex saved them: `{"loss_scaler0": {"loss_scale": …, "unskipped": …}, …}`."""
    states = OrderedDict() if destination is None else destination
    for position, scaler in enumerate(_amp_state.loss_scalers):
        states[f"loss_scaler{position}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return states


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Take over loss scales that `state_dict` returned, here or in apex.

    Loss scales of the state that have no counterpart are left out, and those without an entry stay, each with a
    warning. With `enabled=False` nothing happens.

    Raises:
        CheckpointError: It holds other entries.
        InvalidStateError: A value is missing or not acceptable; nothing is loaded then.
    """
    if _amp_state.initialized and not _amp_state.opt_properties.enabled:
        return
    sessions.present("load_state_dict")
    scalers = _amp_state.loss_scalers
    positions = {f"loss_scaler{position}": position for position in range(max(len(scalers), len(state_dict)))}
    unexpected = [key for key in state_dict if key not in positions]
    if unexpected:
        raise CheckpointError(
            f"load_state_dict got the entries {', '.join(map(repr, unexpected))}; accepted: 'loss_scaler0' and so on, "
            f"as amp.state_dict() gave them. Pass that part of the checkpoint, usually checkpoint['amp']."
        )
    loaded = {positions[key]: _read(key, entry) for key, entry in state_dict.items()}
    if len(loaded) != len(scalers):
        warnings.warn(
            f"the state holds {len(loaded)} loss scales, but num_losses={len(scalers)}; those that have no counterpart "
            f"are left out or stay as they are. Pass the num_losses of the run that saved it.",
            CheckpointWarning,
            stacklevel=2,
        )
    for position, (scale, unskipped) in loaded.items():
        if position < len(scalers):
            scalers[position]._loss_scale, scalers[position]._unskipped = scale, unskipped


def _read(key: str, entry: Any) -> tuple[float, int]:
    if not isinstance(entry, Mapping) or not {"loss_scale", "unskipped"} <= set(entry):
        raise InvalidStateError(
            f"the state cannot be loaded: {key} is {entry!r}; accepted: a dict with 'loss_scale' and 'unskipped'. The "
            f"loss scales are unchanged; pass what amp.state_dict() gave."
        )
    fields = {"scale": entry["loss_scale"], "growth_tracker": entry["unskipped"]}
    state = parse_loss_state({**fields, "hysteresis_tracker": 1, "consecutive_skips": 0}, key)
    return float(state.scale), int(state.growth_tracker)
