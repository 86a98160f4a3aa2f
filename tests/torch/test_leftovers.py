"""Gradients that were there before a scaled backward: they add up as in plain PyTorch, or are refused."""

import copy
import threading

import pytest
import torch
from torch import nn

import ampx

GROWS = ampx.LossScale(init_scale=4.0, growth_interval=2)  # 4 4 8 8 16 ...: the scale moves while gradients stay


def pair_of_models(make=lambda: nn.Linear(3, 2)):
    torch.manual_seed(1)
    model = make()
    return model, copy.deepcopy(model)


def batches(number):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(number, 4, 3, generator=generator)


def loss_of(model, batch):
    return model(batch).square().sum()


OPTIMIZERS = {
    "sgd": (lambda ps: torch.optim.SGD(ps, 0.01), {}),
    "momentum": (lambda ps: torch.optim.SGD(ps, 0.01, momentum=0.5), {}),
    "adamw": (lambda ps: torch.optim.AdamW(ps, 0.01), {}),
    "fused": (lambda ps: torch.optim.AdamW(ps, 0.01, fused=True), {"device_scale": False}),
    "fused on the device": (lambda ps: torch.optim.AdamW(ps, 0.01, fused=True), {"device_scale": True}),
    "clipped": (lambda ps: torch.optim.SGD(ps, 0.01), {"max_grad_norm": 0.5}),
}


def no_clearing(model, opt):
    pass


CLEARING = {
    "never": no_clearing,
    "some": lambda model, opt: setattr(model.weight, "grad", None),
    "zeros": lambda model, opt: opt.zero_grad(set_to_none=False),
    "zeros by the model": lambda model, opt: model.zero_grad(set_to_none=False),
    "zeros by hand": lambda model, opt: [p.grad.data.zero_() for p in model.parameters()],
    "half": lambda model, opt: [p.grad.mul_(0.5) for p in model.parameters()],
    "others by hand": lambda model, opt: [setattr(p, "grad", torch.ones_like(p)) for p in model.parameters()],
}


@pytest.mark.parametrize("clear", CLEARING)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_left_from_the_last_step_adds_up_as_in_plain_torch(name, clear, amp, backward):
    model, plain = pair_of_models()
    make, options = OPTIMIZERS[name]
    opt = ampx.wrap_optimizer(make(model.parameters()), loss_scale=GROWS, **options)
    twin = make(plain.parameters())
    for batch in batches(7):
        backward(loss_of(model, batch), opt)
        opt.step()
        CLEARING[clear](model, opt)
        loss_of(plain, batch).backward()
        if name == "clipped":
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        twin.step()
        CLEARING[clear](plain, twin)
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own, other)
    assert opt.loss_scale == 32.0


@pytest.mark.parametrize("clear", ["never", "some"])
def test_with_masters_what_is_left_in_the_model_adds_up(clear, backward):
    with ampx.init("torch", dtype="bfloat16", level="O2", device="cpu", process_wide=False) as amp:
        model, plain = pair_of_models()
        model, raw = amp.prepare(model, torch.optim.SGD(model.parameters(), 0.5))
        opt = amp.wrap_optimizer(raw, loss_scale=GROWS)
        masters = [own.detach().clone() for own in plain.parameters()]
        left = [torch.zeros_like(own) for own in masters]
        for step in range(6):
            # The loss is linear, with a gradient that is exact in bfloat16.
            backward(sum((own.float() * 2.0**-step).sum() for own in model.parameters()), opt)
            opt.step()
            if clear == "some":
                model.weight.grad = None
            for place, (master, gradient) in enumerate(zip(masters, left, strict=True)):
                gradient += 2.0**-step
                master -= 0.5 * gradient
                if clear == "some" and place == 0:
                    gradient.zero_()
        assert opt.loss_scale == 32.0
        for (own, master), expected in zip(opt.masters.pairs, masters, strict=True):
            torch.testing.assert_close(master, expected)
            assert torch.equal(own, master.to(own.dtype))


