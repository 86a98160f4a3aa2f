"""The checks of `make gpu` as tests: one each, on a CUDA device."""

import pathlib
import sys

import pytest
import torch

import ampx

# The checks are files beside gpu.py; only their folder goes on the path, so that ampx stays the installed one.
sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))

from _gpu_checks import NotHere, Setup
from _gpu_torch import CHECKS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.filterwarnings("ignore")
def test_gpu(check):
    try:
        check(Setup("cuda", quick=True))
    except NotHere as reason:
        pytest.skip(str(reason))
    finally:
        ampx.shutdown()
