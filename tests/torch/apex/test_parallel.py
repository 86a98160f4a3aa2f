"""Two gloo processes on this machine run the scenarios of parallel_worker.py once; the tests judge the records.

What is right comes from plain torch in one process on the whole batch: no ampx and no distribution.
"""

import copy
import pathlib
import pickle

import pytest
import torch
import torch.distributed
from torch import nn

from ampx.errors import ProtocolError
from ampx_torch.apex.parallel import LARC, DistributedDataParallel, Reducer, SyncBatchNorm, create_syncbn_process_group

WORKER = pathlib.Path(__file__).with_name("parallel_worker.py")
PARTS = {0: slice(0, 3), 1: slice(3, 8)}
needs_processes = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")


@pytest.fixture(scope="module")
def records(tmp_path_factory, run_two_ranks):
    read = run_two_ranks(WORKER, tmp_path_factory.mktemp("ranks"))
    return lambda scenario: [record["value"] for record in read(scenario)]


def batch(step=0):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def gradients_of_sums(step=1):
    """The gradients of the loss over the whole batch: what both ranks' gradients add up to."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model(batch(step)).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_close(actual, expected, **tolerance):
    torch.testing.assert_close(torch.tensor(actual), expected.to(torch.float32), **tolerance)


@needs_processes
@pytest.mark.parametrize(
    ("scenario", "factor"),
    [
        ("averages", 1 / 2),
        ("averages_in_small_messages", 1 / 2),
        ("averages_after_the_backward", 1 / 2),
        ("averages_divided_before", 1 / 2),
        ("sums", 1.0),
        ("sums_divided_before", 1 / 4),
    ],
)
def test_gradients_are_those_of_the_whole_batch(records, scenario, factor):
    for record in records(scenario):
        for name, expected in gradients_of_sums().items():
            # Float32 sums of 8 products of values below 10, in another order.
            assert_close(record[name], expected * factor, rtol=1e-5, atol=1e-4)


@needs_processes
def test_low_precision_gradients_are_summed_in_float32_where_asked_for(records):
    # In float16 the sum of two gradients of 60000 is infinite; their average in float32 is 60000, rounded to 60000.
    assert records("averages_of_float16_in_float32") == [60000.0, 60000.0]


@needs_processes
def test_parameters_may_take_no_part(records):
    # The parameter that took part before keeps the gradient that zero_grad left: none.
    assert records("unused_parameters") == [[[True, True, False], [True, False, False], [True, True, False]]] * 2


@needs_processes
def test_gradients_stay_with_their_process_while_it_is_disabled(records):
    totals = []
    for rank, (alone, together) in enumerate(records("gradients_of_its_own")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        model(batch(0)[PARTS[rank]]).square().sum().backward()
        assert_close(alone, model[2].bias.grad, rtol=1e-5, atol=1e-4)
        totals.append(together)
    expected = (gradients_of_sums(0)["2.bias"] + gradients_of_sums(1)["2.bias"]) / 2
    for result in totals:
        assert_close(result, expected, rtol=1e-5, atol=1e-4)


@needs_processes
def test_buffers_stay_with_their_process(records):
    for rank, record in enumerate(records("statistics_of_its_own")):
        norm = nn.BatchNorm1d(4)
        for step in range(2):
            norm(batch(step)[PARTS[rank]])
        assert_close(record, norm.running_mean)


@needs_processes
def test_two_networks_train_against_each_other(records):
    first, second = records("a_loop_of_two_networks")
    assert first == second


@needs_processes
def test_options_without_effect_warn(records):
    for record in records("options_that_warn"):
        assert all(len(messages) == 1 and name in messages[0] for name, messages in record.items()), record
        assert len(record) == 5


@needs_processes
def test_options_that_cannot_be_honoured_raise(records):
    kinds = {"retain": "UnsupportedByBackendError"}
    for record in records("options_that_raise"):
        assert record.keys() == {"shared_param", "retain", "triggers", "streams", "factor"}
        for name, (kind, message) in record.items():
            assert kind == kinds.get(name, "InvalidOptionError")
            assert "accepted: " in message


@needs_processes
def test_the_reducer_of_a_module_averages_its_gradients(records):
    torch.manual_seed(0)
    expected = nn.Linear(4, 4).weight
    for weight, gradient, missing in records("reducer_of_a_module"):
        assert torch.equal(torch.tensor(weight), expected)
        assert gradient == [[1.5] * 4] * 4
        assert missing is None


@needs_processes
def test_the_reducer_of_gradients_averages_them(records):
    assert records("reducer_of_gradients") == [[[1.5, 1.5], [2.0]]] * 2


def norm_input():
    return torch.randn(8, 3, 2, generator=torch.Generator().manual_seed(5)) * 2 + 100


def on_the_whole_batch(norm, x, layout=lambda x: x, shift=0.0, relu=False):
    """The same passes through a batch norm over all rows; the loss is the sum of both ranks' losses."""
    x = x.double().requires_grad_()
    norm = norm.double()
    for _ in range(2):
        y = norm(x) + shift
        y = layout(y.relu() if relu else y)
        for part in PARTS.values():
            weights = torch.arange(y[part].numel(), dtype=torch.double).view_as(y[part]).sin()
            (y[part] * weights).sum().backward(retain_graph=True)
    norm.eval()
    evaluated = norm(x)
    return layout(y), x.grad, evaluated


