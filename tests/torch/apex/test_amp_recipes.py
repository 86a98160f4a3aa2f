"""The recipes as they were published, typed as they were, train a real model."""

import json

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import ampx

pytest.importorskip("sklearn")

from sklearn.datasets import load_digits

from ampx_torch.apex import amp


@pytest.fixture(scope="module")
def digits():
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    return images[:1344], labels[:1344], images[1344:], labels[1344:]


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches(digits):
    images, labels, _, _ = digits
    return [(images[i : i + 64], labels[i : i + 64]) for _ in range(5) for i in range(0, len(images), 64)]


def accuracy(model, digits):
    model.eval()
    with torch.no_grad():
        return float((model(digits[2]).argmax(1) == digits[3]).float().mean())


@pytest.fixture(scope="module")
def exact(digits):
    model, optimizer = make()
    for data, target in batches(digits):
        optimizer.zero_grad()
        F.cross_entropy(model(data), target).backward()
        optimizer.step()
    return accuracy(model, digits)


# float16 and bfloat16 round to 2**-11 and 2**-8 of a value; five epochs of these steps move the accuracy by a few of
# the 453 test images either way, and 2 % are nine of them.
@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_recipe_trains_digits(digits, exact, opt_level, dtype, monkeypatch):
    monkeypatch.setenv("AMPX_APEX_DTYPE", dtype)
    model, optimizer = make()

    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level)
    for data, target in batches(digits):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    assert exact > 0.9
    assert accuracy(model, digits) == pytest.approx(exact, abs=0.02)
    low = getattr(torch, dtype)
    assert model[0].weight.dtype == (low if opt_level in ("O2", "O3") else torch.float32)
    assert model[1].weight.dtype == (low if opt_level == "O3" else torch.float32)


def test_the_recipe_as_the_vendor_prints_it(digits, exact):
    model, optimizer = make()

    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    for data, target in batches(digits):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    assert accuracy(model, digits) == pytest.approx(exact, abs=0.02)


def test_the_older_recipe_trains_digits(digits, exact):
    model, optimizer = make()

    amp_handle = amp.init(enabled=True)
    for data, target in batches(digits):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        with amp_handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    assert accuracy(model, digits) == pytest.approx(exact, abs=0.02)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_an_imagenet_style_script_with_scheduler_clipping_and_resume(digits, exact, opt_level, tmp_path):
    """Resume in the middle: the second half goes on exactly where the first ended."""

    def prepare():
        model, optimizer = make()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=60, gamma=0.5)
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=opt_level, keep_batchnorm_fp32=None, loss_scale=None, verbosity=0
        )
        return model, optimizer, scheduler

    def train(model, optimizer, scheduler, data):
        for images, labels in data:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
            optimizer.step()
            scheduler.step()

    data = batches(digits)
    model, optimizer, scheduler = prepare()
    train(model, optimizer, scheduler, data[:50])
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
    torch.save({**checkpoint, "scheduler": scheduler.state_dict()}, tmp_path / "checkpoint.pt")
    train(model, optimizer, scheduler, data[50:])
    through = {name: value.clone() for name, value in model.state_dict().items()}
    assert accuracy(model, digits) == pytest.approx(exact, abs=0.03)
    assert json.dumps(amp.state_dict()) == json.dumps({"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 105}})

    ampx.shutdown()
    model, optimizer, scheduler = prepare()
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=False)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    amp.load_state_dict(checkpoint["amp"])
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 50
    train(model, optimizer, scheduler, data[50:])
    assert all(torch.equal(value, through[name]) for name, value in model.state_dict().items())