@pytest.mark.parametrize(
    "clear",
    [
        lambda opt, weight: opt.optimizer.zero_grad(),
        lambda opt, weight: opt.zero_grad(set_to_none=False),
        lambda opt, weight: weight.grad.zero_(),
        lambda opt, weight: weight.grad.data.zero_(),
        lambda opt, weight: setattr(weight, "grad", torch.zeros(2)),
    ],
)
@pytest.mark.parametrize("scale", [1.0, "dynamic"])
def test_after_a_skipped_step_every_way_to_clear_counts(clear, scale, amp, backward):
    weight = nn.Parameter(torch.ones(2))
    opt = ampx.wrap_optimizer(torch.optim.SGD([weight], 1.0), loss_scale=scale)
    backward((weight * torch.inf).sum(), opt)
    opt.step()
    clear(opt, weight)
    backward(weight.sum(), opt)
    opt.step()
    assert opt.last_step.applied
    assert weight.tolist() == [0.0, 0.0]


# -- losses of other optimizers ------------------------------------------------------------------------


@pytest.fixture
def both(amp):
    """Two optimizers with loss scales of their own, and a loss that reaches the parameters of both."""
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    opts = [
        ampx.wrap_optimizer(torch.optim.SGD([parameter], 1.0), loss_scale=scale)
        for parameter, scale in ((first, 2.0**16), (second, 4.0))
    ]
    return first, second, *opts


def test_what_anothers_loss_adds_to_true_gradients_is_refused(both, backward):
    first, second, opt, other = both
    backward(2 * second.sum(), other)
    ampx.unscale(other)
    backward((first + second).sum(), opt)
    with pytest.raises(ampx.ProtocolError, match="other optimizers"):
        other.step()
    other.zero_grad()
    backward(2 * second.sum(), other)
    other.step()  # true gradients are left
    backward((first + second).sum(), opt)
    with pytest.raises(ampx.ProtocolError, match="other optimizers"):
        backward(second.sum(), other)
    assert second.tolist() == [-2.0] * 2


@pytest.mark.parametrize("by", ["an exception", "another's loss"])
def test_what_is_left_scaled_is_refused_to_the_raw_optimizer(by, both, backward):
    first, second, opt, other = both

    def fails():
        with ampx.scale_loss(second.sum(), other) as scaled:
            scaled.backward()
            raise KeyError("mine")

    if by == "an exception":
        with pytest.raises(KeyError):
            fails()
    else:
        backward((first + second).sum(), opt)
    with pytest.raises(ampx.RawStepError, match="left"):
        other.optimizer.step()
    assert second.tolist() == [0.0] * 2
    other.optimizer.zero_grad()
    second.sum().backward()
    other.optimizer.step()
    assert second.tolist() == [-1.0] * 2


def test_gradients_that_only_another_loss_made_join_a_pending_step(amp, backward):
    shared, own, third = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    opt = ampx.wrap_optimizer(torch.optim.SGD([own, shared], 1.0), loss_scale=4.0)
    other = ampx.wrap_optimizer(torch.optim.SGD([third], 1.0), loss_scale=64.0)
    backward(own.sum(), opt)
    backward((third + shared).sum(), other)
    opt.step()
    assert (own.tolist(), shared.tolist()) == ([-1.0] * 2, [-1.0] * 2)


