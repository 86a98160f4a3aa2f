"""The meter: updates that round to nothing and gradients that flush, counted again by NumPy."""

import warnings

import numpy as np
import pytest
import torch
from metering import count
from torch import nn

import ampx
from ampx.backend import offer
from ampx.numerics import meter
from ampx.numerics.rounding import sample
from ampx.plugins import default_registry
from ampx.run import Automation, Run, RunSettings


def arrays(model):
    return {name: sample(p.detach().float().numpy(), meter.SAMPLES) for name, p in model.named_parameters()}


def train(model, opt, steps=100, before_last=lambda: None):
    """Take steps; return the weights before the last, the last scaled gradients, and the weights after it."""
    for step in range(1, steps + 1):
        with ampx.scale_loss(model(torch.linspace(-1, 1, 12).reshape(4, 3)).float().square().mean(), opt) as scaled:
            scaled.backward()
        if step == steps:
            before_last()
            gradients = {
                name: None if p.grad is None else sample(p.grad.float().numpy(), meter.SAMPLES)
                for name, p in model.named_parameters()
            }
            before = arrays(model)
        opt.step()
        opt.zero_grad()
    return before, gradients, arrays(model)


def layers(dtype=torch.float32):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 2000), nn.ReLU(), nn.Linear(2000, 2, bias=False))
    model.register_parameter("idle", nn.Parameter(torch.ones(2)))
    return model.to(dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"device_scale": True}], ids=["host", "scale on the device"])
def test_the_numbers_equal_a_count_in_numpy(dtype, options):
    ampx.init("torch", dtype=dtype, loss_scale=ampx.LossScale(init_scale=1024.0))
    model = layers()
    opt = ampx.wrap_optimizer(torch.optim.SGD(model.named_parameters(), lr=1e-3, fused=bool(options)), **options)
    assert opt.meter is None
    before, gradients, after = train(model, opt)
    assert opt.meter == meter.Meter(
        100,
        dtype,
        1024.0,
        tuple(count(name, "float32", before[name], after[name], gradients[name], dtype) for name in before),
    )
    assert [entry.sampled for entry in opt.meter.parameters] == [
        2,
        858,
        2000,
        4000,
    ]  # every 7th of 6,000, which has the factors 2, 3 and 5
    train(model, opt, 99)
    assert opt.meter.step == 100


def test_every_so_many_steps_are_metered_as_the_session_says_and_at_0_none():
    steps = {}
    for every in (None, 30, 0):
        amp = ampx.init("torch", dtype="bfloat16")
        amp.meter_every = every
        model = layers()
        opt = ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
        train(model, opt)
        steps[every] = opt.meter and opt.meter.step
    assert steps == {None: 100, 30: 90, 0: None}


def test_pure_bfloat16_loses_updates_and_says_so_and_with_copies_it_loses_none():
    events = []
    amp = ampx.init("torch", dtype="bfloat16")
    amp.on_event(events.append)
    model = layers(torch.bfloat16)
    with pytest.warns(ampx.PrecisionWarning, match=r"4 bfloat16 parameters.*level='O2'"):
        opt = ampx.wrap_optimizer(torch.optim.Adam(model.named_parameters(), lr=1e-5))
    before, gradients, after = train(model, opt)
    (event,) = events
    assert isinstance(event, ampx.PrecisionLost)
    assert (event.step, event.lost) == (100, opt.meter.lost)
    assert opt.meter.lost > 0.85
    expected = [count(name, "bfloat16", before[name], after[name], gradients[name], "bfloat16") for name in before]
    assert list(opt.meter.parameters) == expected
    ampx.shutdown()

    events.clear()
    amp = ampx.init("torch", dtype="bfloat16", level="O2")
    amp.on_event(events.append)
    model, raw = ampx.prepare(model := nn.Linear(3, 500), torch.optim.Adam(model.named_parameters(), lr=1e-5))
    opt = ampx.wrap_optimizer(raw)
    train(model, opt)
    assert {entry.dtype for entry in opt.meter.parameters} == {"float32"}
    assert opt.meter.lost == 0
    assert events == []


