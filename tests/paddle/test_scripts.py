"""`ampx compare`, `ampx diagnose` and `ampx tune` on whole scripts with a planted fault, which nobody edits."""

import json
import textwrap
from pathlib import Path

import paddle
import pytest

import ampx
from ampx.numerics.compare_script import compare_script
from ampx.numerics.diagnose_script import diagnose_script
from ampx.numerics.trial import Trial
from ampx.numerics.tune_script import tune_script
from ampx.run import RunSettings
from ampx.run.program import Program
from processes import run_here

pytestmark = pytest.mark.filterwarnings(
    "ignore:To copy construct from a tensor:UserWarning",
    "ignore:Tensor do not have 'place' interface:UserWarning",
    "ignore:When training, we now always track global mean and variance:UserWarning",
    "ignore:mixed precision is off on cpu:ampx.PrecisionWarning",
)
# Its second layer takes the logarithm of 0 in the third batch; its third is beyond float16 in all of them.
SCRIPT = """
    import json
    import sys

    import numpy as np
    import paddle
    from paddle import nn

    mode = sys.argv[1]
    if mode == "static":
        paddle.enable_static()


    class Entropy(nn.Layer):
        def forward(self, x):
            probabilities = nn.functional.softmax(x)
            return paddle.log(nn.functional.relu(probabilities - 0.1))


    class Times(nn.Layer):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def forward(self, x):
            return x * self.factor


    net = nn.Sequential(nn.Linear(2, 2), Entropy(), Times(2.0**17), Times(2.0**-17), nn.Linear(2, 1))
    batches = [np.full([4, 2], factor, "float32") * [1.0, -1.0] for factor in (0.01, 0.02, 50.0, 0.01)]
    batches = [batch.astype("float32") for batch in batches]

    losses = []
    if mode == "static":
        data = paddle.static.data("data", [4, 2], "float32")
        data.stop_gradient = False
        loss = (net(data) ** 2).mean()
        paddle.optimizer.SGD(0.01).minimize(loss)
        executor = paddle.static.Executor()
        executor.run(paddle.static.default_startup_program())
        losses = [executor.run(feed={"data": batch}, fetch_list=[loss])[0].item() for batch in batches]
    elif mode == "fit":
        model = paddle.Model(net)
        model.prepare(paddle.optimizer.SGD(0.01, parameters=net.parameters()), nn.MSELoss())
        zeros = np.zeros([4, 1], "float32")
        model.fit([(batch, zeros) for batch in batches], epochs=1, verbose=0)
    else:
        call = paddle.jit.to_static(net, full_graph=True) if mode == "to_static" else net
        optimizer = paddle.optimizer.SGD(0.01, parameters=net.parameters())
        for batch in batches:
            loss = (call(paddle.to_tensor(batch)) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses.append(float(loss))
    print(json.dumps(losses))
"""


@pytest.fixture
def here(tmp_path):
    """Run a trial in this process, which is in eager mode before and after, in programs of its own."""

    def run(trial):
        programs = paddle.static.program_guard(paddle.static.Program(), paddle.static.Program())
        try:
            with programs, paddle.static.scope_guard(paddle.static.Scope()), paddle.utils.unique_name.guard():
                return run_here(trial, tmp_path)
        finally:
            paddle.disable_static()

    return run