def test_equal_scales_add_up_whoever_they_belong_to(amp, backward):
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    opt, other = (
        ampx.wrap_optimizer(torch.optim.SGD([parameter], 1.0), loss_scale=8.0) for parameter in (first, second)
    )
    backward(2 * second.sum(), other)
    backward((first + second).sum(), opt)
    backward(second.sum(), other)
    other.step()
    assert second.tolist() == [-4.0] * 2


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clears", ["opt", "model"])
def test_a_gan_that_clears_before_each_backward_is_not_disturbed(set_to_none, clears, amp, backward):
    (generator, critic), (plain_generator, plain_critic) = zip(
        pair_of_models(lambda: nn.Linear(3, 3)), pair_of_models(lambda: nn.Linear(3, 1)), strict=True
    )
    models = generator, critic
    opts = [
        ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), 0.1), loss_scale=scale)
        for model, scale in zip(models, (2.0**16, 4.0), strict=True)
    ]
    raws = [torch.optim.SGD(model.parameters(), 0.1) for model in (plain_generator, plain_critic)]

    def train(generator, critic, make, critic_make, steps, clear):
        for batch in batches(4):
            clear(1)
            critic_make((critic(generator(batch).detach()) - critic(batch)).sum())
            steps[1]()
            clear(0)
            make(-critic(generator(batch)).sum())
            steps[0]()

    def clear(place):
        (opts if clears == "opt" else models)[place].zero_grad(set_to_none=set_to_none)

    make, critic_make = ((lambda loss, opt=opt: backward(loss, opt)) for opt in opts)
    train(*models, make, critic_make, [opt.step for opt in opts], clear)
    plain = lambda loss: loss.backward()  # noqa: E731
    train(
        plain_generator, plain_critic, plain, plain, [raw.step for raw in raws], lambda place: raws[place].zero_grad()
    )
    for own, other in zip(
        (*generator.parameters(), *critic.parameters()),
        (*plain_generator.parameters(), *plain_critic.parameters()),
        strict=True,
    ):
        torch.testing.assert_close(own, other)


def test_optimizers_that_other_threads_train_are_not_taken_for_disturbed(amp, backward):
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(4)]
    opts = [
        ampx.wrap_optimizer(torch.optim.SGD([weight], 1.0), loss_scale=2.0**place)
        for place, weight in enumerate(weights)
    ]
    failures = []

    def train(weight, opt):
        try:
            for _ in range(100):
                backward(weight.sum(), opt)
                opt.step()
                opt.zero_grad()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=each) for each in zip(weights, opts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [weight.tolist() for weight in weights] == [[-100.0] * 2] * 4


# -- several optimizers ----------------------------------------------------------------------------------------------


def test_a_closure_refused_for_one_optimizer_leaves_the_gradients_of_all(amp, backward):
    fine, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    sgd = amp.wrap_optimizer(torch.optim.SGD([fine], 0.5), loss_scale=8.0)
    lbfgs = amp.wrap_optimizer(torch.optim.LBFGS([other]), loss_scale=8.0)
    fine.grad = torch.full((1,), 2.0**126)
    other.grad = torch.ones(1)

    def closure():
        loss = fine.sum() + other.sum()
        backward(loss, [sgd, lbfgs])
        return loss

    with pytest.raises(ampx.ProtocolError, match="without clearing the gradients"):
        lbfgs.step(closure)
    assert fine.grad.item() == 2.0**126


@pytest.mark.parametrize("refusal", ["the loss", "another optimizer"])
def test_a_refused_call_forgets_nothing_of_gradients_that_were_cleared_behind_the_wrapper(refusal, amp, backward):
    """The scale that it shares with an optimizer whose step was skipped still waits for its step."""
    cleared, skipped, other = (nn.Parameter(torch.ones(1)) for _ in range(3))
    raws = [torch.optim.SGD([own], 0.5) for own in (cleared, skipped)]
    opts = [*amp.wrap_optimizer(raws, loss_scale="dynamic"), amp.wrap_optimizer(torch.optim.SGD([other], 0.5))]
    backward(cleared.sum() + (skipped * torch.inf).sum(), opts[:2])
    opts[1].step()
    backward(other.sum(), opts[2])
    ampx.unscale(opts[0])
    ampx.unscale(opts[2])
    cleared.grad = None
    before = amp.state_dict()
    if refusal == "the loss":
        with pytest.raises(ampx.DetachedLossError):
            ampx.scale_loss(cleared.sum().detach(), opts[0]).__enter__()
    else:
        with pytest.raises(ampx.ProtocolError, match="after unscale"):
            ampx.scale_loss(cleared.sum(), [opts[0], opts[2]]).__enter__()
    assert amp.state_dict() == before
    backward(cleared.sum(), opts[0])  # this forgets them
    assert amp.loss_scale(opts[0]) == 2.0**15
