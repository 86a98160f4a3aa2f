"""Levels O2 and O3: low-precision models, float32 norms, master weights, checkpoints."""

import collections
import copy
import pickle

import pytest
import torch
from torch import nn

import ampx
from ampx_torch.prepare import masters

pytestmark = pytest.mark.filterwarnings("ignore::ampx.errors.PrecisionWarning")

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture(autouse=True)
def restored():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    ampx.shutdown()


def init(level="O2", dtype="bfloat16", **options):
    return ampx.init("torch", dtype=dtype, device="cpu", level=level, **options)


class Net(nn.Module):
    """Has a norm of every kind that trains here, a tied weight, a frozen parameter and a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.batch = nn.BatchNorm1d(4)
        self.layer = nn.LayerNorm(4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("shift", torch.full((4,), 0.1))

    def forward(self, x, extra=None):
        x = self.last(self.layer(self.batch(self.first(x)))) + self.shift * self.frozen
        return {"y": x, "kept": extra}


def sgd(model, **options):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, **options)


def train(amp, model, opt, steps=3):
    for seed in range(steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        loss = model(x)["y"].square().mean()
        with amp.scale_loss(loss, opt) as scaled:
            scaled.backward()
        opt.step()
        opt.zero_grad()


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(state, other):
    assert state.keys() == other.keys()
    for name in state:
        assert state[name].dtype == other[name].dtype, name
        assert torch.equal(state[name], other[name]), name


# -- dtypes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_o2_lowers_everything_but_norms(dtype):
    amp = init(dtype=dtype)
    model = amp.prepare(Net())
    kinds = {name: tensor.dtype for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    low = {name for name, kind in kinds.items() if kind == DTYPES[dtype]}
    assert low == {"first.weight", "first.bias", "last.bias", "frozen", "shift"}
    assert {kind for name, kind in kinds.items() if name not in low} == {torch.float32, torch.int64}


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_o3_lowers_everything(dtype):
    amp = init("O3", dtype=dtype)
    model = amp.prepare(Net())
    kinds = {tensor.dtype for tensor in [*model.parameters(), *model.buffers()]}
    assert kinds == {DTYPES[dtype], torch.int64}
    assert model(torch.randn(8, 4))["y"].dtype == torch.float32


NORMS = [
    (nn.BatchNorm1d(4), (8, 4)),
    (nn.BatchNorm2d(4), (2, 4, 3, 3)),
    (nn.InstanceNorm1d(4, affine=True, track_running_stats=True), (2, 4, 5)),
    (nn.GroupNorm(2, 4), (2, 4, 5)),
    (nn.LayerNorm(4), (2, 4)),
    (nn.RMSNorm(4), (2, 4)),
    (nn.LocalResponseNorm(2), (2, 4, 5)),
]


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize(("norm", "shape"), NORMS, ids=lambda tensor: type(tensor).__name__)
def test_norms_compute_in_float32_on_low_precision_inputs(norm, shape, dtype):
    amp, low = init(dtype=dtype), DTYPES[dtype]
    norm = copy.deepcopy(norm)
    expected = copy.deepcopy(norm)
    model = amp.prepare(nn.Sequential(nn.Identity(), norm))
    x = torch.randn(shape).to(low)
    output = norm(x)
    assert output.dtype == low
    assert torch.equal(output, expected(x.float()).to(low))
    for name, buffer in expected.named_buffers():
        assert torch.equal(norm.get_buffer(name), buffer)
    assert model(x).dtype == torch.float32


def test_inputs_of_the_model_are_cast_in_containers_and_keywords_and_outputs_are_float32():
    pair = collections.namedtuple("pair", "x index")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, batch, *, more):
            self.seen = (batch["pair"].x.dtype, batch["pair"].index.dtype, more[0].dtype, more[1])
            return pair(self.linear(batch["pair"].x) + more[0], [batch["pair"].index])

    amp = init()
    model = amp.prepare(Model())
    output = model({"pair": pair(torch.ones(2, 4), torch.ones(2).long())}, more=[torch.ones(4).double(), None])
    assert model.seen == (torch.bfloat16, torch.int64, torch.bfloat16, None)
    assert output.x.dtype == torch.float32
    assert output.index[0].dtype == torch.int64


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("entry", ["last", nn.Linear], ids=str)
def test_denied_modules_stay_in_float32(level, entry):
    amp = init(level, deny=[entry])
    model = nn.Sequential(collections.OrderedDict(first=nn.Conv1d(4, 4, 1), last=nn.Linear(3, 3)))
    expected = copy.deepcopy(model.last)
    amp.prepare(model)
    assert model.last.weight.dtype == torch.float32
    assert model.first.weight.dtype == torch.bfloat16
    x = torch.randn(2, 3).bfloat16()
    assert torch.equal(model.last(x), expected(x.float()).bfloat16())


def test_allowed_norms_are_lowered():
    amp = init(allow=[nn.LayerNorm])
    model = amp.prepare(Net())
    assert model.layer.weight.dtype == torch.bfloat16
    assert model.batch.weight.dtype == torch.float32


# -- master weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["prepare", "wrap"])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_small_updates_add_up_in_the_masters(dtype, first):
    amp = init(dtype=dtype, loss_scale=1024.0)
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    opt = torch.optim.SGD(model.parameters(), lr=2.0**-14)
    if first == "wrap":
        opt = amp.wrap_optimizer(opt)
    model, opt = amp.prepare(model, opt)
    if first == "prepare":
        opt = amp.wrap_optimizer(opt)
    for _ in range(64):
        with amp.scale_loss(model(torch.ones(1, 1)).sum(), opt) as scaled:
            scaled.backward()
        opt.step()
        opt.zero_grad()
    # 64 steps of 2**-14: each is lost in either dtype, the sum is exact.
    assert model.state_dict()["weight"].item() == 1 - 2.0**-8
    assert model.weight.item() == torch.tensor(1 - 2.0**-8).to(DTYPES[dtype]).item()


def rewrite(model):
    model.weight.data.copy_(torch.full((2, 4), 0.3))


def rewrite_in_place(model):
    with torch.no_grad():
        model.weight.fill_(0.3)


def initialize(model):
    model.apply(lambda module: nn.init.constant_(module.weight, 0.3))


def replace(model):
    model.weight.data = torch.full((2, 4), 0.3, dtype=model.weight.dtype)


def load_low(model):
    model.load_state_dict({"weight": torch.full((2, 4), 0.3, dtype=model.weight.dtype)})


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("write", [rewrite, rewrite_in_place, initialize, replace, load_low])
def test_weights_written_between_prepare_and_the_first_step_count(write, dtype):
    amp = init(dtype=dtype, loss_scale=1024.0)
    model = nn.Linear(4, 2, bias=False)
    model, raw = amp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    opt = amp.wrap_optimizer(raw)
    write(model)
    for _ in range(2):
        with amp.scale_loss(model(torch.full((1, 4), 0.25)).sum(), opt) as scaled:
            scaled.backward()
        opt.step()
        opt.zero_grad()
    start = torch.full((2, 4), 0.3).to(DTYPES[dtype]).float()
    assert torch.equal(model.state_dict()["weight"], start - 0.5 * 0.25 - 0.5 * 0.25)


def test_a_row_written_before_the_first_step_leaves_the_other_masters_exact():
    amp = init()
    model = nn.Linear(4, 2, bias=False)
    exact = model.weight.detach().clone()
    model, raw = amp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    opt = amp.wrap_optimizer(raw)
    model.weight.data[0] = 0.0
    before = model.state_dict()["weight"].clone()
    train_linear(amp, model, opt)
    assert torch.equal(before, torch.stack([torch.zeros(4), exact[1]]))
    assert torch.equal(model.state_dict()["weight"], before - 0.5 * 0.25)


def test_masters_loaded_before_the_first_step_stay_exact():
    amp = init()
    model = nn.Linear(4, 2, bias=False)
    model, raw = amp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    opt = amp.wrap_optimizer(raw)
    exact = torch.randn(2, 4)
    model.load_state_dict({"weight": exact})
    train_linear(amp, model, opt)
    assert torch.equal(model.state_dict()["weight"], exact - 0.5 * 0.25)


def train_linear(amp, model, opt):
    with amp.scale_loss(model(torch.full((1, 4), 0.25)).sum(), opt) as scaled:
        scaled.backward()
    opt.step()


def by_hand(steps):
    """A low-precision layer with masters, written out in plain torch."""
    torch.manual_seed(0)
    plain = nn.Linear(4, 4)
    own = copy.deepcopy(plain).bfloat16()
    opt = torch.optim.Adam(plain.parameters(), lr=0.1)
    for seed in range(steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        own.zero_grad()
        own(x.bfloat16()).float().square().mean().backward()
        for master, copied in zip(plain.parameters(), own.parameters(), strict=True):
            master.grad = copied.grad.float()
        opt.step()
        own.load_state_dict(plain.state_dict())
    return plain.state_dict(), opt.state_dict()


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_training_equals_masters_written_by_hand(options):
    expected, state = by_hand(4)
    amp = init(loss_scale=128.0)
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    model, opt = amp.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1, **options))
    opt = amp.wrap_optimizer(opt)
    for seed in range(4):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        with amp.scale_loss(model(x).square().mean(), opt) as scaled:
            scaled.backward()
        opt.step()
        opt.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(opt.state_dict()["state"], state["state"], rtol=1e-5, atol=1e-6)


def test_groups_keep_options_names_and_state():
    amp = init()
    model = nn.Linear(4, 4)
    groups = [
        {"params": [("w", model.weight)], "lr": 0.5, "weight_decay": 0.1},
        {"params": [("b", model.bias)]},
    ]
    raw = torch.optim.AdamW(groups, lr=0.25, foreach=True)
    model(torch.ones(1, 4)).sum().backward()
    raw.step()
    raw.zero_grad()
    before = copy.deepcopy(raw.state_dict())
    identities = [id(group) for group in raw.param_groups]
    amp.prepare(model, raw)
    assert [id(group) for group in raw.param_groups] == identities
    after = raw.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
    assert all(p.dtype == torch.float32 for group in raw.param_groups for p in group["params"])
    assert set(raw.state) == {p for group in raw.param_groups for p in group["params"]}


def test_tied_parameters_have_one_master_and_frozen_ones_none():
    amp = init()
    model = Net()
    raw = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.prepare(model, raw)
    weights = masters.of(raw)
    assert model.last.weight is model.first.weight
    assert len(weights.pairs) == len({id(own) for own, _ in weights.pairs}) == 4
    assert {id(own) for own in weights.model_parameters()} == {
        id(p) for p in (model.first.weight, model.first.bias, model.last.bias, model.frozen)
    }


def test_a_frozen_parameter_in_the_optimizer_does_not_move():
    amp = init(loss_scale=1.0)
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model, opt = amp.prepare(model, opt)
    before = model.frozen.clone()
    train(amp, model, amp.wrap_optimizer(opt))
    assert torch.equal(model.frozen, before)


def test_parameters_from_elsewhere_stay_in_the_optimizer():
    amp = init(loss_scale=1.0)
    model, other = nn.Linear(4, 4), nn.Parameter(torch.ones(1))
    raw = torch.optim.SGD([*model.parameters(), other], lr=0.1)
    amp.prepare(model, raw)
    assert raw.param_groups[0]["params"][2] is other
    assert other.dtype == torch.float32


def test_one_model_with_two_optimizers():
    amp = init(loss_scale=1.0)
    model = nn.Linear(4, 4)
    raws = [torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)]
    model, raws = amp.prepare(model, raws)
    opts = amp.wrap_optimizer(raws)
    before = values(model)
    with amp.scale_loss(model(torch.ones(1, 4)).sum(), opts) as scaled:
        scaled.backward()
    for opt in opts:
        opt.step()
    torch.testing.assert_close(model.state_dict()["weight"], before["weight"] - 0.1, rtol=0, atol=1e-7)
    torch.testing.assert_close(model.state_dict()["bias"], before["bias"] - 0.1, rtol=0, atol=1e-7)


def test_sparse_gradients_reach_the_masters():
    amp = init(loss_scale=8.0)
    model = nn.Embedding(4, 2, sparse=True)
    model, raw = amp.prepare(model, torch.optim.SparseAdam(model.parameters(), lr=0.5))
    opt = amp.wrap_optimizer(raw)
    before = values(model)["weight"]
    with amp.scale_loss(model(torch.tensor([1, 1])).sum(), opt) as scaled:
        scaled.backward()
    opt.step()
    moved = model.state_dict()["weight"] - before
    torch.testing.assert_close(moved[1], torch.full((2,), -0.5), rtol=1e-4, atol=1e-4)
    assert torch.count_nonzero(moved) == 2


def test_pulling_gradients_twice_is_pulling_once_and_missing_ones_stay_missing():
    amp = init()
    model = nn.Linear(2, 2)
    raw = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.prepare(model, raw)
    weights = masters.of(raw)
    model.weight.grad = torch.full((2, 2), 3.0, dtype=torch.bfloat16)
    for _ in range(2):
        weights.pull_gradients()
        gradients = [master.grad for _, master in weights.pairs]
        assert torch.equal(gradients[0], torch.full((2, 2), 3.0))
        assert gradients[1] is None
    model.weight.grad = None
    weights.pull_gradients()
    assert weights.pairs[0][1].grad is None
    model.weight.grad = torch.ones(2, 2, dtype=torch.bfloat16)
    weights.pull_gradients()
    weights.zero_grad()
    assert not weights.any_gradient()
    assert all(master.grad is None for _, master in weights.pairs)


def test_memory_of_the_masters_gradients_outlives_zero_grad_on_a_cpu():
    amp = init(loss_scale=8.0)
    model = nn.Linear(2, 2)
    model, raw = amp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    opt = amp.wrap_optimizer(raw)
    weights = masters.of(raw)
    places, gradients = [], []
    for factor in (1.0, 2.0, 3.0):
        with amp.scale_loss(factor * model(torch.ones(1, 2)).sum(), opt) as scaled:
            scaled.backward()
        opt.step()
        places.append([master.grad.data_ptr() for _, master in weights.pairs])
        gradients.append([master.grad.tolist() for _, master in weights.pairs])
        opt.zero_grad()
        assert [master.grad for _, master in weights.pairs] == [None, None]
    assert places[0] == places[1] == places[2]
    assert gradients == [[[[factor] * 2] * 2, [factor] * 2] for factor in (1.0, 2.0, 3.0)]


def test_an_overflow_leaves_masters_model_and_state_alone():
    amp = init(dtype="float16")
    model = nn.Linear(4, 4)
    model, raw = amp.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
    opt = amp.wrap_optimizer(raw)
    before, own = values(model), model.weight.clone()
    with amp.scale_loss(model(torch.full((1, 4), 60000.0)).sum(), opt) as scaled:
        scaled.backward()
    opt.step()
    assert not opt.last_step.applied
    assert_same(values(model), before)
    assert torch.equal(model.weight, own)
    assert not raw.state


# -- checkpoints -----------------------------------------------------------------------------------


def trained(**options):
    amp = init(loss_scale=64.0, **options)
    model = Net()
    model, raw = amp.prepare(model, sgd(model, momentum=0.9))
    opt = amp.wrap_optimizer(raw)
    train(amp, model, opt)
    return amp, model, opt


def test_a_checkpoint_loads_in_plain_float32_torch_and_goes_on():
    _, model, opt = trained()
    state, options = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
    assert {value.dtype for value in state.values()} == {torch.float32, torch.int64}
    by_name = dict(zip(["first.weight", "first.bias"], opt.param_groups[0]["params"][:2], strict=True))
    ampx.shutdown()
    plain = Net()
    plain.load_state_dict(state)
    plain_opt = sgd(plain, momentum=0.9)
    plain_opt.load_state_dict(options)
    for name, master in by_name.items():
        assert torch.equal(plain.get_parameter(name), master)
        momentum = plain_opt.state[plain.get_parameter(name)]["momentum_buffer"]
        assert torch.equal(momentum, opt.state[master]["momentum_buffer"])
    plain(torch.randn(8, 4))["y"].square().mean().backward()
    plain_opt.step()


def test_state_holds_what_rounding_loses():
    _, model, _ = trained()
    state = model.state_dict()["first.weight"]
    assert not torch.equal(state, state.bfloat16().float())
    assert torch.equal(state.bfloat16(), model.first.weight)


def test_parts_of_a_model_save_exactly_too():
    _, model, _ = trained()
    whole = model.state_dict()
    assert torch.equal(model.first.state_dict()["weight"], whole["first.weight"])


def test_loading_float32_refreshes_the_masters_exactly():
    _, model, opt = trained()
    wanted = {name: torch.randn_like(v) if v.is_floating_point() else v for name, v in Net().state_dict().items()}
    wanted["last.weight"] = wanted["first.weight"]
    model.load_state_dict(wanted)
    assert torch.equal(opt.param_groups[0]["params"][0], wanted["first.weight"])
    for name in ("first.weight", "first.bias", "batch.weight", "last.bias"):
        assert torch.equal(model.state_dict()[name], wanted[name])


def test_loading_low_precision_refreshes_the_masters():
    _, model, opt = trained()
    model.load_state_dict(Net().bfloat16().state_dict())
    assert torch.equal(opt.param_groups[0]["params"][0], model.first.weight.float())


def test_resuming_continues_bit_identically():
    amp, model, opt = trained()
    state, options = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
    # What the checkpoint cannot hold beyond the masters is rounded: none of it trains.
    train(amp, model, opt, 4)
    amp = init(loss_scale=64.0)
    other = Net()
    other, raw = amp.prepare(other, sgd(other, momentum=0.9))
    other_opt = amp.wrap_optimizer(raw)
    other.load_state_dict(state)
    other_opt.load_state_dict(options)
    train(amp, other, other_opt, 4)
    assert_same(values(model), values(other))


def test_loading_with_assign_is_refused():
    _, model, _ = trained()
    with pytest.raises(RuntimeError, match="assign=True"):
        model.load_state_dict(Net().state_dict(), assign=True)


def test_a_copy_that_averages_weights_saves_its_own():
    _, model, _ = trained()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=lambda averages, models, _: zero(averages))
    average.update_parameters(model)
    average.update_parameters(model)
    assert torch.count_nonzero(average.state_dict()["module.first.weight"]) == 0
    assert torch.count_nonzero(model.state_dict()["first.weight"]) > 0


def zero(tensors):
    for tensor in tensors:
        tensor.zero_()


@pytest.mark.parametrize("copier", ["deepcopy", "pickle"])
def test_model_and_optimizer_are_copied_together(copier):
    amp, model, opt = trained()
    both = (model, opt)
    twin, twin_opt = copy.deepcopy(both) if copier == "deepcopy" else pickle.loads(pickle.dumps(both))
    train(amp, model, opt)
    after = values(model)
    assert torch.count_nonzero(after["first.weight"] - values(twin)["first.weight"]) > 0
    train(amp, twin, twin_opt)
    assert_same(values(twin), after)


# -- calls -----------------------------------------------------------------------------------------


def test_preparing_again_with_another_optimizer_is_refused():
    amp = init()
    model = Net()
    amp.prepare(model, sgd(model))
    with pytest.raises(ampx.ProtocolError, match="list of"):
        amp.prepare(model, sgd(model))


def test_lbfgs_is_refused():
    amp = init()
    model = nn.Linear(2, 2)
    with pytest.raises(ampx.UnsupportedByBackendError, match="LBFGS"):
        amp.prepare(model, torch.optim.LBFGS(model.parameters()))
    assert model.weight.dtype == torch.float32


def test_state_of_an_o3_optimizer_follows_the_parameters():
    amp = init("O3")
    model = nn.Linear(2, 2)
    raw = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    raw.step()
    amp.prepare(model, raw)
    assert raw.state[model.weight]["exp_avg"].dtype == torch.bfloat16
    raw.step()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_o2_trains_on_cuda(dtype):
    amp = ampx.init("torch", dtype=dtype, device="cuda", level="O2")
    model = Net().cuda()
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05, fused=True)
    model, raw = amp.prepare(model, opt)
    opt = amp.wrap_optimizer(raw)
    x, losses = torch.randn(32, 4, device="cuda"), []
    for _ in range(30):
        loss = (model(x)["y"] - x).square().mean()
        losses.append(loss.item())
        with amp.scale_loss(loss, opt) as scaled:
            scaled.backward()
        opt.step()
        opt.zero_grad()
    assert losses[-1] < losses[0] / 2


def test_a_model_inside_ddp_is_refused():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(ampx.UnsupportedByBackendError, match="DistributedDataParallel"):
            init().prepare(model)
        assert model.module.weight.dtype == torch.float32
    finally:
        torch.distributed.destroy_process_group()


def test_recurrent_models_train():
    amp = init(loss_scale=8.0)
    model = nn.LSTM(4, 4)
    model, raw = amp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    opt = amp.wrap_optimizer(raw)
    before = values(model)
    output, (hidden, _) = model(torch.randn(3, 2, 4))
    assert output.dtype == hidden.dtype == torch.float32
    with amp.scale_loss(output.sum(), opt) as scaled:
        scaled.backward()
    opt.step()
    assert opt.last_step.applied
    assert not torch.equal(model.state_dict()["weight_ih_l0"], before["weight_ih_l0"])


def test_gradients_that_were_never_scaled_are_refused_with_masters_too():
    amp = init(loss_scale=8.0)
    model = nn.Linear(2, 2)
    model, raw = amp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    opt = amp.wrap_optimizer(raw)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ampx.NotScaledError):
        opt.step()
