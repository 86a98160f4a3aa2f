"""Trainers that reach behind `apex.amp`: into the optimizer's stash, the loss scale, and with blocks of their own.

Losses are linear in the weights, so that gradients do not depend on rounded weights: results must be those of plain
torch in float32, bit for bit.
"""

import contextlib
import types

import pytest
import torch
from torch import nn

from ampx_torch.apex import amp
from ampx_torch.apex.amp import _amp_state
from ampx_torch.apex.amp.scaler import LossScaler
from ampx_torch.apex.optimizers import FusedAdam

LEVELS = ["O0", "O1", "O2", "O3"]
INFINITE = float("inf")


class Net(nn.Module):
    """A loss that is linear in the weights, and a norm that stays in float32 at O2 and takes no part in it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.layer(x).sum()


def make():
    torch.manual_seed(3)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def start(opt_level, scale=128.0, **options):
    options = {"opt_level": opt_level, "verbosity": 0, "loss_scale": "dynamic", **options}
    model, optimizer = amp.initialize(*make(), **options)
    if options["loss_scale"] == "dynamic":
        _amp_state.loss_scalers[0]._loss_scale = scale
    return model, optimizer


def loss_of(model, value):
    return model(torch.full((2, 4), value))


def train(model, optimizer, values):
    for value in values:
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, value), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


def expected(values, blocks=1):
    model, optimizer = make()
    for value in values:
        optimizer.zero_grad()
        for _ in range(blocks):
            loss_of(model, value).backward()
        optimizer.step()
    return model.state_dict()


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


# -- the stash ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_trainer_that_asks_the_optimizer_finds_that_amp_is_on(opt_level):
    model, optimizer = make()
    assert not hasattr(optimizer, "_amp_stash")
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    assert hasattr(optimizer, "_amp_stash")
    assert not hasattr(amp.initialize(*make(), enabled=False)[1], "_amp_stash")


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_trainer_resumes_as_the_trainers_of_bert_do(opt_level, tmp_path):
    values = [1.0, -2.0, 0.5, 0.25, 3.0, 1.0]
    model, optimizer = start(opt_level)
    train(model, optimizer, values[:3])
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "master params": list(amp.master_params(optimizer)),
        "amp": amp.state_dict(),
    }
    torch.save(saved, tmp_path / "checkpoint.pt")

    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=False)
    model, optimizer = make()
    model.load_state_dict(checkpoint["model"])
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    optimizer.load_state_dict(checkpoint["optimizer"])
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    optimizer.load_state_dict(checkpoint["optimizer"])
    for parameter, master in zip(amp.master_params(optimizer), checkpoint["master params"], strict=True):
        parameter.data.copy_(master.data)
    amp.load_state_dict(checkpoint["amp"])
    train(model, optimizer, values[3:])

    assert same(model.state_dict(), expected(values))
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 6}}


def test_masters_that_a_trainer_writes_count_whatever_the_model_was_loaded_from():
    """The weights of the model are another checkpoint's here, as with `strict=False`."""
    model, optimizer = start("O2")
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    for master in amp.master_params(optimizer):
        master.data.fill_(0.3)
    train(model, optimizer, [0.0])
    assert torch.equal(model.state_dict()["layer.weight"], torch.full((3, 4), 0.3))


def test_the_stash_pairs_the_models_parameters_with_their_masters():
    model, optimizer = start("O2")
    assert not optimizer._amp_stash.lazy_init_called
    assert not hasattr(optimizer._amp_stash, "all_fp16_params")
    optimizer._amp_lazy_init()
    stash = optimizer._amp_stash
    assert stash.lazy_init_called
    assert [id(parameter) for parameter in stash.all_fp16_params] == [
        id(parameter) for parameter in model.layer.parameters()
    ]
    assert [id(parameter) for parameter in stash.all_fp32_from_fp32_params] == [
        id(parameter) for parameter in model.norm.parameters()
    ]
    masters = list(amp.master_params(optimizer))
    assert [id(parameter) for parameter in stash.all_fp32_from_fp16_params] == [id(master) for master in masters[:2]]
    assert [[len(group) for group in groups] for groups in (stash.fp16_groups, stash.fp32_from_fp32_groups)] == [
        [2],
        [2],
    ]
    later = nn.Linear(1, 1, bias=False).half()
    optimizer.add_param_group({"params": list(later.parameters())})
    assert stash.all_fp16_params[-1] is later.weight
    assert stash.all_fp32_from_fp16_params[-1] is optimizer.param_groups[1]["params"][0]


