"""The fused optimizers, LARC and the norms in apex.amp: float32 in the same steps is the reference."""

import math

import pytest
import torch
from torch import nn

from ampx_torch.apex import amp
from ampx_torch.apex.normalization import FusedLayerNorm
from ampx_torch.apex.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from ampx_torch.apex.parallel import LARC

MAKERS = {
    "FusedAdam": lambda parameters: FusedAdam(parameters, lr=0.01),
    "FusedSGD": lambda parameters: FusedSGD(parameters, lr=0.05, momentum=0.9),
    "FusedLAMB": lambda parameters: FusedLAMB(parameters, lr=0.01),
    "FusedNovoGrad": lambda parameters: FusedNovoGrad(parameters, lr=0.01),
    "FusedAdagrad": lambda parameters: FusedAdagrad(parameters, lr=0.01),
    "LARC": lambda parameters: LARC(torch.optim.SGD(parameters, lr=0.05, momentum=0.9)),
}
STEPS = 6


def batch(step):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    return x, x[:, :2] * 2 + 1


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), FusedLayerNorm(16), nn.ReLU(), nn.Linear(16, 2))


def train(make, level=None, overflow_at=None):
    model = network()
    opt = make(model.parameters())
    if level is not None:
        # At 1024, float16 gradients of this size neither overflow nor underflow.
        model, opt = amp.initialize(
            model, opt, opt_level=level, loss_scale="dynamic", max_loss_scale=1024.0, verbosity=0
        )
    losses, kept = [], None
    for step in range(STEPS):
        x, y = batch(step)
        loss = (model(x).float() - y).square().mean()
        losses.append(loss.item())
        opt.zero_grad()
        if level is None:
            if step == overflow_at:
                continue
            loss.backward()
        else:
            if step == overflow_at:
                kept = values(opt)
                loss = loss * math.inf
            with amp.scale_loss(loss, opt) as scaled:
                scaled.backward()
        opt.step()
        if step == overflow_at:
            assert same(values(opt), kept)
    return losses


def values(opt):
    """The parameters that the optimizer updates, and all its state."""
    parameters = [parameter.detach().clone() for group in opt.param_groups for parameter in group["params"]]
    counts = [group.get("step") for group in opt.param_groups]
    state = [
        {name: value.clone() if torch.is_tensor(value) else value for name, value in opt.state[key].items()}
        for group in opt.param_groups
        for key in group["params"]
    ]
    return parameters, counts, state


def same(left, other):
    if torch.is_tensor(left):
        return torch.equal(left, other)
    if isinstance(left, dict):
        return left.keys() == other.keys() and all(same(left[key], other[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(other) and all(map(same, left, other))
    return left == other


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", MAKERS)
def test_losses_are_those_of_float32(name, level):
    # Losses near 5 are squares of differences of values that are rounded to 2**-11 a few times on their way, in
    # weights that follow gradients rounded likewise.
    assert train(MAKERS[name], level) == pytest.approx(train(MAKERS[name]), rel=20 * 2.0**-11)


@pytest.mark.parametrize("name", MAKERS)
def test_a_skipped_step_leaves_parameters_counts_and_state(name):
    result = train(MAKERS[name], "O1", overflow_at=3)
    expected = train(MAKERS[name], overflow_at=3)
    assert result == pytest.approx(expected, rel=20 * 2.0**-11)
