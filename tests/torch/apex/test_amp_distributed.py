"""Two gloo processes on this machine train; the oracle is plain torch in one process on the mean of their losses."""

import json
import pathlib

import pytest
import torch
from torch import nn

from ampx_torch.apex import amp
from ampx_torch.apex.amp.models import cast_calls
from ampx_torch.apex.optimizers import FusedAdam, FusedSGD

WORKER = pathlib.Path(__file__).with_name("amp_worker.py")
needs_processes = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, run_two_ranks):
    folder = tmp_path_factory.mktemp("ranks")
    run_two_ranks(WORKER, folder)
    for rank in (0, 1):
        if not (folder / f"{rank}.json").exists():
            pytest.fail(f"rank {rank} never finished: {(folder / f'stderr.{rank}').read_text()}")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def expected(skipped=()):
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    for step in range(4):
        if step in skipped:
            continue
        optimizer.zero_grad()
        values = [(step + 1.0) * (rank + 1) * (position + 1) for rank in range(2) for position in range(2)]
        (sum(model(torch.full((1, 4), value)).sum() for value in values) / 2).backward()
        optimizer.step()
    return model.weight.tolist()


@needs_processes
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("parallel", ["torch", "ampx_apex"])
def test_accumulation_in_parallel_is_that_of_float32(ranks, opt_level, parallel):
    first, second = (rank[f"{opt_level} {parallel} None"] for rank in ranks)
    # all numbers are small integers and powers of two: nothing is rounded, up to the loss, which is not looked at
    assert first["weight"] == second["weight"] == expected()
    assert first["applied"] == second["applied"] == [True] * 4
    # seven blocks made their gradients true when they ended, the delayed one did not
    assert first["amp"] == second["amp"] == {"loss_scaler0": {"loss_scale": 64.0, "unskipped": 7}}


@needs_processes
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("parallel", ["torch", "ampx_apex"])
def test_an_overflow_of_one_process_skips_the_step_in_both(ranks, opt_level, parallel):
    first, second = (rank[f"{opt_level} {parallel} (1, 1, 0)"] for rank in ranks)
    assert first["weight"] == second["weight"] == expected(skipped=(1,))
    assert first["applied"] == second["applied"] == [True, False, True, True]
    assert first["amp"] == second["amp"] == {"loss_scaler0": {"loss_scale": 32.0, "unskipped": 4}}


@needs_processes
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("way", ["delayed", "averaged"])
def test_gradients_reduced_by_hand_train_as_float32_does(ranks, opt_level, way):
    first, second = (rank[f"{opt_level} {way} None"] for rank in ranks)
    assert first["weight"] == second["weight"] == expected()
    assert first["steps"] == second["steps"] == 4
    # a block with a delayed check does not move the scale, the script's own call does
    counted = 4 if way == "delayed" else 8
    assert first["amp"] == second["amp"] == {"loss_scaler0": {"loss_scale": 64.0, "unskipped": counted}}


@needs_processes
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("way", ["delayed", "averaged", "clipped"])
def test_an_overflow_of_one_process_that_a_script_reduces_by_hand_skips_the_step_in_both(ranks, opt_level, way):
    """The process whose own block was finite gets the infinity after it: clipping makes NaN of it."""
    first, second = (rank[f"{opt_level} {way} (1, 1, 1)"] for rank in ranks)
    assert first["weight"] == second["weight"] == expected(skipped=(1,))
    assert first["steps"] == second["steps"] == 3
    counted = 2 if way == "delayed" else 4
    assert first["amp"] == second["amp"] == {"loss_scaler0": {"loss_scale": 32.0, "unskipped": counted}}


@needs_processes
@pytest.mark.parametrize("way", ["torch", "apex", "by hand"])
def test_processes_that_start_with_unequal_weights_train_those_of_the_first(ranks, way):
    first, second = (rank[f"unequal {way}"] for rank in ranks)
    torch.manual_seed(0)
    exact = nn.Linear(4, 1)
    weight, bias = (parameter.detach().half().float() for parameter in exact.parameters())
    assert first["before"] == second["before"] == [weight.tolist(), bias.tolist()]
    # the gradient is the mean of both processes' inputs
    assert first["weight"] == second["weight"] == (weight - 0.5 * 1.5 - 0.5 * 3.0).tolist()
    assert first["bias"] == second["bias"] == (bias - 0.5 - 0.5).tolist()


def test_replicas_of_a_cast_model_compute_with_their_own_weights():
    """DataParallel makes one for each device by this method of torch's."""
    model = nn.Linear(2, 1, bias=False)
    cast_calls(model, torch.float16, torch.float32)
    replica = model._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.full((1, 2), 3.0, dtype=torch.float16), None
    assert replica(torch.ones(1, 2)).item() == 6.0
    assert replica(torch.ones(1, 2)).dtype == torch.float32


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD])
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_the_fused_optimizers_of_apex_go_through_initialize(kind, opt_level):
    """Their oracles are the same optimizers in float32."""
    result = []
    for scaled in (True, False):
        model = nn.Linear(4, 1, bias=False)
        nn.init.constant_(model.weight, 1.0)
        optimizer = kind(model.parameters(), lr=0.125)
        if scaled:
            amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=64.0, verbosity=0)
            assert isinstance(optimizer, kind)
        for value in (1.0, -2.0, 0.5):
            optimizer.zero_grad()
            loss = model(torch.full((1, 4), value)).sum()
            if scaled:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            optimizer.step()
        result.append(model.state_dict()["weight"].tolist())
    assert result[0] == result[1]
