"""The line of code in each docstring of the public names runs, on a small PyTorch model."""

import concurrent.futures
import doctest
import importlib
import inspect
import types

import pytest

import ampx

torch = pytest.importorskip("torch")

PUBLIC = {f"ampx.{name}": getattr(ampx, name) for name in dir(ampx) if name != "debug"}
PUBLIC["ampx.debug.nonfinite_parameters"] = importlib.import_module("ampx.debug").nonfinite_parameters


def examples(value):
    return [example.source for example in doctest.DocTestParser().get_examples(inspect.getdoc(value) or "")]


FUNCTIONS = [name for name, value in PUBLIC.items() if inspect.isfunction(value)]
WITH_EXAMPLES = [name for name, value in PUBLIC.items() if examples(value)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_an_example_that_calls_it(name):
    assert any(name in line for line in examples(PUBLIC[name]))


# Examples that come later in a script than the others, and the one that wraps an optimizer called as all are.
NEED_A_STEP = {"ampx.StepResult", "ampx.last_step"}
NEED_A_RAW_OPTIMIZER = {"ampx.Amp"}


@pytest.fixture
def names():
    """Return the names that the examples take for granted: the model and the optimizer of a small training."""
    model = torch.nn.Linear(4, 2)
    raw = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = ampx.init("torch", level="O0", loss_scale="dynamic")
    optimizer = ampx.wrap_optimizer(raw)
    x, y = torch.ones(3, 4), torch.ones(3, 2)
    with ampx.scale_loss(torch.nn.functional.mse_loss(model(x), y), optimizer) as scaled:
        scaled.backward()
    yield {
        "ampx": ampx, "amp": amp, "torch": torch, "concurrent": concurrent, "model": model, "optimizer": optimizer,
        "loss_fn": torch.nn.functional.mse_loss, "x": x, "y": y, "checkpoint": {"ampx": ampx.state_dict()},
        "scheduler": torch.optim.lr_scheduler.StepLR(raw, 10), "grad_scaler": torch.amp.GradScaler("cpu"),
        "ampx_myframework": types.SimpleNamespace(ampx_event=ampx.hookimpl(lambda event: None)),
    }  # fmt: skip
    ampx.shutdown()


@pytest.mark.filterwarnings("ignore::ampx.AmpxWarning")
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_example_runs(name, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name in NEED_A_STEP:
        names["optimizer"].step()
    if name in NEED_A_RAW_OPTIMIZER:
        names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    exec("".join(examples(PUBLIC[name])), names)