@pytest.mark.parametrize("opt_level", ["O1", "O3"])
def test_without_masters_the_stash_sorts_the_parameters_by_dtype(opt_level):
    model, optimizer = start(opt_level)
    train(model, optimizer, [1.0])
    low, full = optimizer._amp_stash.all_fp16_params, optimizer._amp_stash.all_fp32_params
    assert [len(low), len(full)] == ([4, 0] if opt_level == "O3" else [0, 4])
    assert not hasattr(optimizer._amp_stash, "all_fp32_from_fp16_params")


def test_what_a_trainer_puts_in_the_place_of_the_lazy_start_runs_before_the_first_block():
    """A plugin of a trainer loads its state there."""
    model, optimizer = start("O2")
    calls, original = [], optimizer._lazy_init_maybe_master_weights

    def lazy_init(self):
        original()
        calls.append(self)

    optimizer._lazy_init_maybe_master_weights = types.MethodType(lazy_init, optimizer)
    train(model, optimizer, [1.0, -2.0])
    assert calls == [optimizer]
    assert same(model.state_dict(), expected([1.0, -2.0]))


@pytest.mark.parametrize("delays", [False, True])
def test_the_stash_tells_whether_gradients_are_scaled(delays):
    model, optimizer = start("O1")
    with amp.scale_loss(loss_of(model, 1.0), optimizer, delay_unscale=delays) as scaled_loss:
        scaled_loss.backward()
    assert optimizer._amp_stash.params_have_scaled_gradients is delays
    optimizer.step()
    assert not optimizer._amp_stash.params_have_scaled_gradients


def test_masters_are_pushed_into_the_model_when_asked():
    model, optimizer = start("O2")
    for master in amp.master_params(optimizer):
        master.data.fill_(0.25)
    optimizer._master_params_to_model_params()
    assert model.layer.weight.tolist() == [[0.25] * 4] * 3


# -- blocks of a trainer's own -----------------------------------------------------------------------


@contextlib.contextmanager
def own_scale_loss(loss, optimizer):
    """A trainer's own version of the block; it decides about skipping itself."""
    scaler = _amp_state.loss_scalers[0]
    if not optimizer._amp_stash.params_have_scaled_gradients:
        optimizer._prepare_amp_backward()
    yield loss.float() * scaler.loss_scale()
    scaler.clear_overflow_state()
    optimizer._post_amp_backward(scaler)
    optimizer._amp_stash.params_have_scaled_gradients = False


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("asks", [False, True])
def test_a_block_of_a_trainers_own_trains_as_float32_does(opt_level, asks):
    values = [1.0, INFINITE, -2.0, 0.5]
    model, optimizer = start(opt_level)
    overflows = []
    for value in values:
        optimizer.zero_grad()
        for _ in range(2):
            with own_scale_loss(loss_of(model, value), optimizer) as scaled_loss:
                scaled_loss.backward()
        if asks:
            overflows.append(_amp_state.loss_scalers[0].update_scale())
        optimizer.step()
    wanted = expected([1.0, -2.0, 0.5], blocks=2)
    if opt_level == "O3":  # weights are rounded in every step
        pairs = zip(model.state_dict().values(), wanted.values(), strict=True)
        assert all(torch.allclose(item.float(), other.float(), atol=1e-2) for item, other in pairs)
    else:
        assert same(model.state_dict(), wanted)
    assert overflows == ([False, True, False, False] if asks else [])
    assert _amp_state.loss_scalers[0].loss_scale() == 64.0


