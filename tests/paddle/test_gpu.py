"""The checks of `make gpu` as tests: one each, on a GPU."""

import pathlib
import sys

import paddle
import pytest

import ampx

# The checks are files beside gpu.py; only their folder goes on the path, so that ampx stays the installed one.
sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))

from _gpu_checks import Setup
from _gpu_paddle import CHECKS, has

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has("cuda"), reason="there is no GPU for paddle"),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.filterwarnings("ignore")
def test_gpu(check):
    before = paddle.get_device()
    try:
        assert check(Setup("cuda", quick=True)).line
    finally:
        ampx.shutdown()
        paddle.set_device(before)
