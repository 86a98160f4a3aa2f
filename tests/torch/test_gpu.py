"""The checks of `make gpu` as tests: one each, on a CUDA device."""

import pathlib
import sys

import pytest
import torch

import ampx

# The checks are files beside gpu.py; only their folder goes on the path, so that ampx stays the installed one.
sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))

from _gpu_checks import NotHere, Setup
from _gpu_torch import CHECKS, NOT_SIMULATED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def cases():
    for check in CHECKS:
        name = check.__name__
        marks = [pytest.mark.gpu(needs=NOT_SIMULATED[name])] if name in NOT_SIMULATED else []
        yield pytest.param(check, id=name, marks=marks)


@pytest.mark.parametrize("check", list(cases()))
@pytest.mark.filterwarnings("ignore")
def test_gpu(check):
    try:
        check(Setup("cuda", quick=True))
    except NotHere as reason:
        pytest.skip(str(reason))
    finally:
        ampx.shutdown()
