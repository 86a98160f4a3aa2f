"""`apex.fp16_utils`: the tools for mixed precision by hand, from before `apex.amp`."""

from __future__ import annotations

from .fp16_optimizer import FP16_Optimizer as FP16_Optimizer
from .fp16util import (
    BN_convert_float as BN_convert_float,
    FP16Model as FP16Model,
    clip_grad_norm as clip_grad_norm,
    convert_module as convert_module,
    convert_network as convert_network,
    master_params_to_model_params as master_params_to_model_params,
    model_grads_to_master_grads as model_grads_to_master_grads,
    network_to_half as network_to_half,
    prep_param_lists as prep_param_lists,
    to_python_float as to_python_float,
    tofp16 as tofp16,
)
from .loss_scaler import DynamicLossScaler as DynamicLossScaler, LossScaler as LossScaler

__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Optimizer",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]
