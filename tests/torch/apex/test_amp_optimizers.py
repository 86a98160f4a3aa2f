"""The optimizer after `initialize` is the script's own object, and does all that scripts do with optimizers."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import ampx
from ampx.errors import UnsupportedByBackendError
from ampx_torch.apex import amp

LEVELS = ["O0", "O1", "O2", "O3"]


def make(lr=0.5, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    return model, torch.optim.SGD(model.parameters(), lr=lr, **options)


def train_step(model, optimizer, value=1.0):
    optimizer.zero_grad()
    loss = model(torch.full((1, 4), value)).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


# A gradient of a power of two times this scale is exact in float16 and does not overflow.
SCALE = 128.0


def weight(model):
    return model.state_dict()["weight"][0, 0].item()


@pytest.mark.parametrize("opt_level", LEVELS)
def test_it_is_the_same_object_of_the_same_class(opt_level):
    model, optimizer = make()
    elsewhere = {"optimizer": optimizer}
    amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=SCALE, verbosity=0)
    assert isinstance(optimizer, torch.optim.SGD)
    assert not isinstance(optimizer, torch.optim.Adam)
    assert optimizer.__class__ is torch.optim.SGD
    assert repr(optimizer).startswith("SGD (")
    train_step(model, elsewhere["optimizer"])
    assert weight(model) == 0.5


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_schedulers_work_made_before_or_after(opt_level, when):
    model, optimizer = make()

    def halving():
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)

    scheduler = halving() if when == "before" else None
    amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=SCALE, verbosity=0)
    scheduler = scheduler or halving()
    for _ in range(3):
        train_step(model, optimizer)
        scheduler.step()
    assert weight(model) == 1 - 0.5 - 0.25 - 0.125
    assert scheduler.get_last_lr() == [0.5 * 0.125]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_scheduler_does_not_complain_when_the_first_step_is_skipped(when):
    """Warnings are errors in these tests."""
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1) if when == "before" else None
    amp.initialize(model, optimizer, verbosity=0)
    scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train_step(model, optimizer, float("inf"))
    assert not optimizer.last_step.applied
    scheduler.step()


def test_other_schedulers_that_look_at_the_optimizer_work():
    model, optimizer = make(momentum=0.9)
    amp.initialize(model, optimizer, loss_scale=SCALE, verbosity=0)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    train_step(model, optimizer)
    cycle.step()
    plateau.step(1.0)
    plateau.step(2.0)
    assert optimizer.param_groups[0]["lr"] < 0.1
    optimizer.param_groups[0]["lr"] = 0.25
    before = weight(model)
    optimizer.param_groups[0]["momentum"] = 0.0
    train_step(model, optimizer)
    assert weight(model) == before - 0.25


class Counting(torch.optim.SGD):
    """An optimizer of a script's own, with an attribute that shares a name with the wrapper's."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.count = 0
        self.gradients = "mine"

    def bump(self):
        self.count += 1

    def step(self, closure=None):
        self.bump()
        return super().step(closure)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_an_optimizer_of_a_scripts_own_keeps_its_attributes_and_methods(opt_level):
    model, _ = make()
    optimizer = Counting(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=SCALE, verbosity=0)
    train_step(model, optimizer)
    optimizer.bump()
    assert optimizer.count == 2
    optimizer.count = 7
    train_step(model, optimizer)
    assert optimizer.count == 8
    assert weight(model) == 0.0


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_other_optimizers_step_as_in_float32(kind, opt_level):
    model, _ = make()
    exact = copy.deepcopy(model)
    optimizer, plain = kind(model.parameters(), lr=0.125), kind(exact.parameters(), lr=0.125)
    amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=SCALE, verbosity=0)
    for value in (1.0, -2.0, 0.5):
        train_step(model, optimizer, value)
        plain.zero_grad()
        exact(torch.full((1, 4), value)).sum().backward()
        plain.step()
        assert weight(model) == weight(exact)