@pytest.fixture
def script(tmp_path):
    """Return the script as a program, in one of its modes."""

    def write(mode):
        (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
        return Program(str(tmp_path / "train.py"), arguments=(mode,))

    return write


@pytest.mark.parametrize("mode", ["eager", "to_static", "fit"])
def test_diagnose_names_the_layer_and_the_line_and_says_that_nothing_was_cast(here, script, mode):
    diagnosis, report = diagnose_script(script(mode), RunSettings(device="cpu"), framework="paddle", run=here)
    assert (report["step"], report["fault"], diagnosis.kind, diagnosis.float32_fails) == (3, "loss", "logarithm", True)
    place = diagnosis.first_nonfinite
    line = 1 + textwrap.dedent(SCRIPT).splitlines().index(
        "        return paddle.log(nn.functional.relu(probabilities - 0.1))"
    )
    assert (place.module, place.operation, place.place.rpartition(":")[2]) == ("1", "log", str(line))
    assert "clip(" in diagnosis.advice
    assert "ampx.init" not in diagnosis.advice  # another dtype does not help
    (note,) = report["notes"]
    assert "eager Paddle computes float32 on the CPU" in note
    assert "--what-if" in note


def test_losses_of_a_static_graph_are_the_script_s_own(here, script, capfd):
    outcome = here(Trial(script("static"), RunSettings("float32", device="cpu"), "paddle"))
    printed = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert str(list(outcome.losses)) == str(printed)
    assert (outcome.skipped, outcome.notes) == ([3], ())


def test_diagnose_of_a_static_graph_says_that_it_has_no_calls_to_look_at(here, script):
    with pytest.raises(ampx.TrialError, match=r"step 3 of .*Paddle's static programs run without"):
        diagnose_script(script("static"), RunSettings(device="cpu"), framework="paddle", run=here)


def test_tune_of_an_eager_script_says_why_nothing_is_cast_and_simulates_what_it_is_asked_for(here, script):
    settings, options = RunSettings(device="cpu"), {"framework": "paddle", "steps": 2, "repeats": 0, "run": here}
    policy, _ = tune_script(script("eager"), settings, **options)
    assert policy.dtype == "float32"
    assert "eager Paddle computes float32 on the CPU" in policy.reasons["dtype"]
    policy, _ = tune_script(script("eager"), settings, what_if="float16", **options)
    assert policy.dtype == "float16"
    assert {choice.entry for choice in policy.deny} == {
        "module:2",
        "module:3",
    }  # the second receives what the first made


@pytest.mark.parametrize("mode", ["eager", "to_static", "fit"])
def test_what_is_trained_is_told_with_its_shape_and_gradients_in_the_steps_that_are_asked_for(here, script, mode):
    trial = Trial(script(mode), RunSettings("float32", device="cpu"), "paddle", steps=2, gradients=(2,))
    (sampled,) = here(trial).gradients.values()
    assert [entry.shape for entry in sampled] == [(2, 2), (2,), (2, 1), (1,)]
    assert [entry.values.size for entry in sampled] == [4, 2, 2, 1]
    assert all(entry.values.any() for entry in sampled[-2:])


PLAIN = Program(str(Path(__file__).parents[1] / "programs" / "plain" / "paddle_plain.py"))


def test_compare_of_the_project_s_program_says_that_the_cpu_computes_float32_only(here):
    settings, options = RunSettings(device="cpu"), {"framework": "paddle", "steps": 4, "repeats": 1, "run": here}
    report = compare_script(PLAIN, settings, ["auto"], **options)
    assert (len(report["float32"]["losses"]), report["dtypes"], report["failed"]) == (4, {}, {})
    assert report["verdict"].startswith("Nothing was compared, since `auto` is float32 on this machine: eager Paddle")


@pytest.mark.gpu
def test_compare_of_the_project_s_program_finds_float16_right_and_names_layers_and_updates(here):
    report = compare_script(
        PLAIN, RunSettings(device="gpu"), ["float16"], framework="paddle", steps=4, repeats=1, run=here
    )
    facts = report["dtypes"]["float16"]
    assert facts["losses"] == pytest.approx(report["float32"]["losses"], rel=2.0**-8)  # eight roundings
    assert facts["losses"] != report["float32"]["losses"]
    assert (facts["skipped"], facts["ends_alike"], report["failed"]) == ([], True, {})
    assert facts["modules"]["worst_outputs"]
    assert facts["meters"][0]["last"]["parameters"]
