"""Two gloo processes on this machine run the scenarios of distributed_worker.py once; the tests judge the records.

What is right comes from plain torch in one process on the whole batch: no ampx, no distribution, no scaling.
"""

import math
import pathlib

import pytest
import torch
import torch.distributed
from torch import nn

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")

WORKER = pathlib.Path(__file__).with_name("distributed_worker.py")

# LossScale(growth_interval=2), overflow in step 1: (applied, scale, next_scale, weights untouched) by step.
SKIPS_STEP_1 = [
    [True, 65536.0, 65536.0, False],
    [False, 65536.0, 32768.0, True],
    [True, 32768.0, 32768.0, False],
    [True, 32768.0, 65536.0, False],
]
SKIPS_NOTHING = [
    [True, 65536.0, 65536.0, False],
    [True, 65536.0, 131072.0, False],
    [True, 131072.0, 131072.0, False],
    [True, 131072.0, 262144.0, False],
]


@pytest.fixture(scope="module")
def records(tmp_path_factory, run_two_ranks):
    return run_two_ranks(WORKER, tmp_path_factory.mktemp("ranks"))


def decisions(record):
    return [[applied, scale, next_scale, untouched] for applied, scale, next_scale, _, untouched in record["steps"]]


def train_plainly(make_optimizer, losses, steps, skipped=(1,), max_norm=None):
    """Train on the whole batch in float32; gives the flat weights and the norms of the true gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    opt, norms = make_optimizer(model.parameters()), []
    for step in range(steps):
        if step in skipped:
            continue
        opt.zero_grad()
        for seed in losses(step):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
            model(x).pow(2).mean().backward()
        norms.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm().item())
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        opt.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist(), norms


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1)


def flat_of(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def one_loss(step):
    return [step]


def test_ddp_overflow_on_one_rank_is_skipped_on_all(records, covers):
    ranks = records("ddp_overflow_on_one_rank")
    weights, _ = train_plainly(sgd, one_loss, 4)
    for rank in ranks:
        assert decisions(rank) == SKIPS_STEP_1
        assert rank["weights"] == pytest.approx(weights, rel=1e-5, abs=1e-6)
    assert ranks[0]["weights"] == ranks[1]["weights"]
    covers("distributed", "torch", "cpu/float32/O0")


def test_no_flag_travels_unless_asked_for(records):
    for scenario in ("ddp_overflow_on_one_rank", "no_sync_without_a_group", "fsdp2", "fsdp2_fused"):
        assert [rank["flag_reductions"] for rank in records(scenario)] == [[], []]


def test_exactly_one_flag_travels_a_step_when_asked_for(records):
    for scenario in ("ddp_asked_to_reduce_the_flag", "no_sync_with_a_group", "no_sync_with_a_group_scale_on_device"):
        # Four steps, one element each time.
        assert [rank["flag_reductions"] for rank in records(scenario)] == [[1, 1, 1, 1], [1, 1, 1, 1]]


def test_ddp_with_the_flag_reduced_trains_as_without(records):
    weights, _ = train_plainly(adam, one_loss, 4)
    for rank in records("ddp_asked_to_reduce_the_flag"):
        assert decisions(rank) == SKIPS_STEP_1
        assert rank["weights"] == pytest.approx(weights, rel=1e-4, abs=1e-4)


def test_ddp_with_the_optimizers_state_divided_among_processes(records):
    ranks = records("ddp_with_zero")
    weights, _ = train_plainly(adam, one_loss, 4)
    for rank in ranks:
        assert decisions(rank) == SKIPS_STEP_1
        assert rank["weights"] == pytest.approx(weights, rel=1e-4, abs=1e-4)
    assert ranks[0]["weights"] == ranks[1]["weights"]


def test_ddp_in_bfloat16_stays_in_step(records, covers):
    ranks = records("ddp_in_bfloat16")
    weights, _ = train_plainly(sgd, one_loss, 4)
    for rank in ranks:
        assert decisions(rank) == SKIPS_STEP_1
        assert rank["weights"] == pytest.approx(weights, abs=1e-2)
    assert ranks[0]["weights"] == ranks[1]["weights"]
    covers("distributed", "torch", "cpu/bfloat16/O1")


def test_ddp_accumulation_drops_the_whole_window_on_all_ranks(records):
    ranks = records("ddp_accumulates")
    weights, _ = train_plainly(sgd, one_loss, 3)
    for rank in ranks:
        assert decisions(rank) == SKIPS_STEP_1[:3]
        assert rank["weights"] == pytest.approx(weights, rel=1e-5, abs=1e-6)
    assert ranks[0]["weights"] == ranks[1]["weights"]


@pytest.mark.parametrize("scenario", ["ddp_losses_by_id", "ddp_losses_by_id_in_bucket_views"])
def test_ddp_losses_by_id_keep_their_scales_and_add_their_gradients(records, scenario):
    ranks = records(scenario)
    weights, _ = train_plainly(sgd, lambda step: [step, 100 + step], 3)
    for rank in ranks:
        # Loss 0: finite three times, grown once. Loss 1: finite, overflow, finite.
        assert rank["scales"] == [131072.0, 32768.0]
        assert rank["weights"] == pytest.approx(weights, rel=1e-5, abs=1e-6)
    assert ranks[0]["weights"] == ranks[1]["weights"]


def test_native_no_sync_makes_the_scales_diverge(records):
    assert [rank["scale"] for rank in records("no_sync_natively")] == [32768.0, 65536.0]


def test_no_sync_without_a_group_diverges_as_torch_does(records):
    first, second = records("no_sync_without_a_group")
    assert decisions(first) == SKIPS_STEP_1
    assert decisions(second) == SKIPS_NOTHING


@pytest.mark.parametrize("scenario", ["no_sync_with_a_group", "no_sync_with_a_group_scale_on_device"])
def test_no_sync_with_a_group_agrees(records, scenario):
    for rank in records(scenario):
        assert decisions(rank) == SKIPS_STEP_1


def test_a_rank_without_gradients_takes_part_in_the_agreement(records):
    # good, good (grown), overflow on the other rank, good
    for rank in records("a_rank_without_gradients"):
        assert rank["scales"] == [65536.0, 131072.0, 65536.0, 65536.0]


@pytest.mark.parametrize("scenario", ["fsdp2", "fsdp2_fused", "fsdp2_fused_scale_on_device"])
def test_fsdp2_overflow_in_one_shard_is_skipped_on_all(records, scenario):
    ranks = records(scenario)
    weights, norms = train_plainly(adam, one_loss, 4, max_norm=0.5)
    for rank in ranks:
        assert decisions(rank) == SKIPS_STEP_1
        assert rank["weights"] == pytest.approx(weights, rel=1e-4, abs=1e-4)
        reported = [norm for applied, _, _, norm, _ in rank["steps"] if applied]
        assert reported == pytest.approx(norms, rel=1e-5)
        assert min(norms) < 0.5 < max(norms)  # clipping was at work, and not always


@pytest.mark.parametrize("scenario", ["fsdp2_in_float16", "fsdp2_in_float16_by_its_policy"])
def test_fsdp2_trains_in_float16_and_averages_and_schedulers_wait(records, scenario):
    """By ampx's casting, or by FSDP2's own policy with ampx's loss scale."""
    ranks = records(scenario)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    opt, average = sgd(model.parameters()), None
    for step in (0, 2, 3):  # in float32, without the step that is skipped
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        opt.zero_grad()
        model(x).pow(2).mean().backward()
        opt.step()
        opt.param_groups[0]["lr"] /= 2
        weights = torch.tensor(flat_of(model))
        average = weights if average is None else (average + weights) / 2
    for rank in ranks:
        assert decisions(rank) == [
            [True, 1024.0, 1024.0, False],
            [False, 1024.0, 512.0, True],
            [True, 512.0, 512.0, False],
            [True, 512.0, 1024.0, False],
        ]
        assert rank["dtypes"] == ["torch.float16"]
        assert rank["rate"] == opt.param_groups[0]["lr"]
        # Gradients of two products in a row, of numbers below 2, that are rounded to one part in 2**11.
        assert rank["weights"] == pytest.approx(flat_of(model), abs=2**-8)
        assert rank["average"] == pytest.approx(average.tolist(), abs=2**-8)
    assert ranks[0]["weights"] == ranks[1]["weights"]


