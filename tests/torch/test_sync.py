"""The scale on the device: the same trace as the specification's, and nothing in a step waits for it."""

import copy
import dataclasses
import pickle
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

import ampx
from ampx_torch import gradients, step as stepping
from ampx_torch.backend import TorchBackend
from waits import CountsWaits

INF = float("inf")


def float32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def specification(config, pattern, scale=None, growth=0):
    """The loss scale's state after each step, written down from its definition, not from the code."""
    scale, hysteresis, skips = scale or config.init_scale, config.hysteresis, 0
    trace = []
    for bad in pattern:
        if bad:
            growth, skips, hysteresis = 0, skips + 1, hysteresis - 1
            if hysteresis <= 0:
                scale = max(float32(scale * float32(config.backoff_factor)), config.min_scale)
                hysteresis = config.hysteresis
        else:
            growth, skips, hysteresis = growth + 1, 0, config.hysteresis
            if growth >= config.growth_interval:
                scale, growth = min(scale * float32(config.growth_factor), config.max_scale), 0
                scale = float32(scale)
        trace.append((scale, growth, hysteresis, skips))
    return trace


def wrapped(config=None, lr=0.0, **options):
    parameter = nn.Parameter(torch.ones(2))
    raw = torch.optim.SGD([parameter], lr=lr, fused=True)
    return parameter, ampx.wrap_optimizer(raw, loss_scale=config or ampx.LossScale(), device_scale=True, **options)


def advance(parameter, opt, bad):
    opt.zero_grad()
    with ampx.scale_loss(parameter.sum() * 0.0 if bad is None else parameter.sum(), opt) as scaled:
        scaled.backward()
    if bad:
        parameter.grad[0] = INF
    opt.step()


def scale_on_device(opt):
    """What the device multiplies the next loss with, whatever the host believes."""
    with ampx.scale_loss(torch.ones((), requires_grad=True), opt) as scaled:
        scale = scaled.item()
    opt.zero_grad()
    return scale


def state_of(amp, opt):
    loss = amp.state_dict(opt)["groups"][0]["losses"][0]
    return tuple(loss[name] for name in ("scale", "growth_tracker", "hysteresis_tracker", "consecutive_skips"))


configs = st.builds(
    ampx.LossScale,
    init_scale=st.sampled_from([1.0, 8.0, 1000.0, 2.0**16]),
    growth_factor=st.sampled_from([1.0, 1.1, 2.0, 3.0, 1e30]),
    backoff_factor=st.sampled_from([1.0, 0.5, 0.3, 1e-3]),
    growth_interval=st.integers(1, 3),
    hysteresis=st.integers(1, 3),
    min_scale=st.sampled_from([2.0**-20, 0.5, 1.0]),
    max_scale=st.sampled_from([2.0**16, 2.0**24, 3e38]),
    max_consecutive_skips=st.just(1000),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=configs, pattern=st.lists(st.booleans(), max_size=12), reads=st.sets(st.integers(0, 11)))
def test_the_trace_on_the_device_is_the_specifications(amp, config, pattern, reads):
    parameter, opt = wrapped(config)
    expected = specification(config, pattern)
    before = config.init_scale
    for step, bad in enumerate(pattern):
        advance(parameter, opt, bad)
        assert scale_on_device(opt) == expected[step][0]
        if step in reads:
            assert state_of(amp, opt) == expected[step]
            result = opt.last_step
            assert (result.finite, result.scale, result.next_scale) == (not bad, before, expected[step][0])
            assert result.consecutive_skips == expected[step][3]
        before = expected[step][0]
    if pattern:
        assert state_of(amp, opt) == expected[-1]


@pytest.mark.parametrize(
    "config",
    [
        ampx.LossScale(init_scale=2.0**16, max_scale=2.0**16, growth_interval=1),
        ampx.LossScale(init_scale=3.0, min_scale=2.0),
        ampx.LossScale(init_scale=2.0**127, max_scale=3e38, growth_interval=1),
    ],
    ids=["ceiling", "floor", "infinity"],
)
def test_the_scale_on_the_device_stops_at_its_bounds(config, amp):
    parameter, opt = wrapped(config)
    pattern = [False, False, True, True, True]
    for bad, expected in zip(pattern, specification(config, pattern), strict=True):
        advance(parameter, opt, bad)
        assert scale_on_device(opt) == expected[0]
        assert state_of(amp, opt) == expected


