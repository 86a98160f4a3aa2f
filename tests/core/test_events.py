"""Results, events, the warning of a collapsed scale, and the gate."""

import contextlib
import copy
import math
import types
import warnings

import pytest

import ampx

INF = math.inf


@pytest.fixture
def trainer(alpha, make_trainer):
    ampx.init("alpha", loss_scale=ampx.LossScale(init_scale=8, growth_interval=2, max_consecutive_skips=3))
    return make_trainer(alpha)


def test_removing_one_registration_twice_leaves_the_other(trainer):
    seen = []
    remove = ampx.on_event(seen.append)
    ampx.on_event(seen.append)
    remove()
    remove()
    trainer.step(INF)
    assert [type(event) for event in seen] == [ampx.StepSkipped, ampx.ScaleChanged]


@pytest.mark.parametrize("listener", [None, "print", 3])
def test_a_listener_must_be_callable(trainer, listener):
    with pytest.raises(ampx.InvalidOptionError, match="listener"):
        ampx.on_event(listener)


def test_a_skip_at_the_lowest_scale_is_told_without_a_change(alpha, make_trainer):
    ampx.init("alpha", loss_scale=4)
    trainer, seen = make_trainer(alpha), []
    ampx.on_event(seen.append)
    trainer.step(INF)
    assert seen == [ampx.StepSkipped("alpha", 0, 0, 1, 4.0, 4.0, 1)]


def test_a_collapse_is_told_once_with_one_warning_that_names_the_parameters(trainer):
    seen = []
    ampx.on_event(seen.append)
    trainer.opt.ampx_culprits = lambda: ("layer.weight",)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(7):
            trainer.step(INF)
    collapsed = [event for event in seen if isinstance(event, ampx.ScaleCollapsed)]
    assert [(event.step, event.consecutive_skips, event.parameters) for event in collapsed] == [
        (3, 3, ("layer.weight",))
    ]
    assert [warning.category for warning in caught] == [ampx.ScaleCollapsedWarning]
    assert caught[0].filename.endswith("conftest.py")  # where the trainer calls `opt.step()`
    assert "layer.weight" in str(caught[0].message)
    trainer.step(1.0)
    trainer.step(INF)
    trainer.step(INF)
    with pytest.warns(ampx.ScaleCollapsedWarning):  # a new row of skips is a new collapse
        trainer.step(INF)


@pytest.mark.parametrize("gradient", [1.0, INF])
def test_state_and_result_are_complete_before_a_listener_runs(trainer, gradient):
    looked = []

    def look(event):
        looked.append((trainer.opt.loss_scale, trainer.opt.last_step.next_scale, trainer.opt.ampx_member.stage))
        raise KeyError("mine")

    trainer.step(1.0)
    remove = ampx.on_event(look)
    trainer.backward(gradient)
    with pytest.raises(KeyError):
        trainer.opt.step()
    scale = 16.0 if gradient == 1.0 else 4.0
    assert set(looked) == {(scale, scale, "idle")}
    remove()
    trainer.opt.zero_grad()
    assert trainer.step(1.0).scale == scale


def test_a_listener_that_raises_keeps_no_event_from_the_others(trainer):
    heard, plugin = [], types.ModuleType("listening")
    plugin.ampx_event = ampx.hookimpl(lambda event: heard.append(("plugin", type(event).__name__)))
    ampx.register_plugin(plugin)
    ampx.on_event(lambda event: 1 / 0)
    ampx.on_event(lambda event: heard.append(("listener", type(event).__name__)))
    trainer.backward(INF)
    with pytest.raises(ZeroDivisionError):
        trainer.opt.step()
    assert heard == [(who, event) for event in ("StepSkipped", "ScaleChanged") for who in ("listener", "plugin")]