def test_fsdp2_each_process_names_what_its_shard_holds(records):
    ranks = records("fsdp2_names_the_parameter_in_the_shard")
    assert [rank["found"] for rank in ranks] == [[["0.weight", 1]], []]
    assert [rank["norm"] for rank in ranks] == [["Tensor", math.inf]] * 2


def test_fsdp1_with_a_group_agrees_and_clips_true_gradients(records):
    _, norms = train_plainly(adam, one_loss, 4, max_norm=0.5)
    for rank in records("fsdp1_with_a_group"):
        assert decisions(rank) == SKIPS_STEP_1
        assert [norm for applied, _, _, norm, _ in rank["steps"] if applied] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("way", ["parallel", "by hand", "loaded"])
def test_ranks_that_start_with_unequal_weights_train_those_of_rank_0(records, way):
    first, second = (ways[way] for ways in records("masters_of_ranks_that_start_unequal"))
    torch.manual_seed(0)
    start = nn.Linear(4, 2, bias=False).weight.detach().bfloat16().float()
    if way == "loaded":  # exact, because every rank loaded it
        start = torch.randn(2, 4, generator=torch.Generator().manual_seed(7))
    expected = start - 0.5 * 1.5 - 0.5 * 3.0  # the mean of both ranks' inputs is the gradient
    assert first == second == expected.tolist()