@pytest.mark.parametrize(("scale", "growth"), [(0.25, 1), (2.0**30, 1), (2.0**10, 7)])
@pytest.mark.parametrize("hysteresis", [1, 2])
def test_a_loaded_state_out_of_bounds_moves_as_the_specification_says(scale, growth, hysteresis, amp):
    config = ampx.LossScale(growth_interval=3, hysteresis=hysteresis)
    pattern = [False, True, True, False, False, False, True]
    parameter, opt = wrapped(config)
    state = amp.state_dict(opt)
    state["groups"][0]["losses"][0].update(scale=scale, growth_tracker=growth)
    amp.load_state_dict(state, opt)
    for bad, expected in zip(pattern, specification(config, pattern, scale, growth), strict=True):
        advance(parameter, opt, bad)
        assert scale_on_device(opt) == expected[0]
        assert state_of(amp, opt) == expected


@pytest.mark.parametrize("how", ["load", "deepcopy", "pickle", "json"])
def test_the_trace_goes_on_after_a_state_was_loaded_or_copied_midway(how, amp):
    config = ampx.LossScale(growth_interval=3, hysteresis=2)
    pattern = [False, True, False, False, True, True, False, False, False, False]
    parameter, opt = wrapped(config)
    for bad in pattern[:5]:
        advance(parameter, opt, bad)
    opt.zero_grad()
    if how in ("load", "json"):
        saved = amp.state_dict(opt)
        parameter, opt = wrapped()
        amp.load_state_dict(saved, opt)
    else:
        copied = (copy.deepcopy if how == "deepcopy" else lambda it: pickle.loads(pickle.dumps(it)))((parameter, opt))
        parameter, opt = copied
    for bad in pattern[5:]:
        advance(parameter, opt, bad)
    assert state_of(amp, opt) == specification(config, pattern)[-1]


def test_events_arrive_in_order_with_the_hosts_numbers_though_late(amp):
    def run(on_device):
        events = []
        remove = amp.on_event(events.append)
        parameter = nn.Parameter(torch.ones(2))
        config = ampx.LossScale(growth_interval=5, max_consecutive_skips=3)
        opt = ampx.wrap_optimizer(
            torch.optim.SGD([parameter], lr=0.0, fused=True), loss_scale=config, device_scale=on_device
        )
        for step in range(80):
            advance(parameter, opt, step % 7 == 3 or step in (40, 41))
        seen = len(events)
        assert opt.last_step is not None
        remove()
        index = opt.ampx_member.group.index
        return seen, [dataclasses.replace(event, group=event.group - index) for event in events]

    host_seen, host = run(False)
    device_seen, device = run(True)
    assert host_seen == len(host)
    assert 0 < device_seen < len(device)  # batches of steps reach the host, the rest when it asks
    assert device == host


def test_shutdown_sends_the_events_still_due(amp):
    events = []
    amp.on_event(events.append)
    parameter, opt = wrapped()
    advance(parameter, opt, True)
    assert events == []
    ampx.shutdown()
    assert [type(event) for event in events] == [ampx.StepSkipped, ampx.ScaleChanged]


def test_a_static_scale_on_the_device_skips_and_counts(amp):
    parameter, opt = wrapped(ampx.LossScale.static(8.0), lr=1.0)
    for bad in (True, True, False):
        advance(parameter, opt, bad)
        assert opt.last_step.next_scale == 8.0
        assert opt.last_step.applied == (not bad)
    assert parameter.tolist() == [0.0, 0.0]


# -- what a step costs -----------------------------------------------------------------------------


def count(step):
    step()  # first steps make state
    with CountsWaits() as counter:
        for _ in range(5):
            step()
    return counter.waits


def native_step(opt, parameters, clip=False):
    scaler = torch.amp.GradScaler("cpu")

    def step():
        opt.zero_grad()
        scaler.scale(sum(p.sum() for p in parameters)).backward()
        if clip:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(opt)
        scaler.update()

    return step


def ampx_step(opt, parameters, **options):
    wrapped = ampx.wrap_optimizer(opt, **options)

    def step():
        wrapped.zero_grad()
        with ampx.scale_loss(sum(p.sum() for p in parameters), wrapped) as scaled:
            scaled.backward()
        wrapped.step()

    return step


