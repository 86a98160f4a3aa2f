"""Which process of a job this is, as launchers tell it."""

from __future__ import annotations

import os
from typing import Final

# (rank, number of processes) in the environment: torchrun and most others, Paddle, Open MPI, MPICH, Slurm.
_VARIABLES: Final = (
    ("RANK", "WORLD_SIZE"),
    ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


def process_rank() -> tuple[int, int]:
    """Return the rank of this process and the number of processes; (0, 1) where no launcher says."""
    for names in _VARIABLES:
        rank, size = (os.environ.get(name, "") for name in names)
        if rank.isdecimal() and size.isdecimal() and int(rank) < int(size):
            return int(rank), int(size)
    return 0, 1