@pytest.mark.parametrize(("rate", "lost"), [(1e-5, 0.0), (1e-10, 1.0)])
def test_with_master_weights_it_reads_what_a_training_in_float32_reads(rate, lost):
    shares = {}
    for level in ("O0", "O2"):
        amp = ampx.init("torch", dtype="bfloat16", level=level)
        amp.meter_every = 2
        model = nn.Linear(3, 20)
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.5)  # beside it float32 has steps of 3e-8 and 6e-8
        raw = torch.optim.Adam(model.named_parameters(), lr=rate)
        if level == "O2":
            model, raw = ampx.prepare(model, raw)
        opt = ampx.wrap_optimizer(raw)
        train(model, opt, steps=2)
        assert {entry.dtype for entry in opt.meter.parameters} == {"float32"}
        shares[level] = opt.meter.lost
    assert shares == {"O0": lost, "O2": lost}


@pytest.mark.parametrize("reads", [False, True], ids=["scaled until the step", "unscaled by the script"])
def test_gradients_that_flush_at_the_present_scale_are_told(reads):
    events = []
    amp = ampx.init("torch", dtype="float16", loss_scale=4.0)
    amp.on_event(events.append)
    model = nn.Linear(4, 1, bias=False)
    opt = ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    slopes = torch.tensor([[2.0**-28, 2.0**-27, 2.0**-26, 1.0]])  # times 4: 2**-25 is a tie, which becomes zero
    for _ in range(100):
        with ampx.scale_loss((model.weight * slopes).sum(), opt) as scaled:
            scaled.backward()
        if reads:
            ampx.unscale(opt)
        opt.step()
        opt.zero_grad()
    (entry,) = opt.meter.parameters
    assert (entry.flushed, entry.moved, opt.meter.flushed) == (2, 4, 0.5)
    assert entry.headroom == np.log2(65504.0) - 2
    assert [event.flushed for event in events] == [0.5]


@pytest.mark.parametrize("options", [{}, {"device_scale": True}], ids=["host", "scale on the device"])
def test_a_skipped_step_is_not_metered(options):
    events = []
    amp = ampx.init("torch", dtype="float16", nan_loss="skip")
    model = layers()
    opt = ampx.wrap_optimizer(torch.optim.SGD(model.named_parameters(), lr=1e-3, fused=bool(options)), **options)
    amp.on_event(events.append)

    def overflow():
        events.clear()
        model[0].weight.grad[0, 0] = float("inf")

    train(model, opt, before_last=overflow)
    assert opt.last_step.applied is False
    assert opt.meter is None
    assert not any(isinstance(event, ampx.PrecisionLost) for event in events)


def test_the_summary_of_a_run_tells_it_once():
    run = Run("torch", RunSettings(dtype="bfloat16", device="cpu"))
    with offer(default_registry().load("torch"), Automation).automate(run):
        weight = nn.Parameter(torch.ones(4096) * 1e4)
        optimizer = torch.optim.SGD([weight], lr=1e-6)
        for _ in range(200):
            (weight * 1e-2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [note for note in run.recorder.notes if "100% of the sampled updates rounded to nothing" in note] == (
        run.recorder.notes
    )
    assert len(run.recorder.notes) == 1


def test_no_warning_where_parameters_are_float32_or_o3_was_asked_for():
    for level, dtype in (("O1", torch.float32), ("O3", torch.bfloat16)):
        ampx.init("torch", dtype="bfloat16", level=level)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ampx.wrap_optimizer(torch.optim.SGD(layers(dtype).parameters(), lr=1e-3))
        ampx.shutdown()


@pytest.mark.gpu
def test_what_is_metered_comes_to_the_host_where_the_script_has_set_a_default_device():
    amp = ampx.init("torch", device="cuda", dtype="bfloat16")
    amp.meter_every = 2
    with torch.device("cuda"):
        model = layers()
        opt = ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
        for _ in range(4):
            with ampx.scale_loss(model(torch.ones(4, 3)).float().square().mean(), opt) as scaled:
                scaled.backward()
            opt.step()
    assert opt.meter.step == 4
