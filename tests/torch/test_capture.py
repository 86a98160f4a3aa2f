"""Steps that are replayed without Python: each works on the memory of the one before, and the log tells all of them.

On a CPU there are no CUDA graphs. What one is, can be had: the operations of one step in their order, run again on
the same tensors, each result written where the first one lay.
"""

import copy
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ampx

WAITS = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal")


class Recording(TorchDispatchMode):
    """The operations of a step; replaying them runs nothing else."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split(".")[0]
        assert name not in WAITS, f"{name} cannot be captured"
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self):
        with torch.no_grad():
            for func, args, kwargs, result in self.calls:
                again = func(*args, **kwargs)
                for old, new in zip(flat(result), flat(again), strict=True):
                    if old is not new and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def flat(result):
    if isinstance(result, torch.Tensor):
        return [result]
    return [item for item in result if isinstance(item, torch.Tensor)] if isinstance(result, (list, tuple)) else []


class Training:
    """A parameter, a wrapped optimizer, and a static input that decides whether the step overflows."""

    def __init__(self, config=None, capturable=True, fused=torch.optim.AdamW, members=1, **options):
        self.parameters = [nn.Parameter(torch.ones(3)) for _ in range(members)]
        self.raws = [fused([parameter], lr=0.1, fused=True) for parameter in self.parameters]
        self.opts = ampx.wrap_optimizer(
            self.raws, loss_scale=config or ampx.LossScale(), capturable=capturable, device_scale=True, **options
        )
        self.opt = self.opts[0]
        self.input = torch.ones(3)

    def step(self):
        for opt in self.opts:
            opt.zero_grad()
        loss = sum((parameter * self.input).sum() for parameter in self.parameters)
        with ampx.scale_loss(loss, self.opts) as scaled:
            scaled.backward()
        for opt in self.opts:
            opt.step()

    def feed(self, bad):
        self.input.fill_(math.inf if bad else 1.0)


def record(training):
    training.feed(False)
    for _ in range(2):
        training.step()
    with Recording() as recording:
        training.step()
    return recording


CONFIGS = {
    "plain": ampx.LossScale(growth_interval=3),
    "hysteresis": ampx.LossScale(growth_interval=2, hysteresis=2),
    "bounds": ampx.LossScale(init_scale=4.0, max_scale=8.0, min_scale=2.0, growth_interval=1),
    "static": ampx.LossScale.static(8.0),
}


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pattern=st.lists(st.booleans(), max_size=10),
    reads=st.sets(st.integers(0, 9)),
    config=st.sampled_from(list(CONFIGS)),
    clip=st.sampled_from([None, 0.5]),
)
def test_replayed_steps_are_those_of_an_optimizer_that_ran_them(pattern, reads, config, clip, amp, same):
    events, expected_events = [], []
    remove = amp.on_event(lambda event: (events if event.group == index else expected_events).append(event))
    replayed = Training(CONFIGS[config], max_grad_norm=clip)
    index = replayed.opt.ampx_member.group.index
    recording = record(replayed)
    ordinary = Training(CONFIGS[config], capturable=False, max_grad_norm=clip)
    for _ in range(3):
        ordinary.step()
    for number, bad in enumerate(pattern):
        replayed.feed(bad)
        recording.replay()
        ordinary.feed(bad)
        ordinary.step()
        assert same(replayed.parameters[0].detach(), ordinary.parameters[0].detach())
        if number in reads:
            assert replayed.opt.last_step == ordinary.opt.last_step
    assert amp.state_dict(replayed.opts)["groups"] == amp.state_dict(ordinary.opts)["groups"]
    assert replayed.opt.last_step == ordinary.opt.last_step
    remove()
    assert [vars(event) | {"group": 0} for event in events] == [vars(event) | {"group": 0} for event in expected_events]


def test_a_group_moves_its_scale_once_a_replay(amp):
    training = Training(members=2)
    recording = record(training)
    training.feed(True)
    for _ in range(3):
        recording.replay()
    assert training.opt.loss_scale == 2.0**13
    assert [opt.last_step.consecutive_skips for opt in training.opts] == [3, 3]


def test_a_loaded_scale_reaches_the_steps_that_are_replayed(amp):
    training = Training(ampx.LossScale(growth_interval=100))
    recording = record(training)
    state = amp.state_dict(training.opts)
    state["groups"][0]["losses"][0]["scale"] = 64.0
    amp.load_state_dict(state, training.opts)
    training.feed(True)
    recording.replay()
    assert (training.opt.last_step.scale, training.opt.loss_scale) == (64.0, 32.0)


def test_more_replays_than_the_log_holds_lose_events_with_a_warning_but_not_the_scale(amp, monkeypatch):
    monkeypatch.setattr("ampx_torch.device_scale.capture.LOG", 8)
    events = []
    training = Training(ampx.LossScale(init_scale=2.0**24, growth_interval=100))
    recording = record(training)
    assert training.opt.loss_scale == 2.0**24
    amp.on_event(events.append)
    training.feed(True)
    for _ in range(12):
        recording.replay()
    with pytest.warns(ampx.AmpxWarning, match="4 replayed steps were overwritten"):
        assert training.opt.loss_scale == 2.0**12
    skipped = [event for event in events if isinstance(event, ampx.StepSkipped)]
    assert [event.step for event in skipped] == list(range(8, 16))
    assert training.opt.last_step.consecutive_skips == 12


def test_copies_go_on_with_the_scale_in_memory_of_their_own(amp):
    training = Training()
    recording = record(training)
    training.feed(True)
    recording.replay()
    copied = copy.deepcopy(training)
    copied.step()
    assert (copied.opt.loss_scale, training.opt.loss_scale) == (2.0**14, 2.0**15)


@pytest.mark.parametrize("case", ["loss id", "not fused", "contradiction", "value"])
def test_what_cannot_be_captured_is_refused(case, amp):
    fused, plain = (torch.optim.SGD([nn.Parameter(torch.ones(1))], fused=fused) for fused in (True, None))
    if case == "loss id":
        opt = ampx.wrap_optimizer(fused, capturable=True)
        with pytest.raises(ampx.UnsupportedByBackendError, match="loss_id=1"):
            ampx.scale_loss(torch.ones((), requires_grad=True), opt, loss_id=1).__enter__()
        return
    raw, options = {
        "not fused": (plain, {"capturable": True}),
        "contradiction": (fused, {"capturable": True, "device_scale": False}),
        "value": (fused, {"capturable": "yes"}),
    }[case]
    with pytest.raises(ampx.InvalidOptionError, match="capturable="):
        ampx.wrap_optimizer(raw, **options)


@pytest.mark.gpu(needs="capture into a CUDA graph")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_whole_step_is_captured_in_a_cuda_graph(clip):
    ampx.init("torch", device="cuda", dtype="float16", nan_loss="skip")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).cuda()
    raw = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, capturable=True)
    opt = ampx.wrap_optimizer(raw, loss_scale=ampx.LossScale(growth_interval=4), capturable=True, max_grad_norm=clip)
    x = torch.randn(8, 16, device="cuda")

    def step():
        opt.zero_grad()
        loss = model(x).float().square().mean()
        with ampx.scale_loss(loss, opt) as scaled:
            scaled.backward()
        opt.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    losses = []
    for _ in range(5):
        graph.replay()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert opt.loss_scale == 2.0**18  # three steps and five: two growths
    before = [parameter.detach().clone() for parameter in model.parameters()]
    x.fill_(math.inf)
    graph.replay()
    assert not opt.last_step.applied
    assert opt.loss_scale == 2.0**17
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
