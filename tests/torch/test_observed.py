"""Under `ampx run` an observer gets true losses and readings, and `"module:name"` holds without `prepare`."""

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn

import ampx
from ampx.backend import offer
from ampx.numerics.probe import Probe, Watching
from ampx.plugins import default_registry
from ampx.run import Automation, Run, RunSettings
from ampx_torch.backend import TorchBackend


class Observer:
    """Reads every loss at the end of its step, and watches the second step."""

    def __init__(self):
        self.losses, self.steps, self.readings, self._readers = [], [], [], []
        self._region = None

    def loss(self, read):
        self._readers.append(read)

    def stepped(self, steps):
        if steps in [0, *self.steps]:  # the record of a session of the script's own is brought up to date
            return
        self.losses += [read() for read in self._readers]
        self._readers = []
        self.steps.append(steps)
        if self._region is not None:
            self._region.__exit__(None, None, None)
            self.readings, self._region = self._watch.readings(), None
        if steps == 1:
            self._region = offer(TorchBackend(), Probe).watch(None, Watching(samples=100, operations=True))
            self._watch = self._region.__enter__()


def observed(script, **settings):
    """Run a script as `ampx run` does; return the run and what was observed."""
    run = Run("torch", RunSettings(**{"device": "cpu", "dtype": "float16", **settings}))
    run.recorder.observer = observer = Observer()
    with offer(default_registry().load("torch"), Automation).automate(run):
        script()
    return run, observer


def weighted(model, optimizer, backward=lambda loss: loss.backward(), step=None):
    """Three steps of a linear model that autocast leaves alone; return the losses."""
    losses = []
    for factor in (0.5, 2.0, 4.0):
        optimizer.zero_grad()
        loss = (model(torch.ones(1, 2)) * factor).sum()
        losses.append(loss.item())
        backward(loss)
        (step or optimizer.step)()
    return losses


class Elementwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()
        self.weight = nn.Parameter(torch.tensor([1.0, -0.5]))

    def forward(self, x):
        return self.inner(x * self.weight)


def plain():
    model = Elementwise()
    return weighted(model, torch.optim.SGD(model.parameters(), lr=0.125))


def with_a_default_device():
    with torch.device("cpu"):  # calls of torch pass through the mode that this enters
        return plain()


def own_scaler():
    model = Elementwise()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step():
        scaler.step(optimizer)
        scaler.update()

    return weighted(model, optimizer, lambda loss: scaler.scale(loss).backward(), step)


def own_session():
    model = Elementwise()
    amp = ampx.init("torch", dtype="float16", loss_scale=4.0)
    optimizer = amp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.125))

    def backward(loss):
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()

    return weighted(model, optimizer, backward)


@pytest.fixture(autouse=True)
def ended():
    yield
    ampx.shutdown()


@pytest.mark.parametrize(
    ("script", "settings"),
    [
        (plain, {}),
        (plain, {"dtype": "bfloat16"}),
        (plain, {"dtype": "float32"}),
        (plain, {"level": "O0", "dtype": "auto"}),
        (with_a_default_device, {}),
        (own_scaler, {"replace_native": True}),
        (own_scaler, {"replace_native": True, "dtype": "float32"}),
        (own_session, {}),
    ],
    ids=[
        "float16",
        "bfloat16",
        "float32",
        "O0",
        "default device",
        "GradScaler",
        "GradScaler in float32",
        "own session",
    ],
)
def test_losses_are_the_scripts_own_whoever_scales(script, settings):
    expected = script()
    ampx.shutdown()
    run, observer = observed(script, **settings)
    assert observer.losses == expected
    assert observer.steps == [1, 2, 3]
    assert run.recorder.steps == 3


@pytest.mark.parametrize(("dtype", "scale"), [("float16", 65536.0), ("bfloat16", 1.0), ("float32", 1.0)])
def test_a_step_is_watched_between_two_others_with_gradients_as_they_were_computed(dtype, scale):
    _, observer = observed(plain, dtype=dtype)
    modules = [r for r in observer.readings if not r.operation]
    assert [(r.module, r.direction) for r in modules] == [
        ("inner", "forward"),
        ("", "forward"),
        ("inner", "backward"),
        ("", "backward"),
    ]
    # the first step took 0.125 · 0.5 off each weight; Identity returns what it received
    np.testing.assert_array_equal(modules[0].sample, np.array([0.9375, -0.5625], np.float32))
    np.testing.assert_array_equal(modules[2].sample, np.full(2, 2.0 * scale, np.float32))
    assert {r.operation for r in observer.readings} >= {"mul"}
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl


class Product(nn.Module):
    """Notes the dtype that a product computes in."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.dtype = None

    def forward(self, x):
        product = x @ self.weight
        self.dtype = product.dtype
        return product


@pytest.mark.parametrize(
    "kind", ["called before its optimizer is there", "as usual", "compiled", "second model", "its class"]
)
def test_modules_are_denied_by_name_without_prepare(kind):
    model = nn.Sequential(Product(), Product())

    def script():
        call = model
        if kind == "compiled":
            call = torch.compile(model, backend="eager")
        if kind in ("second model", "its class"):
            nn.Identity()(torch.ones(1))
        if kind == "called before its optimizer is there":
            call(torch.ones(1, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            call(torch.ones(1, 2)).float().sum().backward()
            optimizer.step()

    name = "module:Sequential:1" if kind == "its class" else "module:1"
    run, _ = observed(script, dtype="bfloat16", deny=(name,))
    assert (model[0].dtype, model[1].dtype) == (torch.bfloat16, torch.float32)
    assert run.misuse is None
    model(torch.ones(1, 2))
    assert model[0].dtype == torch.float32
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl


def test_a_copy_is_denied_by_the_name_of_its_model_and_files_of_both_know_nothing_of_ampx():
    model, files, dtypes = nn.Sequential(Product(), Product()), [], []

    def script():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).float().sum().backward()
            optimizer.step()
            average = copy.deepcopy(model)
            average(torch.ones(1, 2))
            dtypes.append([part.dtype for part in average])
            files.extend([io.BytesIO(), io.BytesIO()])
            torch.save(copy.deepcopy(average), files[-2])
            torch.save(model, files[-1])

    observed(script, dtype="bfloat16", deny=("module:1",))
    assert dtypes == [[torch.bfloat16, torch.float32]] * 2
    for file in files:
        assert b"ampx_torch" not in file.getvalue()
        file.seek(0)
        with torch.serialization.safe_globals([nn.Sequential, Product]):
            loaded = torch.load(file, weights_only=True)
        assert not any(part._forward_hooks or part._forward_hooks_with_kwargs for part in loaded.modules())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_a_rule_about_no_module_stops_the_script_in_its_first_steps():
    model = nn.Sequential(Product())

    def script():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(100):
            model(torch.ones(1, 2)).float().sum().backward()
            optimizer.step()

    with pytest.raises(ampx.InvalidOptionError, match=r"deny='module:layer.\*' matches no module.*accepted.*are 0\."):
        observed(script, dtype="bfloat16", deny=("module:layer.*", "module:0"))
    with pytest.raises(ampx.InvalidOptionError, match="allow and deny both match the module '0'"):
        observed(script, dtype="bfloat16", deny=("module:0",), allow=("module:*",))
