"""Optimizers that nobody wrapped: their mistakes are said, and those of a float32 model are left alone."""

import gc
import sys

import pytest
import torch
from torch import nn

import ampx


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))


def loss_of(*models):
    torch.manual_seed(1)
    inputs, targets = torch.randn(64, 32), torch.randn(64, 1)
    return nn.functional.mse_loss(sum(model(inputs) for model in models), targets)


@pytest.fixture
def init(recwarn):
    """Start a session, and take away the warning of a CPU that emulates its dtype."""

    def start(**options):
        amp = ampx.init("torch", **options)
        recwarn.clear()
        return amp

    return start


@pytest.fixture
def float16(init):
    return init(dtype="float16")


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def messages(recwarn):
    return [str(warning.message) for warning in recwarn.list]


def test_a_step_does_not_look_at_the_gradients_of_an_optimizer_that_is_not_wrapped(float16, recwarn, backward):
    """Whether they were computed in float16 without a loss scale only a run that is looked at may guess."""
    models = network(), network()
    opt, raw = ampx.wrap_optimizer(sgd(models[0])), sgd(models[1])
    for _ in range(3):
        backward(loss_of(models[0]), opt)
        opt.step()
        opt.zero_grad()
        loss_of(models[1]).backward()
        raw.step()
        raw.zero_grad()
    assert messages(recwarn) == []


@pytest.mark.parametrize("order", ["first", "last", "accumulated"])
@pytest.mark.parametrize("process_wide", [True, False])
def test_an_optimizer_that_is_forgotten_in_a_scaled_loss_is_refused(init, backward, order, process_wide):
    amp = init(dtype="float16", process_wide=process_wide)
    models = network(), network()
    opt, raw = ampx.wrap_optimizer(sgd(models[0])), sgd(models[1])
    before = [p.detach().clone() for p in models[1].parameters()]
    for _ in range(4 if order == "accumulated" else 1):
        with amp.autocast():
            loss = loss_of(*models)
        backward(loss, opt)
    if order != "first":
        opt.step()
    with pytest.raises(ampx.RawStepError, match=r"SGD, which wrap_optimizer was never given.*\[opt, other\]"):
        raw.step()
    assert all(torch.equal(*pair) for pair in zip(models[1].parameters(), before, strict=True))


@pytest.mark.parametrize("every", [1, 5])
def test_one_that_joins_later_is_refused_at_its_second_step(float16, backward, every):
    models = network(), network()
    opt, raw = (torch.optim.SGD(model.parameters(), lr=1e-12) for model in models)
    opt = ampx.wrap_optimizer(opt, loss_scale=64.0)  # which nothing overflows at
    for _ in range(5):
        backward(loss_of(models[0]), opt)
        opt.step()
        opt.zero_grad()
    for refused in (False, True):
        for _ in range(every):
            backward(loss_of(*models), opt)
            opt.step()
            opt.zero_grad()
        if refused:
            with pytest.raises(ampx.RawStepError):
                raw.step()
        else:
            raw.step()
        raw.zero_grad()


class Holding(torch.optim.Optimizer):
    """Leaves its step to an optimizer of its own, as Lookahead and SAM do."""

    def __init__(self, model):
        super().__init__(model.parameters(), {})
        self.inner = sgd(model)

    def step(self, closure=None):
        self.inner.step()


def train_with_an_optimizer_inside(model):
    for scale in (1.0, "dynamic"):
        opt = ampx.wrap_optimizer(Holding(model), loss_scale=scale)
        for _ in range(3):
            with ampx.scale_loss(loss_of(model), opt) as scaled:
                scaled.backward()
            opt.step()
            opt.zero_grad()