def judge_norm(actual, whole, norm, tolerance):
    y, gradient, evaluated = whole
    for rank, record in enumerate(actual):
        part = PARTS[rank]
        for name, expected in (("y", y), ("x.grad", gradient), ("evaluated", evaluated)):
            assert_close(record[name], expected[part].detach(), **tolerance)
        if norm.running_mean is None:
            assert record["statistics"] is None
        else:
            assert_close(record["statistics"][0], norm.running_mean, **tolerance)
            assert_close(record["statistics"][1], norm.running_var, **tolerance)
    if norm.affine:
        # Each rank has the gradient of its own rows; DistributedDataParallel adds them up.
        for index, own in enumerate((norm.weight, norm.bias)):
            total = sum(torch.tensor(record["affine"][index]) for record in actual)
            torch.testing.assert_close(total.double(), own.grad, rtol=1e-3, atol=1e-3)


# Values near 100 are float32 to 2**-17, over a standard deviation of 2; a handful of operations on them.
NEAR_100 = {"rtol": 1e-4, "atol": 1e-4}


@needs_processes
@pytest.mark.parametrize(
    ("scenario", "options"),
    [
        ("sync_norm", {}),
        ("sync_norm_without_momentum", {"momentum": None, "affine": False}),
        ("sync_norm_without_statistics", {"track_running_stats": False}),
    ],
)
def test_sync_batch_norm_is_batch_norm_over_all_processes(records, scenario, options):
    norm = nn.BatchNorm1d(3, **options)
    whole = on_the_whole_batch(norm, norm_input())
    ranks = records(scenario)
    if not norm.track_running_stats:  # without statistics, evaluation normalises by the rows of its process
        for rank, record in enumerate(ranks):
            alone = nn.BatchNorm1d(3, affine=False)(norm_input()[PARTS[rank]])
            assert_close(record.pop("evaluated"), alone, **NEAR_100)
            record["evaluated"] = whole[2][PARTS[rank]].tolist()
    judge_norm(ranks, whole, norm, NEAR_100)


@needs_processes
def test_sync_batch_norm_of_bfloat16_rounds_once(records):
    norm = nn.BatchNorm1d(3)
    rounded = (norm_input() - 100).bfloat16()
    ranks = records("sync_norm_of_bfloat16")
    assert {record["dtype"] for record in ranks} == {"torch.bfloat16"}
    # Results below 4 are bfloat16 to 2**-7; gradients of weights below 1 likewise, added up twice.
    for rank, record in enumerate(ranks):
        whole = on_the_whole_batch(nn.BatchNorm1d(3), rounded)
        assert_close(record["y"], whole[0][PARTS[rank]].detach(), rtol=2.0**-8, atol=2.0**-8)
        assert_close(record["x.grad"], whole[1][PARTS[rank]], rtol=2.0**-5, atol=2.0**-5)
    whole = on_the_whole_batch(norm, rounded)
    for record in ranks:
        assert_close(record["statistics"][1], norm.running_var, rtol=1e-5, atol=1e-5)


@needs_processes
def test_sync_batch_norm_takes_channels_last_adds_and_cuts(records):
    norm = nn.BatchNorm1d(3)
    y, gradient, _ = on_the_whole_batch(norm, norm_input(), lambda x: x.movedim(1, -1), shift=0.25, relu=True)
    for rank, record in enumerate(records("sync_norm_channel_last")):
        assert_close(record["y"], y.movedim(1, -1)[PARTS[rank]].detach(), **NEAR_100)
        assert_close(record["x.grad"], gradient.movedim(1, -1)[PARTS[rank]], **NEAR_100)


