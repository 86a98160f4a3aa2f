"""Two gloo processes on one device train with `DistributedDataParallel`, at every level; the tests judge.

What is right comes from plain torch in float32, in one process on the whole batch: no ampx, no processes, no scaling.
"""

import json
import pathlib

import pytest
import torch
import torch.distributed
from torch import nn

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
WORKER = pathlib.Path(__file__).with_name("levels_worker.py")
CASES = {
    f"{level}-{dtype}-{'fused' if fused else 'foreach'}": (level, dtype, fused)
    for level, dtype, fused in (
        ("O0", "float32", False),
        ("O1", "float16", False),
        ("O1", "float16", True),
        ("O1", "bfloat16", False),
        ("O2", "float16", True),
        ("O2", "bfloat16", False),
        ("O3", "float16", False),
        ("O3", "bfloat16", False),
    )
}
# LossScale(growth_interval=2), overflow in step 1: (applied, scale, next_scale, weights untouched) by step.
SKIPS_STEP_1 = [
    [True, 65536.0, 65536.0, False],
    [False, 65536.0, 32768.0, True],
    [True, 32768.0, 32768.0, False],
    [True, 32768.0, 65536.0, False],
]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(scope="module")
def records(device, tmp_path_factory, run_two_ranks):
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "asked.json").write_text(json.dumps({"device": device, "cases": CASES}))
    return run_two_ranks(WORKER, folder)


def train_plainly():
    """Train on the whole batch in float32, without the step that is to be skipped; gives the flat weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (0, 2, 3):
        whole = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(whole).pow(2).mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@pytest.mark.parametrize("case", CASES)
def test_an_overflow_on_one_rank_is_skipped_on_both(records, device, case, covers):
    level, dtype, _ = CASES[case]
    first, second = records(case)
    assert first["steps"] == second["steps"] == SKIPS_STEP_1
    assert first["devices"] == [device]
    low = {"O2": [dtype, "float32", "float32", dtype, dtype], "O3": [dtype] * 5}
    assert first["dtypes"] == low.get(level, ["float32"] * 5)
    assert first["weights"] == second["weights"]
    # The weights are rounded once at first and after each of three steps, and the gradients, a tenth of which is
    # added, in each of them; all are of the size of 1 at most.
    expected = train_plainly()
    tolerance = 4 * torch.finfo(getattr(torch, dtype)).eps if dtype != "float32" else 1e-6
    assert (torch.tensor(first["weights"]) - expected).abs().max() <= tolerance
    covers("distributed", "torch", f"{device}/{dtype}/{level}")
