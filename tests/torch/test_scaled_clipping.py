"""Gradients clipped while they carry the loss scale are said once; other writes to them are left alone."""

import pytest
import torch
from torch import nn

import ampx


def by_norm(parameters, step):
    nn.utils.clip_grad_norm_(parameters, 0.5)


def by_value(parameters, step):
    nn.utils.clip_grad_value_(parameters, 2.0)


def to_unit_length(parameters, step):
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    for parameter in parameters:
        parameter.grad /= norm


def train(opt, model, write, steps=6, accumulates=1, change=lambda step: 1.0 + step, before_write=None, inside=False):
    """Train with losses that change from step to step, as those of different batches do."""
    parameters = list(model.parameters())
    for step in range(steps):
        inputs = torch.full((4, 8), change(step) % 4) if inside else torch.ones(4, 8)
        for _ in range(accumulates):
            with ampx.scale_loss(model(inputs).square().mean() * change(step), opt) as scaled:
                scaled.backward()
                if inside:
                    write(parameters, step)
        if before_write is not None:
            before_write(opt)
        if not inside:
            write(parameters, step)
        opt.step()
        opt.zero_grad()


@pytest.fixture
def start():
    def make(level="O1", dtype="float16", loss_scale=None, **options):
        ampx.init("torch", dtype=dtype, level=level, nan_loss="skip")
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        raw = torch.optim.SGD(model.parameters(), lr=1e-3)
        if level == "O2":
            ampx.prepare(model, raw)
        return ampx.wrap_optimizer(raw, loss_scale=loss_scale or 2.0**12, **options), model

    return make


@pytest.mark.parametrize("write", [by_norm, by_value, to_unit_length])
@pytest.mark.parametrize("case", ["", "accumulated", "dynamic", "O2", "closure", "folded"])
def test_gradients_clipped_with_their_scale_are_said_once(start, write, case):
    opt, model = start("O2" if case == "O2" else "O1", loss_scale="dynamic" if case == "dynamic" else None)
    if case == "folded":
        opt, model = start(fused="auto", max_grad_norm=10.0)
    run = step_by_closure if case == "closure" else train
    with pytest.warns(ampx.PrecisionWarning, match=r"max_grad_norm") as caught:
        run(opt, model, write, steps=12, accumulates=1 + (case == "accumulated"))
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize("write", [by_norm, to_unit_length])
@pytest.mark.parametrize("case", ["", "accumulated", "dynamic", "O2"])
def test_gradients_clipped_inside_the_block_are_said_once(start, write, case):
    opt, model = start("O2" if case == "O2" else "O1", loss_scale="dynamic" if case == "dynamic" else None)
    with pytest.warns(ampx.PrecisionWarning, match=r"inside scale_loss.*max_grad_norm") as caught:
        train(opt, model, write, steps=14, accumulates=1 + (case == "accumulated"), inside=True)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def step_by_closure(opt, model, write, steps, accumulates):
    for step in range(steps):

        def closure(step=step):
            opt.zero_grad()
            with ampx.scale_loss(model(torch.ones(4, 8)).square().mean() * (1.0 + step), opt) as scaled:
                scaled.backward()
            write(list(model.parameters()), step)

        opt.step(closure)


def halve(parameters, step):
    for parameter in parameters:
        parameter.grad *= 0.5


def clear(parameters, step):
    for parameter in parameters:
        parameter.grad.zero_()


def leave(parameters, step):
    pass


def freeze_half(parameters, step):
    parameters[0].grad *= 0.0


RIGHT = {
    "proportional": {"write": halve},
    "cleared": {"write": clear},
    "masked": {"write": freeze_half},
    "nothing": {"write": leave},
    "the same gradients again and again": {
        "write": halve,
        "change": lambda step: 1.0,
        "before_write": lambda opt: opt.param_groups[0].update(lr=0.0),
    },
    "unscaled before": {"write": by_norm, "before_write": ampx.unscale},
    "clipped by ampx": {"write": leave, "before_write": lambda opt: ampx.clip_grad_norm(opt, 0.5)},
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_may_be_right_is_left_alone(start, case, recwarn):
    opt, model = start()
    recwarn.clear()
    train(opt, model, **RIGHT[case])
    assert [str(warning.message) for warning in recwarn.list] == []


INSIDE = {
    "accumulated": {"write": leave, "accumulates": 3},
    "proportional": {"write": halve},
    "the same gradients again and again": {
        "write": halve,
        "change": lambda step: 1.0,
        "before_write": lambda opt: opt.param_groups[0].update(lr=0.0),
    },
    "cleared": {"write": clear},
}


@pytest.mark.parametrize("case", INSIDE)
def test_what_may_be_right_inside_the_block_is_left_alone(start, case, recwarn):
    opt, model = start()
    recwarn.clear()
    train(opt, model, steps=12, inside=True, **INSIDE[case])
    assert [str(warning.message) for warning in recwarn.list] == []


@pytest.mark.parametrize("options", [{"dtype": "bfloat16", "loss_scale": 1.0}, {"loss_scale": 1.0}])
def test_where_losses_are_not_scaled_gradients_may_be_clipped(start, options, recwarn):
    opt, model = start(**options)
    recwarn.clear()
    train(opt, model, by_norm)
    assert recwarn.list == []


def test_after_the_first_steps_nothing_is_looked_at(start):
    opt, model = start()
    train(opt, model, leave, steps=11)
    assert opt._clipping is None


def test_clipping_the_model_of_master_weights_after_unscale_is_said_to_do_nothing(start):
    """The optimizer's own parameters are the masters; theirs are the gradients to clip."""
    opt, model = start("O2")
    weights = [[p.detach().clone() for p in opt.param_groups[0]["params"]]]
    with pytest.warns(ampx.PrecisionWarning, match="opt.param_groups") as caught:
        train(opt, model, by_norm, before_write=ampx.unscale, change=lambda step: 10.0)
    assert len(caught) == 1
    weights.append([p.detach().clone() for p in opt.param_groups[0]["params"]])
    masters = opt.param_groups[0]["params"]
    train(opt, model, lambda _, step: by_norm(masters, step), before_write=ampx.unscale, change=lambda step: 10.0)
    weights.append([p.detach().clone() for p in masters])
    freely, clipped = (
        sum((a - b).norm() ** 2 for a, b in zip(*weights[at : at + 2], strict=True)) ** 0.5 for at in (0, 1)
    )
    assert freely > clipped > 0
    assert clipped <= 6 * 0.5 * 1e-3 * 1.001  # six steps of the bound times the learning rate