@needs_processes
def test_converting_a_network_keeps_its_parameters(records):
    for record in records("converted_network"):
        assert record["kinds"] == ["SyncBatchNorm", "SyncBatchNorm", "LayerNorm"]
        assert record["same"]
        assert record["kept"] == [1e-3, [7.0] * 3, [3.0] * 3, False]
        assert record["channel_last"]
        assert record["alone"] == "SyncBatchNorm"


@needs_processes
def test_a_converted_network_trains_in_parallel(records):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model(batch()).square().sum().backward()
    for record in records("converted_network_in_parallel"):
        for kind in record:
            for name, own in model.named_parameters():
                assert_close(kind[name], own.grad / 2, rtol=1e-4, atol=1e-4)  # float32, some 2**-24 a sum


@needs_processes
def test_groups_share_statistics_within_themselves_only(records):
    for record in records("groups_of_one"):
        for name in ("y", "x.grad", "evaluated"):
            assert_close(record["own"][name], torch.tensor(record["plain"][name]), **NEAR_100)
        assert record["all"] is None
        assert "does not fit 2 processes; accepted: 0, or a divisor of 2" in record["error"]


def test_without_processes_sync_batch_norm_is_batch_norm():
    x = norm_input()
    torch.testing.assert_close(SyncBatchNorm(3)(x), nn.BatchNorm1d(3)(x))


@pytest.mark.parametrize("make", [DistributedDataParallel, Reducer])
def test_a_process_group_is_needed(make):
    with pytest.raises(ProtocolError, match="init_process_group"):
        make(nn.Linear(2, 2))
    with pytest.raises(ProtocolError, match="init_process_group"):
        create_syncbn_process_group(2)
    assert create_syncbn_process_group(0) is None


def larc_reference(weight, gradient, rate, decay, trust, clip, eps=1e-8):
    """One step of SGD with the layer's own rate, by the paper's formula."""
    local = trust * weight.norm() / (gradient.norm() + decay * weight.norm() + eps)
    factor = min(local / rate, 1.0) if clip else local
    return weight - rate * factor * (gradient + decay * weight)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("size", [0.001, 10.0])
def test_larc_steps_by_the_rate_of_the_layer(clip, decay, size):
    weight = torch.randn(3, 4, dtype=torch.float64)
    gradient = torch.randn(3, 4, dtype=torch.float64) * size
    parameter = nn.Parameter(weight.clone())
    inner = torch.optim.SGD([parameter], lr=0.5, weight_decay=decay)
    opt = LARC(inner, trust_coefficient=0.02, clip=clip)
    parameter.grad = gradient.clone()
    opt.step()
    expected = larc_reference(weight, gradient, 0.5, decay, 0.02, clip)
    torch.testing.assert_close(parameter.detach(), expected)
    assert inner.param_groups[0]["weight_decay"] == decay


def test_larc_leaves_zeros_alone():
    zero, still = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
    opt = LARC(torch.optim.SGD([zero, still], lr=0.5, weight_decay=0.1))
    zero.grad, still.grad = torch.ones(2), torch.zeros(2)
    opt.step()
    assert zero.tolist() == [-0.5, -0.5]
    assert still.tolist() == [1.0, 1.0]


def test_larc_gives_the_weight_decay_back_after_an_error():
    parameter = nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([parameter], lr=0.5, weight_decay=0.1)
    inner.register_step_pre_hook(lambda *_: 1 / 0)
    parameter.grad = torch.ones(2)
    with pytest.raises(ZeroDivisionError):
        LARC(inner).step()
    assert inner.param_groups[0]["weight_decay"] == 0.1


def test_larc_is_an_optimizer_to_schedulers_closures_copies_and_pickles():
    parameter = nn.Parameter(torch.ones(2))
    opt = LARC(torch.optim.SGD([parameter], lr=0.5, momentum=0.9))
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1)

    def closure():
        opt.zero_grad()
        loss = parameter.sum()
        loss.backward()
        return loss

    assert opt.step(closure).item() == 2.0
    schedule.step()
    assert opt.optim.param_groups[0]["lr"] == pytest.approx(0.05)
    assert "momentum_buffer" in opt.state_dict()["state"][0]
    opt.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    for copied in (copy.deepcopy(opt), pickle.loads(pickle.dumps(LARC(torch.optim.SGD([parameter], lr=0.5))))):
        assert isinstance(copied, torch.optim.Optimizer)
        assert copied.trust_coefficient == 0.02
        assert repr(copied).startswith("SGD")