CASES = {
    "sgd": (torch.optim.SGD, {}),
    "adam": (torch.optim.Adam, {}),
    "adam foreach": (torch.optim.Adam, {"foreach": True}),
    "sgd fused": (torch.optim.SGD, {"fused": True}),
    "adamw fused": (torch.optim.AdamW, {"fused": True}),
}


# `nan_loss="skip"`, as in the `amp` fixture: otherwise ampx also looks whether a loss that lives on the host is NaN,
# which torch's scaler does not, and which no accelerator waits for.
@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_waits_no_more_often_than_torchs_scaler_and_never_with_the_scale_on_the_device(
    case, clip, amp, monkeypatch
):
    monkeypatch.setattr(gradients, "all_on_cpu", lambda tensors: False)  # as on an accelerator
    cls, options = CASES[case]

    def fresh():
        parameters = [nn.Parameter(torch.ones(3)) for _ in range(4)]
        return cls(parameters, lr=0.1, **options), parameters

    bound = {"max_grad_norm": 1.0} if clip else {}
    native = count(native_step(*fresh(), clip=clip))
    # Fused optimizers keep the scale on the device where there is an accelerator; on the CPU only when asked.
    if "fused" in options:
        assert count(ampx_step(*fresh(), device_scale=True, **bound)) == native == 0
    else:
        assert count(ampx_step(*fresh(), **bound)) <= native


def test_unscale_and_a_step_wait_no_more_often_than_torchs_scaler(amp, monkeypatch):
    for module in (gradients, stepping):
        monkeypatch.setattr(module, "all_on_cpu", lambda tensors: False)  # as on an accelerator
    parameter, scaler = nn.Parameter(torch.ones(3)), torch.amp.GradScaler("cpu")
    raw = torch.optim.SGD([parameter], lr=0.1)
    opt = ampx.wrap_optimizer(torch.optim.SGD([parameter], lr=0.1))

    def native():
        raw.zero_grad()
        scaler.scale(parameter.sum()).backward()
        scaler.unscale_(raw)
        parameter.grad *= 2
        scaler.step(raw)
        scaler.update()

    def step():
        opt.zero_grad()
        with ampx.scale_loss(parameter.sum(), opt) as scaled:
            scaled.backward()
        ampx.unscale(opt)
        parameter.grad *= 2
        opt.step()

    assert count(step) == count(native) > 0


def test_waits_are_counted():
    with CountsWaits() as counter:
        torch.ones(()).item()
        bool(torch.ones(()))
        torch.equal(torch.ones(1), torch.ones(1))
    assert counter.waits == 3


def test_several_losses_and_accumulation_never_wait_with_the_scale_on_the_device(amp):
    parameter, opt = wrapped()
    group = ampx.wrap_optimizer(
        [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, fused=True) for _ in range(2)], device_scale=True
    )

    def step():
        opt.zero_grad()
        for loss_id in (0, 1, 0, 1):
            with ampx.scale_loss(parameter.sum(), opt, loss_id=loss_id) as scaled:
                scaled.backward()
        opt.step()
        for _ in range(2):
            with ampx.scale_loss(
                sum(optimizer.param_groups[0]["params"][0].sum() for optimizer in group), group
            ) as scaled:
                scaled.backward()
        for optimizer in group:
            optimizer.step()
            optimizer.zero_grad()

    assert count(step) == 0


def test_gradients_that_nobody_cleared_never_wait_with_the_scale_on_the_device(amp):
    (parameter, opt), (reached, other) = wrapped(), wrapped()

    def step():
        other.zero_grad()
        for loss, optimizer in ((parameter.sum() + reached.sum(), opt), (reached.sum(), other)):
            with ampx.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()

    assert count(step) == 0


def test_a_loss_on_an_accelerator_is_not_read():
    inspect_loss = TorchBackend().inspect_loss
    loss = torch.ones((), device="meta", requires_grad=True)  # a device that is not the host, and has no values
    assert inspect_loss(loss, None).nan is None
    assert inspect_loss(torch.ones((), requires_grad=True), None).nan is False
    with pytest.raises(RuntimeError, match="meta"):
        inspect_loss(loss, True)