class Multiplying(torch.optim.SGD):
    """An optimizer that multiplies matrices."""

    def step(self, closure=None):
        weight = self.param_groups[0]["params"][0]
        self.dtype = (weight.detach() @ weight.detach().T).dtype
        return super().step(closure)


def test_a_step_computes_in_float32():
    model, _ = make()
    optimizer = Multiplying(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, loss_scale=SCALE, verbosity=0)
    assert model(torch.ones(1, 4)).dtype == torch.float16
    train_step(model, optimizer)
    assert optimizer.dtype == torch.float32


def test_hooks_of_a_step_run_only_when_it_is_applied():
    model, optimizer = make()
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    amp.initialize(model, optimizer, verbosity=0, loss_scale=SCALE)
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train_step(model, optimizer)
    assert seen == ["before", "after"]
    train_step(model, optimizer, float("inf"))
    assert seen == ["before", "after"]


class Slotted(torch.optim.SGD):
    __slots__ = ("more",)


def test_an_optimizer_that_cannot_be_taken_over_leaves_the_others_as_they_were():
    model, optimizer = make()
    slotted = Slotted(nn.Linear(1, 1).parameters(), lr=0.5)
    with pytest.raises(UnsupportedByBackendError, match=r"Slotted.*__slots__"):
        amp.initialize(model, [optimizer, slotted], opt_level="O2", verbosity=0)
    assert (type(optimizer), type(slotted)) == (torch.optim.SGD, Slotted)
    assert model.weight.dtype == torch.float32
    model(torch.ones(1, 4)).float().sum().backward()
    optimizer.step()
    assert weight(model) == 0.5


def test_copies_and_pickles_are_plain_optimizers():
    model, optimizer = make(momentum=0.5)
    amp.initialize(model, optimizer, loss_scale=SCALE, verbosity=0)
    train_step(model, optimizer)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(twin) is torch.optim.SGD
        assert len(twin.state) == 1
        with pytest.raises(ampx.errors.NotWrappedError):
            train_step(model, twin)


def test_an_optimizer_is_freed_without_the_garbage_collector():
    model, optimizer = make()
    amp.initialize(model, optimizer, loss_scale=SCALE, verbosity=0)
    train_step(model, optimizer)
    gone = weakref.ref(optimizer)
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()


# -- parameter groups --------------------------------------------------------------------------------


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("how", ["optimizer", "model"])
@pytest.mark.parametrize("zero_first", [True, False])
@pytest.mark.parametrize("blocks", [1, 2])
def test_a_group_added_later_is_trained(opt_level, how, zero_first, blocks):
    """The same program in float32 is the oracle: two models, the second joins after the first step."""

    def program(scaled):
        torch.manual_seed(0)
        models = [nn.Linear(4, 1, bias=False) for _ in range(2)]
        for own in models:
            nn.init.constant_(own.weight, 1.0)
        optimizer = torch.optim.SGD(models[0].parameters(), lr=0.25, momentum=0.125)
        if scaled:
            amp.initialize(models, optimizer, opt_level=opt_level, loss_scale=SCALE, verbosity=0)

        def clear():
            for model in [optimizer] if how == "optimizer" else models:
                model.zero_grad()

        def run(used):
            for _ in range(blocks):
                loss = sum(model(torch.full((1, 4), 2.0)).sum() for model in used)
                if not scaled:
                    loss.backward()
                    continue
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            optimizer.step()

        clear()
        run(models[:1])
        if zero_first:
            clear()
        optimizer.add_param_group({"params": models[1].parameters(), "lr": 0.5})
        if not zero_first:
            clear()
        run(models)
        clear()
        run(models)
        return [model.state_dict()["weight"].tolist() for model in models]

    assert program(True) == program(False)


def test_masters_of_a_group_added_later_are_saved_and_loaded():
    torch.manual_seed(0)
    models = [nn.Linear(4, 1, bias=False) for _ in range(2)]
    optimizer = torch.optim.SGD(models[0].parameters(), lr=2.0**-12)
    amp.initialize(models, optimizer, opt_level="O2", loss_scale=SCALE, verbosity=0)
    optimizer.add_param_group({"params": models[1].parameters()})
    before = models[1].state_dict()["weight"].clone()
    train_step(models[1], optimizer)
    saved = models[1].state_dict()["weight"]
    assert torch.equal(saved, before - 2.0**-12)
    models[1].load_state_dict({"weight": before})
    train_step(models[1], optimizer)
    assert torch.equal(models[1].state_dict()["weight"], before - 2.0**-12)