@pytest.mark.parametrize("around", [False, True], ids=["plugins", "with-a-wrapper"])
def test_a_plugin_that_raises_keeps_no_event_from_the_others(trainer, around):
    def listening(name, listener, **marks):
        plugin = types.ModuleType(name)
        plugin.ampx_event = ampx.hookimpl(**marks)(listener)
        ampx.register_plugin(plugin)

    def wrapper(event):
        heard.append(("around", type(event).__name__))
        return (yield)

    heard = []
    listening("first", lambda event: heard.append(("first", type(event).__name__)))
    listening("second", (lambda event: None) if around else (lambda event: 1 / 0))
    listening("third", lambda: heard.append(("third", "whatever it is")))  # pluggy lets it take less
    if around:
        listening("around", wrapper, wrapper=True)
    trainer.backward(INF)
    with contextlib.nullcontext() if around else pytest.raises(ZeroDivisionError):
        trainer.opt.step()
    each = [("third", "whatever it is"), ("first", None)]
    each = [("around", None), *each] if around else each
    assert heard == [(who, what or event) for event in ("StepSkipped", "ScaleChanged") for who, what in each]


def test_a_listener_may_call_back(trainer, alpha):
    saved = ampx.state_dict()

    def reload(event):
        ampx.load_state_dict(saved)

    ampx.on_event(reload)
    trainer.step(INF)
    assert trainer.opt.loss_scale == 8.0


def test_naming_the_parameters_may_fail_without_harm(trainer):
    def fail():
        raise RuntimeError("cannot tell")

    trainer.opt.ampx_culprits = fail
    trainer.step(INF)
    trainer.step(INF)
    trainer.backward(INF)
    with pytest.raises(RuntimeError, match="cannot tell"):
        trainer.opt.step()
    assert trainer.opt.loss_scale == trainer.opt.last_step.next_scale == 1.0  # 8, 4, 2, 1
    assert trainer.opt.last_step.consecutive_skips == 3


# -- the gate -------------------------------------------------------------------------------------------


class Scheduler:
    def __init__(self):
        self.steps = []
        self.last_lr = 0.5

    def step(self, *args, **kwargs):
        self.steps.append((args, kwargs))


def test_what_is_set_on_a_gate_is_the_scheduler_s(trainer):
    scheduler = Scheduler()
    gate = ampx.gate(scheduler, trainer.opt)
    gate.last_lr = 0.25
    assert (scheduler.last_lr, gate.last_lr) == (0.25, 0.25)
    gate.label = "mine"  # which the scheduler does not have
    assert (gate.label, hasattr(scheduler, "label")) == ("mine", False)


def test_a_library_may_replace_the_step_of_a_gate(trainer):
    gate = ampx.gate(Scheduler(), trainer.opt)
    calls, step = [], gate.step
    gate.step = lambda: calls.append(step())
    trainer.step(1.0)
    gate.step()
    trainer.step(INF)
    gate.step()
    assert calls == [True, False]


def test_a_gate_that_waits_for_nobody_is_refused(trainer):
    with pytest.raises(ampx.InvalidOptionError, match="wait for nobody"):
        ampx.gate(Scheduler(), [])


@pytest.mark.parametrize("verb", ["update", "update_parameters"])
def test_averages_of_weights_wait_too(verb, trainer):
    average = type("Average", (), {verb: lambda self, *arguments: moves.append(arguments), "rate": 0.9})()
    moves = []
    gate = ampx.gate(average, trainer.opt)
    for size, expected in ((1.0, True), (INF, False), (1.0, True)):
        trainer.step(size)
        assert getattr(gate, verb)("model") is expected
    assert moves == [("model",), ("model",)]
    assert gate.rate == 0.9
    with pytest.raises(AttributeError):
        gate.step()


def test_what_has_nothing_to_wait_with_is_refused(trainer):
    with pytest.raises(ampx.InvalidOptionError, match="function, which has none of step, update"):
        ampx.gate(lambda: None, trainer.opt)


def test_a_copied_gate_follows_the_copied_optimizer(trainer):
    gate = ampx.gate(Scheduler(), trainer.opt)
    trainer.step(1.0)
    _, copied = copy.deepcopy((trainer.opt, gate))
    trainer.step(INF)
    assert (gate.step(), copied.step()) == (False, True)


def test_the_gate_is_open_when_disabled(alpha, make_trainer):
    ampx.init("alpha", enabled=False)
    trainer, scheduler = make_trainer(alpha), Scheduler()
    gate = ampx.gate(scheduler, trainer.opt)
    trainer.step(INF)
    assert gate.step() is True
