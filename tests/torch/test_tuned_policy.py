"""A policy that `ampx.tune` wrote trains as float32 does; one that does not fit the model is refused."""

import pytest
import torch
from torch import nn

import ampx

STEPS = 12


class Length(nn.Module):
    """Divide each sample by its length: in float16 the squares overflow, and what comes out is zero."""

    def forward(self, x):
        return x / x.square().sum(-1, keepdim=True).sqrt()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), Length(), nn.Linear(16, 1))


def batch(step=0):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(16, 8, generator=generator) * 400
    return inputs, inputs[:, :1].sign()


def loss_of(model, step=0):
    inputs, targets = batch(step)
    return nn.functional.mse_loss(model(inputs).float(), targets)


def trained(**settings):
    """Return the losses of a training."""
    with ampx.init("torch", device="cpu", **settings):
        model, losses = network(), []
        ampx.prepare(model)
        opt = ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.3))
        for step in range(STEPS):
            loss = loss_of(model, step)
            with ampx.scale_loss(loss, opt) as scaled:
                scaled.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
    return torch.tensor(losses)


@pytest.fixture(scope="module")
def policy():
    return ampx.tune(loss_of, network(), framework="torch", device="cpu", dtype="float16", repeats=0)


def test_it_trains_to_the_loss_of_float32_where_plain_low_precision_does_not(policy, tmp_path):
    policy.write(tmp_path / "ampx.toml")
    exact = trained(dtype="float32")
    tuned = trained(policy=tmp_path / "ampx.toml", loss_scale=1024)
    plain = trained(dtype="float16", loss_scale=1024)
    assert exact[-1] < exact[0] / 2
    assert torch.linalg.norm(tuned - exact) <= policy.tolerance * torch.linalg.norm(exact)
    assert torch.linalg.norm(plain - exact) > policy.tolerance * torch.linalg.norm(exact)
    assert [choice.entry for choice in policy.deny] == ["module:1"]


def test_a_file_of_another_model_is_refused_by_name(policy, tmp_path):
    policy.write(tmp_path / "ampx.toml")
    ampx.init("torch", device="cpu", policy=tmp_path / "ampx.toml")
    with pytest.raises(ampx.UnsupportedOpError, match=r"the pattern '1', which matches no module of the model"):
        ampx.prepare(nn.Sequential(nn.Linear(8, 1)))
