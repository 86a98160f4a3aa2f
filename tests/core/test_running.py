"""What core and backends share in `ampx run`: the recorder, refusals, and one session at a time."""

import itertools

import pytest

import ampx
from ampx.backend import offer
from ampx.events import ScaleChanged, ScaleCollapsed, StepSkipped
from ampx.numerics.meter import Meter, ParameterMeter
from ampx.run import Automation, Recorder, Run, RunSettings, recorder, script_line
from ampx.run.report import scale_trace, summary_lines
from ampx.session import sessions


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes one second further whenever somebody looks."""
    ticks = itertools.count()
    monkeypatch.setattr(recorder, "perf_counter", lambda: float(next(ticks)))


@pytest.fixture
def toy():
    import toy.plugin as plugin

    if "toy" not in ampx.backends():
        ampx.register_plugin(plugin)
    yield
    ampx.shutdown()


@pytest.mark.usefixtures("clock")
def test_time_belongs_to_the_innermost_phase_and_what_is_between_to_forward():
    seen = Recorder()
    seen.add_optimizer("SGD", 1.0)  # the clock says 0
    with seen.phase("backward"):  # 1
        pass  # 2
    with seen.phase("step"), seen.phase("backward"):  # 3, 4
        pass  # 5, 6
    assert seen.seconds == {"forward": 1.0 + 1.0, "backward": 1.0 + 1.0, "step": 1.0 + 1.0}


@pytest.mark.usefixtures("clock")
def test_time_before_the_first_optimizer_and_after_the_last_phase_is_nobodys():
    seen = Recorder()
    with seen.phase("backward"):
        pass
    assert seen.seconds == {"backward": 1.0}


def test_events_become_skipped_steps_and_the_way_of_the_scale():
    seen = Recorder()
    group = seen.add_optimizer("SGD", 8.0)
    labels = ("toy", group, 0)
    for event in (
        StepSkipped(*labels, 2, 8.0, 4.0, 1),
        ScaleChanged(*labels, 2, 8.0, 4.0, 1),
        ScaleChanged(*labels, 9, 4.0, 8.0, 0),
    ):
        seen.hear(event)
    seen.stepped(group, 9)
    (optimizer,) = seen.to_json()["optimizers"]
    assert (optimizer["skipped"], scale_trace(optimizer)) == ([2], "8 → 4 (step 2) → 8 (step 9)")
    assert seen.to_json()["skipped"] == 1


def test_a_long_way_of_the_scale_is_told_in_one_line():
    trace = scale_trace({"initial_scale": 1024.0, "scales": [(step, 2.0**step) for step in range(1, 21)]})
    assert trace.startswith("1024 → 2 (step 1) → 4 (step 2) → 8 (step 3) → … 14 more … → ")
    assert trace.endswith(f"→ {2.0**20:g} (step 20)")


def test_operations_are_sampled_in_the_first_steps_only():
    seen = Recorder(sampled_steps=2)
    group = seen.add_optimizer("SGD", 1.0)
    assert seen.sampling
    seen.stepped(group, 2)
    assert not seen.sampling


def test_a_refusal_names_the_line_of_the_script_and_is_remembered():
    run = Run("toy")
    with pytest.raises(ampx.RunRefusedError, match=r"test_running\.py:\d+: it cannot be done\.$") as caught:
        run.refuse("it cannot be done")
    assert run.refusal is caught.value
    assert "test_running.py" in script_line()


def test_an_automated_loop_is_explained_by_lines_of_code(toy):
    from ampx.plugins import default_registry
    from toy import framework

    run = Run("toy", RunSettings(dtype="float16"))
    weights = framework.Tensor([1.0, 2.0], parameter=True)
    with offer(default_registry().load("toy"), Automation).automate(run):
        optimizer = framework.Optimizer([weights], lr=0.5)
        for slopes in ([1.0, 1.0], [float("inf"), 0.0]):
            framework.pull([weights], [slopes]).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert weights.data == (0.5, 1.5)
    assert run.recorder.to_json()["optimizers"] == [
        {
            "kind": "Optimizer",
            "initial_scale": 65536.0,
            "place": "",
            "steps": 2,
            "skipped": [2],
            "scales": [(2, 32768.0)],
            "group": 0,
        }
    ]
    assert run.explain()[0] == "amp = ampx.init('toy', dtype='float16', level='O1')"


def test_lines_by_hand_wrap_every_optimizer(toy):
    run = Run("toy", RunSettings("float16"))
    run.session()
    run.recorder.add_optimizer("Adam", 8.0, place="/there/train.py:4")
    run.recorder.add_optimizer("SGD", 8.0, place="/there/train.py:5")
    run.recorder.add_optimizer("SGD", 8.0, place="/there/train.py:5")  # the same line in a loop
    run.recorder.add_optimizer("Adam", 8.0, group=3)
    run.recorder.add_optimizer("Adam", 8.0, group=3)  # shares the loss scale
    assert run.explain()[1:] == (
        "optimizer_1 = ampx.wrap_optimizer(optimizer_1)  # Adam of train.py:4",
        "optimizer_2 = ampx.wrap_optimizer(optimizer_2)  # SGD of train.py:5",
        "optimizer_3, optimizer_4 = ampx.wrap_optimizer([optimizer_3, optimizer_4])  # Adam, Adam",
        "with ampx.scale_loss(loss, [optimizer_1, optimizer_2, optimizer_3, optimizer_4]) as scaled: scaled.backward()"
        "  # of these, those that the loss trains",
    )


def test_lines_by_hand_of_many_optimizers_are_of_a_list(toy):
    run = Run("toy", RunSettings("float16"))
    run.session()
    for line in range(35):
        run.recorder.add_optimizer("Adam", 8.0, place=f"/there/gan.py:{line}")
    first = "optimizers = [ampx.wrap_optimizer(optimizer) for optimizer in optimizers]"
    assert run.explain()[1:] == (
        f"{first}  # 35, such as Adam of gan.py:0, Adam of gan.py:1",
        "with ampx.scale_loss(loss, optimizers) as scaled: scaled.backward()  # of these, those that the loss trains",
    )


def test_lines_by_hand_are_those_for_a_trainer_where_one_trains(toy):
    run = Run("toy", RunSettings("float16", loss_scale=8.0), trainer=("attach(trainer, amp)",))
    run.session()
    run.recorder.add_optimizer("Adam", 8.0)
    call = "amp = ampx.init('toy', dtype='float16', level='O1', loss_scale=8.0, process_wide=False)"
    assert run.explain() == (call, "attach(trainer, amp)")


def test_lines_by_hand_leave_out_optimizers_that_never_stepped(toy):
    run = Run("toy", RunSettings("float16"))
    run.session()
    run.recorder.add_optimizer("Adam", 8.0, group=1)
    run.recorder.add_optimizer("RMSprop", 8.0, group=2)
    run.recorder.stepped(1)
    assert run.explain()[1] == "optimizer = ampx.wrap_optimizer(optimizer)"


def test_lines_by_hand_deny_what_the_run_denied(toy, monkeypatch):
    run = Run("toy", RunSettings("float16", deny=("product",), loss_scale=8.0))
    run.session()
    call, wrap, _ = run.explain()
    assert call == "amp = ampx.init('toy', dtype='float16', level='O1', deny=['product'], loss_scale=8.0)"
    run.settings = RunSettings("float16", deny=("module:head",))
    assert run.explain()[1] == wrap  # calls find the module
    monkeypatch.setattr(type(run.amp.backend), "prepare_finds_modules", True)
    assert run.explain()[1:3] == ("model = amp.prepare(model)  # the model whose modules are named", wrap)
    by_file = Run("toy", RunSettings("float16", deny=("mul",), policy="/there/ampx.toml"))
    assert by_file.init_call() == "amp = ampx.init('toy', policy='/there/ampx.toml')"


def test_losses_of_few_steps_are_kept_spread_over_all_and_read_at_the_end():
    seen, read = Recorder(), []
    seen.add_optimizer("SGD", 1.0)
    seen.curve = recorder.LossCurve()
    for step in range(1, 2001):
        if seen.wants_losses:
            seen.saw_loss(lambda step=step: read.append(step) or float(step))
        seen.stepped(0)
    assert not read
    points = seen.to_json()["losses"]
    assert all(step == loss for step, loss in points)
    assert [step for step, _ in points] == list(range(1, 2001, 8))
    seen.curve.loss(lambda: float("nan"))
    seen.stepped(0)
    assert seen.to_json()["losses"][-1] == (2001, "nan")
    seen.begin_child()
    assert seen.to_json()["losses"] == []


def test_losses_of_optimizers_that_take_turns_are_kept_alike_and_told_apart(monkeypatch):
    monkeypatch.setattr("ampx.run.recorder.CURVE_POINTS", 8)
    seen = Recorder()
    critic, actor, idle = (seen.add_optimizer("Adam", 1.0, place=f"/there/gan.py:{line}") for line in (6, 7, 8))
    seen.curve = recorder.LossCurve()
    for _ in range(16):
        for group, loss in ((critic, 0.5), (critic, 0.25), (actor, 2.0)):
            if seen.wants_losses:
                seen.saw_loss(lambda loss=loss: loss)
            seen.stepped(group)
        seen.stepped(idle)  # on the loss of another
    report = seen.to_json()
    losses = {name: [] for name in ("Adam (gan.py:6)", "Adam (gan.py:7)")}
    for (step, loss), name in zip(report["losses"], report["losses_of"], strict=True):
        losses[name].append((step, loss))
    # Each eighth step of its own: of the critic the first of two in each fourth turn, of the actor that in each eighth.
    assert losses == {
        "Adam (gan.py:6)": [(step, 0.5) for step in (1, 17, 33, 49)],
        "Adam (gan.py:7)": [(step, 2.0) for step in (3, 35)],
    }


def test_only_one_framework_is_automated(toy):
    first = Run("toy")
    second = Run("toy-explicit", peers=first.peers)
    first.session()
    with pytest.raises(ampx.RunRefusedError, match="trains with toy and with toy-explicit"):
        second.session()


def test_a_session_that_the_script_starts_itself_is_recorded(toy):
    from toy import framework

    began = []
    run = Run("toy", RunSettings(dtype="bfloat16"))
    own = run.session()
    run.record_own_sessions(lambda: began.append(ampx.current("toy")))
    weights = framework.Tensor([1.0], parameter=True)
    amp = ampx.init("toy", dtype="float16")
    amp.recipe = "an old recipe"
    assert (run.amp, bool(run.stood_down), began) == (amp, True, [amp])
    assert own is not amp
    optimizer = ampx.wrap_optimizer(framework.Optimizer([weights], lr=0.5), loss_scale=8.0)
    for slope in (1.0, 1.0):
        with ampx.scale_loss(framework.pull([weights], [[slope]]), optimizer) as scaled:
            scaled.backward()
        run.look()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    (record,) = run.recorder.optimizers.values()
    assert (record.kind, record.initial_scale, record.steps) == ("Optimizer", 8.0, 2)
    assert ["an old recipe" in note for note in run.recorder.notes] == [True]
    assert ampx.current("toy") is amp
    ampx.init("toy")
    assert run.amp is amp  # it has ended: nobody watches any more


def test_steps_sampled_anew_are_those_after_the_restart():
    seen = Recorder()
    group = seen.add_optimizer("SGD", 1.0)
    seen.count_op("mm", "float32")
    seen.stepped(group, 2)
    seen.restart_sampling()
    assert (dict(seen.ops), seen.steps_sampled, seen.sampling) == ({}, 0, True)
    seen.stepped(group, 3)
    assert (seen.steps_sampled, seen.sampling) == (3, False)


def test_the_meter_is_read_after_100_steps_and_then_ever_more_rarely_for_reading_may_wait_for_the_device():
    read = []
    seen = Recorder()
    group = seen.add_optimizer("SGD", 1.0)
    rows = tuple(ParameterMeter(name, "bfloat16", 4, 4, lost, 0, 0, 3.0) for name, lost in (("a", 4), ("b", 0)))

    def metering():
        read.append(seen.steps)
        yield 7, "SGD", Meter(seen.steps, "bfloat16", 1.0, rows)
        yield 8, "Adam", None

    seen.metering = metering
    for _ in range(1000):
        seen.stepped(group)
    assert read == [100, 200, 400, 800]
    (record,) = seen.to_json()["meters"]
    assert (record["steps"], record["lost"]) == (read, [0.5] * 4)
    assert record["map"]["lost"] == [[1.0] * 4, [0.0] * 4]
    lines = list(summary_lines({**REPORT, **seen.to_json()}))
    assert (
        "  meter       SGD, step 800: 50.0% of the updates rounded to nothing, 0.0% of the gradients flush to zero in "
        "bfloat16, 3 bits to overflow" in lines
    )


REPORT = {
    "framework": "toy",
    "dtype": "bfloat16",
    "device": "cpu",
    "level": "O1",
    "reason": "asked for",
    "rank": 0,
    "world_size": 1,
    "processes": [],
    "lines": [],
}


def test_an_observed_run_is_metered_as_often_as_was_asked_for():
    class Nobody:
        def stepped(self, steps):
            pass

    seen = Recorder()
    seen.observer, seen.meter_every, read = Nobody(), 3, []
    seen.metering = lambda: read.append(seen.steps) or ()
    group = seen.add_optimizer("SGD", 1.0)
    for _ in range(10):
        seen.stepped(group)
    assert read == [3, 6, 9]


def test_a_collapse_of_the_scale_names_the_command_that_says_why():
    seen = Recorder()
    group = seen.add_optimizer("SGD", 8.0)
    event = ScaleCollapsed("toy", group, 0, 50, 1.0, 1.0, 50, ("w",))
    seen.hear(event)
    assert "`ampx diagnose`" in event.advice
    assert seen.notes == [f"The loss scale of SGD collapsed by step 50: {event.advice}"]
    with pytest.warns(ampx.ScaleCollapsedWarning, match="`ampx diagnose`"):
        sessions.emit("toy", event)