# -- master weights ----------------------------------------------------------------------------------


def test_master_weights_keep_updates_that_low_precision_would_lose():
    model, optimizer = make(lr=2.0**-14)
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=SCALE, verbosity=0)
    for _ in range(8):
        train_step(model, optimizer)
    (master,) = amp.master_params(optimizer)
    assert master.dtype == torch.float32
    assert master[0, 0].item() == weight(model) == 1 - 8 * 2.0**-14
    assert model.weight[0, 0].item() == 1 - 2.0**-11
    model, optimizer = make(lr=2.0**-14)
    amp.initialize(model, optimizer, opt_level="O3", loss_scale=SCALE, verbosity=0)
    for _ in range(8):
        train_step(model, optimizer)
    assert weight(model) == 1.0


def test_master_weights_start_from_the_weights_before_rounding():
    model, optimizer = make()
    exact = 1 + 2.0**-20
    nn.init.constant_(model.weight, exact)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert model.weight[0, 0].item() == 1.0
    assert weight(model) == next(amp.master_params(optimizer))[0, 0].item() == exact


@pytest.mark.parametrize("when", ["written", "lazily", "zeroed", "added"])
def test_weights_written_between_initialize_and_the_first_block_count(when):
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=SCALE, verbosity=0)
    model.apply(lambda module: nn.init.constant_(module.weight, 0.3))
    if when == "lazily":
        optimizer._lazy_init_maybe_master_weights()
    elif when == "zeroed":
        optimizer.zero_grad()
    elif when == "added":
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1).half())]})
    start = torch.tensor(0.3).half().float()
    train_step(model, optimizer)
    assert model.state_dict()["weight"].tolist() == [[(start - 0.5).item()] * 4]


def test_the_models_own_gradients_stay_scaled_at_o2():
    """As apex documents it; the masters' are true."""
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=SCALE, verbosity=0)
    with amp.scale_loss(model(torch.ones(1, 4)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert model.weight.grad.tolist() == [[SCALE] * 4]
    (master,) = amp.master_params(optimizer)
    assert master.grad.tolist() == [[1.0] * 4]


@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_optimizer_with_a_history_goes_on(opt_level, when):
    """A checkpoint of the optimizer, loaded before or after `initialize`."""
    exact, plain = make(momentum=0.5)
    exact(torch.ones(1, 4)).sum().backward()
    plain.step()
    saved = copy.deepcopy({"model": exact.state_dict(), "optimizer": plain.state_dict()})
    model, optimizer = make(momentum=0.5)
    if when == "before":
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=SCALE, verbosity=0)
    if when == "after":
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    train_step(model, optimizer)
    plain.zero_grad()
    exact(torch.ones(1, 4)).sum().backward()
    plain.step()
    assert weight(model) == weight(exact)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_checkpoint_of_the_model_is_float32_and_loads_in_the_model_as_it_was(opt_level):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_buffer("table", torch.ones(2))
    amp.initialize(model, opt_level=opt_level, verbosity=0)
    floating = [value for value in model.state_dict().values() if value.is_floating_point()]
    assert {item.dtype for item in floating} == {torch.float32}
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    plain.register_buffer("table", torch.zeros(2))
    plain.load_state_dict(model.state_dict())


def test_with_a_scale_below_1_the_true_gradient_decides_whether_a_step_is_skipped():
    model = torch.nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O0", loss_scale=2.0**-10, verbosity=0)
    with amp.scale_loss(model(torch.full((10, 2), 3e38)).sum(), optimizer) as scaled:  # ten times beyond float32
        scaled.backward()
    optimizer.step()
    assert torch.equal(model.weight, before)