def train_on_gradients_of_inference_mode(model):
    with torch.inference_mode():
        gradients = [torch.ones_like(parameter) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    sgd(model).step()


def train_in_float32(model):
    raw = sgd(model)
    for _ in range(3):
        with ampx.autocast(enabled=False):
            loss_of(model).backward()
        raw.step()
        raw.zero_grad()


def train_with_a_scaler(model):
    raw, scaler = sgd(model), torch.amp.GradScaler("cpu")
    for _ in range(3):
        scaler.scale(loss_of(model)).backward()
        scaler.step(raw)
        scaler.update()
        raw.zero_grad()


def train_after_clearing(model):
    """As a discriminator that the generator's loss goes through, and that computes in float32."""
    other = network()
    opt, raw = ampx.wrap_optimizer(sgd(other)), sgd(model)
    for _ in range(3):
        with ampx.autocast(enabled=False):
            with ampx.scale_loss(loss_of(other, model), opt) as scaled:
                scaled.backward()
            opt.step()
            raw.zero_grad()
            loss_of(model).backward()
            raw.step()
            opt.zero_grad()


@pytest.mark.parametrize(
    "train",
    [
        train_in_float32,
        train_with_a_scaler,
        train_after_clearing,
        train_with_an_optimizer_inside,
        train_on_gradients_of_inference_mode,
    ],
)
def test_legitimate_steps_of_a_raw_optimizer_are_left_alone(float16, recwarn, train):
    model = network()
    before = model[0].weight.detach().clone()
    train(model)
    assert not torch.equal(model[0].weight, before)
    assert messages(recwarn) == []


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"dtype": "float16", "loss_scale": 1.0}])
def test_where_losses_are_not_scaled_a_raw_optimizer_is_right(init, recwarn, options):
    init(**options)
    model = network()
    loss_of(model).backward()
    sgd(model).step()
    assert messages(recwarn) == []


def test_nothing_looks_at_steps_after_shutdown(float16):
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    opt = ampx.wrap_optimizer(sgd(network()))
    assert len(hooks) == 1
    ampx.shutdown()
    assert not hooks
    assert opt.loss_scale == 2.0**16


def test_a_fused_step_folds_although_the_process_has_our_hook(float16, backward):
    model = nn.Linear(512, 512)
    opt = ampx.wrap_optimizer(sgd(model, fused=True), loss_scale=64.0, max_grad_norm=1.0)
    seen = []
    run = opt.optimizer.step
    backward(model(torch.randn(2, 512)).square().mean(), opt)
    opt.optimizer.__dict__["step"] = lambda: seen.append(vars(opt.optimizer).get("grad_scale")) or run()
    opt.optimizer.step._wrapped_by_lr_sched = True
    opt.step()
    assert seen[0] is not None


def test_master_weights_without_a_wrapper_are_refused(init):
    init(dtype="float16", level="O2")
    model = network()
    model, raw = ampx.prepare(model, sgd(model))
    loss_of(model).backward()
    with pytest.raises(ampx.RawStepError, match="after prepare"):
        raw.step()
    model.zero_grad()
    opt = ampx.wrap_optimizer(raw)
    with ampx.scale_loss(loss_of(model), opt) as scaled:
        scaled.backward()
    opt.step()
    assert opt.last_step.applied


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision_parameters_without_the_copies_of_o2_are_warned_of_once(init, dtype, recwarn):
    init(dtype=dtype, level="O2")
    recwarn.clear()
    model = ampx.prepare(network())
    raw = sgd(model)
    for _ in range(3):
        loss_of(model).backward()
        raw.step()
        raw.zero_grad()
    (message,) = messages(recwarn)
    assert "4 low-precision parameters" in message
    assert "ampx.prepare(model, opt)" in message
    assert recwarn.list[0].filename == __file__


def test_steps_are_looked_at_no_longer_than_such_parameters_live(init):
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    init(dtype="bfloat16", level="O2")
    model = ampx.prepare(network())
    assert len(hooks) == 1
    del model
    gc.collect()
    assert not hooks


@pytest.mark.parametrize("how", ["O3", "frozen", "with its optimizer"])
def test_low_precision_parameters_that_may_be_so_are_left_alone(init, how, recwarn):
    init(dtype="bfloat16", level="O3" if how == "O3" else "O2")
    model, head = network(), nn.Linear(1, 1)
    if how == "with its optimizer":
        model, opt = ampx.prepare(model, ampx.wrap_optimizer(sgd(model)))
        with ampx.scale_loss(loss_of(model), opt) as scaled:
            scaled.backward()
        opt.step()
    else:
        model = ampx.prepare(model).requires_grad_(how == "O3")
    raw = sgd(model if how == "O3" else head)
    head(loss_of(model).reshape(1, 1)).sum().backward()
    raw.step()
    assert messages(recwarn) == []
