"""`log_to`: which targets it takes, whose steps it writes, when it ends, and what it says where it cannot."""

import importlib
import json
import math
import types

import pytest

import ampx
from ampx.loggers.log import Log
from ampx.plugins import default_registry
from ampx.protocol import ScaleGroup


class Recorder:
    """A function that keeps what it is called with."""

    def __init__(self):
        self.rows = []

    def __call__(self, values, step):
        self.rows.append((step, values))

    @property
    def steps(self):
        return [step for step, _ in self.rows]


@pytest.fixture(autouse=True)
def _no_log_left(_isolated):
    yield
    ampx.shutdown()
    assert ScaleGroup.observer is None


@pytest.fixture
def training(alpha, make_trainer):
    ampx.init("alpha", loss_scale=ampx.LossScale(init_scale=8.0, growth_interval=100))
    return make_trainer(alpha)


def test_a_logger_with_log_metrics_is_called_by_that(training):
    recorder = Recorder()
    with ampx.log_to(types.SimpleNamespace(log_metrics=recorder), every=2) as log:
        for gradient in (1.0, math.inf, 1.0, 1.0):
            training.step(gradient)
    assert recorder.steps == [2, 4]
    assert recorder.rows[0][1] == {
        "ampx/loss_scale": 4.0,
        "ampx/consecutive_skips": 1,
        "ampx/skipped_steps": 1,
        "ampx/skipped_share": 0.5,
    }
    assert (log.every, log.rows) == (2, 4)  # with two events that have no curve


def test_a_writer_with_add_scalar_is_flushed_and_stays_open(training):
    calls = []
    writer = types.SimpleNamespace(
        add_scalar=lambda *point: calls.append(point), flush=lambda: calls.append("flush"), close=lambda: 1 / 0
    )
    with ampx.log_to(writer, every=1):
        training.step()
    assert calls[0] == ("ampx/loss_scale", 8.0, 1)
    assert calls[-1] == "flush"


def test_steps_before_the_log_are_not_counted(training):
    for gradient in (math.inf, 1.0, 1.0):
        training.step(gradient)
    recorder = Recorder()
    with ampx.log_to(recorder, every=4):
        for gradient in (1.0, 1.0, 1.0, math.inf, 1.0):
            training.step(gradient)
    assert recorder.steps == [4, 7, 8]
    assert recorder.rows[0][1]["ampx/skipped_share"] == 0.0
    assert recorder.rows[-1][1]["ampx/skipped_share"] == 0.25


def test_two_logs_have_intervals_of_their_own(training):
    often, rarely, heard = Recorder(), Recorder(), []
    ampx.on_event(heard.append)
    with ampx.log_to(often, every=2), ampx.log_to(rarely, every=3):
        for _ in range(6):
            training.step()
    training.step()
    assert (often.steps, rarely.steps) == ([2, 4, 6], [3, 6])
    assert [event.step for event in heard] == [2, 3, 4, 6]
    assert ScaleGroup.observer is None


def test_a_plugin_is_a_target_and_is_registered_as_long_as_it_is_one(training):
    class Plugin:
        def __init__(self):
            self.steps = []

        @ampx.hookimpl
        def ampx_event(self, event):
            if isinstance(event, ampx.Progress):
                self.steps.append(event.step)

    plugin = Plugin()
    with ampx.log_to(plugin, every=1):
        training.step()
    training.step()
    assert plugin.steps == [1]
    ampx.register_plugin(plugin, "mine")
    with ampx.log_to(plugin, every=1):
        training.step()
    assert plugin.steps == [1, 3]
    assert default_registry().manager.is_registered(plugin)


def test_a_log_is_of_one_framework(make_framework, make_trainer):
    alpha, beta = make_framework("alpha"), make_framework("beta")
    for framework in ("alpha", "beta"):
        ampx.init(framework, loss_scale="dynamic")
    with pytest.raises(ampx.NotInitializedError, match="log_to"):
        ampx.log_to(Recorder())
    recorder, trainers = Recorder(), [make_trainer(alpha), make_trainer(beta)]
    ampx.log_to(recorder, every=1, framework="beta")
    ampx.shutdown("alpha")
    for trainer in trainers[1:]:
        trainer.step()
    assert recorder.steps == [1]
    everything = Recorder()
    with Log(everything, 1, None):
        trainers[1].step()
    assert (everything.steps, recorder.steps) == ([2], [1, 2])