def test_gradients_that_a_trainer_writes_are_tested_by_the_step():
    """As after averaging by hand, or a division by zero."""
    model, optimizer = start("O2")
    with amp.scale_loss(loss_of(model, 1.0), optimizer) as scaled_loss:
        scaled_loss.backward()
    next(amp.master_params(optimizer)).grad[0, 0] = INFINITE
    before = model.state_dict()
    optimizer.step()
    assert not optimizer.last_step.applied
    assert same(model.state_dict(), before)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 64.0, "unskipped": 0}}
    optimizer.zero_grad()
    train(model, optimizer, [1.0])
    assert optimizer.last_step.applied
    assert same(model.state_dict(), expected([1.0]))


def test_finite_gradients_of_two_blocks_whose_sum_is_infinite_are_not_applied():
    model, optimizer = start("O0", scale=1.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        with amp.scale_loss(loss_of(model, 1.0) * 1.5e38, optimizer) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    assert not optimizer.last_step.applied
    assert same(model.state_dict(), before)


def test_a_quotient_beyond_float32_is_not_applied():
    """The scaled gradient is finite, the true one is not."""
    model, optimizer = start("O0", scale=2.0**-10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with amp.scale_loss(model.layer.bias.sum() * 1.5e38, optimizer) as scaled_loss:
        (scaled_loss * 2.0**10).backward()
    optimizer.step()
    assert not optimizer.last_step.applied
    assert same(model.state_dict(), before)


@pytest.mark.parametrize("delays", [False, True])
def test_a_delayed_overflow_whose_gradients_were_cleared_skips_no_later_step(delays):
    model, optimizer = start("O2")
    for value in (INFINITE, 1.0):
        with amp.scale_loss(loss_of(model, value), optimizer, delay_overflow_check=delays) as scaled_loss:
            scaled_loss.backward()
        if value == INFINITE:
            for parameter in [*model.parameters(), *amp.master_params(optimizer)]:
                parameter.grad = None
    optimizer.step()
    assert optimizer.last_step.applied
    assert same(model.state_dict(), expected([1.0]))
    assert _amp_state.loss_scalers[0].loss_scale() == 64.0


def test_a_delayed_block_of_two_optimizers_moves_their_scale_once():
    models = [nn.Linear(4, 1, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    amp.initialize(models, optimizers, verbosity=0)
    loss = sum(model(torch.ones(1, 4)).sum() for model in models) * INFINITE
    with amp.scale_loss(loss, optimizers, delay_overflow_check=True) as scaled_loss:
        scaled_loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert [optimizer.last_step.applied for optimizer in optimizers] == [False, False]
    assert _amp_state.loss_scalers[0].loss_scale() == 2.0**15


def test_a_delayed_overflow_of_one_optimizer_skips_no_step_of_another():
    models = [Net() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    amp.initialize(models, optimizers, verbosity=0, loss_scale="dynamic")
    _amp_state.loss_scalers[0]._loss_scale = 128.0
    for model, optimizer, value in zip(models, optimizers, (INFINITE, 1.0), strict=True):
        with amp.scale_loss(loss_of(model, value), optimizer, delay_overflow_check=True) as scaled_loss:
            scaled_loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert [optimizer.last_step.applied for optimizer in optimizers] == [False, True]
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 64.0, "unskipped": 1}}


@pytest.mark.parametrize("options", [{}, {"loss_scale": 4.0}])
def test_without_optimizers_a_loss_is_scaled_and_nothing_is_made_true(options):
    """Attacks take gradients of inputs so; the parameters' own gradients are dropped before the real backward."""
    model, optimizer = start("O1", **options)
    before, scale = amp.state_dict(), _amp_state.loss_scalers[0].loss_scale()
    x = torch.ones(2, 4, requires_grad=True)
    with amp.scale_loss(x.sum() * 3, []) as scaled_loss:
        scaled_loss.backward()
    assert x.grad.tolist() == [[3 * scale] * 4] * 2
    assert amp.state_dict() == before
    train(model, optimizer, [1.0, 2.0])
    assert same(model.state_dict(), expected([1.0, 2.0]))
    with pytest.raises(IndexError, match="num_losses=1"), amp.scale_loss(x.sum(), [], loss_id=1):
        pass


def test_a_model_without_optimizers_scales_its_losses():
    model = amp.initialize(make()[0], opt_level="O2", loss_scale=128.0, verbosity=0)
    with amp.scale_loss(loss_of(model, 1.0), []) as scaled_loss:
        scaled_loss.backward()
    assert model.layer.weight.grad[0, 0].item() == 2 * 128.0


# -- the loss scale ----------------------------------------------------------------------------------


def test_a_loss_scale_moves_by_the_overflows_that_its_buffer_tells():
    """The oracle is apex's rule: half on overflow, double after so many without."""
    scaler = LossScaler("dynamic", init_scale=64.0, scale_window=3, min_loss_scale=8.0, max_loss_scale=64.0)
    scale, unskipped, trace = 64.0, 0, []
    for overflowed in (False, True, True, True, True, False, False, False, False):
        scaler.clear_overflow_state()
        scaler._overflow_buf = torch.tensor([int(overflowed)], dtype=torch.int)
        assert scaler.update_scale() is overflowed
        assert scaler._has_overflow is overflowed
        if overflowed:
            scale, unskipped = max(scale / 2, 8.0), 0
        else:
            unskipped += 1
        if unskipped == 3:
            scale, unskipped = min(scale * 2, 64.0), 0
        trace.append(((scaler.loss_scale(), scaler._unskipped), (scale, unskipped)))
    assert all(actual == wanted for actual, wanted in trace)
    assert scaler.loss_scale() == 16.0


def test_a_loss_scale_unscales_and_notes_what_is_not_finite():
    scaler = LossScaler(4.0)
    source, target = torch.tensor([8.0, 2.0]).half(), torch.empty(2)
    scaler.unscale([source], [target], None, models_are_masters=False)
    assert target.tolist() == [2.0, 0.5]
    scaler.unscale_with_stashed([source], [target], [target])
    assert target.tolist() == [4.0, 1.0]
    scaler.unscale([source], [target], None, scale_override=2.0)
    assert target.tolist() == [4.0, 1.0]
    assert not scaler.update_scale()
    scaler.unscale([torch.tensor([INFINITE, 1.0])], [target])
    assert scaler._overflow_buf.item() == 1
    assert scaler.update_scale()
    assert scaler.loss_scale() == 4.0  # static


def test_numbers_of_a_loss_scale_can_be_set():
    model, optimizer = start("O1")
    scaler = _amp_state.loss_scalers[0]
    scaler._loss_scale, scaler._scale_seq_len = 2**10, 2
    train(model, optimizer, [1.0, 1.0])
    assert scaler.loss_scale() == 2.0**11
    scaler._max_loss_scale = 2.0**11
    train(model, optimizer, [1.0, 1.0])
    assert scaler.loss_scale() == 2.0**11
    scaler._min_loss_scale = 2.0**10
    train(model, optimizer, [INFINITE, INFINITE])
    assert (scaler.loss_scale(), scaler._min_loss_scale, scaler._max_loss_scale) == (2.0**10, 2.0**10, 2.0**11)


@pytest.mark.parametrize("delays", [False, True])
def test_a_loss_scale_tells_whether_the_last_block_overflowed(delays):
    model, optimizer = start("O1")
    scaler = _amp_state.loss_scalers[0]
    for value in (INFINITE, 1.0):
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, value), optimizer, delay_overflow_check=delays) as scaled_loss:
            scaled_loss.backward()
        assert bool(scaler._overflow_buf.item()) is (value == INFINITE)
        if not delays:
            assert scaler._has_overflow is (value == INFINITE)


def test_the_optimizers_of_apex_have_the_same_private_names():
    model = nn.Linear(4, 1)
    _, optimizer = amp.initialize(model, FusedAdam(model.parameters()), opt_level="O2", verbosity=0)
    assert isinstance(optimizer, FusedAdam)
    optimizer._amp_lazy_init()
    assert len(optimizer._amp_stash.all_fp16_params) == 2
