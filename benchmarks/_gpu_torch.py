"""PyTorch's checks, and what PyTorch knows about the machine."""

from __future__ import annotations

import platform
from typing import Any, Final

import torch
from _gpu_checks import Check
from _gpu_torch_casting import (
    autocast_results_are_those_of_torch,
    backward_runs_uncast_in_its_own_threads,
    compiled_step_trains_like_the_eager_one,
    master_weights_keep_small_updates,
    process_wide_casting_never_reads_old_weights,
)
from _gpu_torch_cost import (
    kernels_per_step_are_not_more,
    step_takes_no_longer_large,
    step_takes_no_longer_small,
    syncs_per_step_are_not_more,
)
from _gpu_torch_models import (
    bert_base_grows_to_what_fits,
    bert_base_is_as_fast_as_by_hand,
    resnet50_grows_to_what_fits,
    resnet50_is_as_fast_as_by_hand,
)
from _gpu_torch_numerics import compare_and_tune_judge_resnet50, optimizer_phase_takes_no_longer
from _gpu_torch_scaling import (
    float16_overflow_recovers_as_grad_scaler_does,
    resumed_run_is_bit_identical,
    scale_trace_is_the_reference,
    skipped_step_changes_nothing,
)
from _gpu_torch_training import accuracy_is_that_of_float32, data_parallel_skips_and_agrees

CHECKS: Final[tuple[Check, ...]] = (
    autocast_results_are_those_of_torch,
    process_wide_casting_never_reads_old_weights,
    backward_runs_uncast_in_its_own_threads,
    scale_trace_is_the_reference,
    skipped_step_changes_nothing,
    float16_overflow_recovers_as_grad_scaler_does,
    resumed_run_is_bit_identical,
    master_weights_keep_small_updates,
    compiled_step_trains_like_the_eager_one,
    data_parallel_skips_and_agrees,
    accuracy_is_that_of_float32,
    syncs_per_step_are_not_more,
    kernels_per_step_are_not_more,
    step_takes_no_longer_small,
    step_takes_no_longer_large,
    resnet50_is_as_fast_as_by_hand,
    bert_base_is_as_fast_as_by_hand,
    compare_and_tune_judge_resnet50,
    optimizer_phase_takes_no_longer,
    resnet50_grows_to_what_fits,
    bert_base_grows_to_what_fits,
)
# Those that are larger in full runs, in the order in which time is spent on them.
MEASURED: Final[tuple[Check, ...]] = (
    accuracy_is_that_of_float32,
    step_takes_no_longer_large,
    step_takes_no_longer_small,
    resnet50_is_as_fast_as_by_hand,
    bert_base_is_as_fast_as_by_hand,
    optimizer_phase_takes_no_longer,
    compare_and_tune_judge_resnet50,
    float16_overflow_recovers_as_grad_scaler_does,
    resnet50_grows_to_what_fits,
    bert_base_grows_to_what_fits,
)
# Check → what it needs that a simulated CUDA device has not.
NOT_SIMULATED: Final = {
    "compiled_step_trains_like_the_eager_one": "a compiler for CUDA",
    "kernels_per_step_are_not_more": "the profiler",
    "step_takes_no_longer_small": "speed",
    "step_takes_no_longer_large": "speed",
    "resnet50_is_as_fast_as_by_hand": "speed",
    "bert_base_is_as_fast_as_by_hand": "speed",
    "resnet50_grows_to_what_fits": "memory of its own",
    "bert_base_grows_to_what_fits": "memory of its own",
    "optimizer_phase_takes_no_longer": "speed",
}
# Check → what its passing on a GPU shows, as device/dtype/level/aspect, for the table of what is tested.
COVERS: Final = {
    "autocast_results_are_those_of_torch": ("cuda/float16/O1/casting", "cuda/bfloat16/O1/casting"),
    "scale_trace_is_the_reference": ("cuda/bfloat16/O1/scaling",),
    "float16_overflow_recovers_as_grad_scaler_does": ("cuda/float16/O1/scaling",),
    "resumed_run_is_bit_identical": ("cuda/bfloat16/O1/state",),
    "master_weights_keep_small_updates": (
        "cuda/float16/O2/casting",
        "cuda/float16/O2/master weights",
        "cuda/bfloat16/O2/casting",
        "cuda/bfloat16/O2/master weights",
    ),
}


def has(device: str) -> bool:
    """Return whether torch offers the device here."""
    return device == "cpu" or torch.cuda.is_available()


def describe(device: str) -> dict[str, Any]:
    """Return versions, and for a GPU its name and compute capability."""
    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if device == "cpu":
        return {"name": platform.processor() or "cpu", "threads": torch.get_num_threads(), **facts}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "cudnn": torch.backends.cudnn.version(),
        **facts,
    }