def test_a_log_ends_with_its_block_with_close_and_with_the_session(training):
    recorders = [Recorder() for _ in range(3)]
    with ampx.log_to(recorders[0], every=1):
        training.step()
    closed, _ = ampx.log_to(recorders[1], every=1), ampx.log_to(recorders[2], every=1)
    training.step()
    closed.close()
    closed.close()
    training.step()
    ampx.init("alpha", loss_scale="dynamic")  # replaces the session
    training.step()
    assert [recorder.steps for recorder in recorders] == [[1], [2], [2, 3]]


def test_what_a_target_raises_reaches_the_step_which_is_counted_all_the_same(training):
    def fail(values, step):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"), ampx.log_to(fail, every=1):
        training.step()
    assert training.opt.last_step.applied
    training.step()
    assert training.opt.ampx_group.steps == 2


def test_json_has_null_where_a_number_is_not_finite_and_names_what_collapsed(training, tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"event": "of the run before"}\n')
    training.opt.ampx_group.config = ampx.LossScale(max_consecutive_skips=1)
    with ampx.log_to(str(path), every=1):
        with pytest.warns(ampx.ScaleCollapsedWarning):
            training.step(math.inf)
        training.opt.ampx_group.send(ampx.Progress("alpha", 0, 0, 2, 8.0, 8.0, 0, 1, math.inf))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == [
        "of the run before",
        "StepSkipped",
        "ScaleChanged",
        "ScaleCollapsed",
        "Progress",
        "Progress",
    ]
    assert lines[3]["parameters"] == []
    assert lines[-1]["grad_norm"] is None


def test_a_checkpoint_that_goes_back_begins_the_count_anew(training):
    recorder = Recorder()
    ampx.log_to(recorder, every=2)
    for _ in range(8):
        training.step()
    training.opt.ampx_group.steps = 3  # as a ledger does whose variables were restored
    training.step()
    assert recorder.steps == [2, 4, 6, 8, 4]
    assert recorder.rows[-1][1]["ampx/skipped_share"] == 0.0


@pytest.mark.parametrize(
    "target", [3, None, object(), "run.txt", "tensorboard:", "elsewhere:run", "", print.__class__], ids=repr
)
def test_a_target_that_is_none_is_refused(training, target):
    with pytest.raises(ampx.InvalidOptionError, match=r"log_to got .*; accepted: a path that ends in \.jsonl, .*Pass"):
        ampx.log_to(target)
    assert ScaleGroup.observer is None


@pytest.mark.parametrize("every", [0, -1, 2.0, True, None, "10"])
def test_an_interval_that_is_none_is_refused(training, every):
    with pytest.raises(ampx.InvalidOptionError, match=r"every=.*; accepted: a number of steps from 1 on"):
        ampx.log_to(print, every=every)


def test_a_folder_that_is_not_there_is_told(training, tmp_path):
    with pytest.raises(ampx.InvalidOptionError, match=r"there is no folder .*Make the folder"):
        ampx.log_to(tmp_path / "none" / "run.jsonl")


@pytest.mark.parametrize(
    ("target", "package"),
    [("tensorboard:runs", "tensorboard"), ("wandb:project", "wandb"), ("mlflow:runs", "mlflow")],
)
def test_a_package_that_is_missing_is_told(training, monkeypatch, target, package):
    def find(name, *rest):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", find)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ampx.InvalidOptionError, match=f"not importable.*Install it with `pip install {package}`"):
        ampx.log_to(target)


def test_an_object_that_is_handed_over_is_looked_at(training):
    with ampx.log_to(print, every=1) as log, pytest.raises(ampx.NotWrappedError):
        log.observe("no optimizer")
    with ampx.log_to(print, every=2) as log:
        log.observe("not looked at before the second call")
