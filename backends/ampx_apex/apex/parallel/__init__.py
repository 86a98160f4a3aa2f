"""`apex.parallel`: several processes, on torch's DistributedDataParallel and collectives; and LARC."""

from __future__ import annotations

from torch.distributed import ReduceOp as ReduceOp

from .distributed import DistributedDataParallel as DistributedDataParallel, Reducer as Reducer
from .larc import LARC as LARC
from .sync_batchnorm import (
    SyncBatchNorm as SyncBatchNorm,
    convert_syncbn_model as convert_syncbn_model,
    create_syncbn_process_group as create_syncbn_process_group,
)

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]
