"""`ampx compare`, `ampx diagnose` and `ampx tune` on whole scripts with a planted fault, which nobody edits."""

import functools
import textwrap
from pathlib import Path

import pytest

from ampx.numerics.compare_script import compare_script
from ampx.numerics.diagnose_script import diagnose_script
from ampx.numerics.tune_script import tune_script
from ampx.run import RunSettings
from ampx.run.program import Program
from processes import run_here, run_python

pytestmark = pytest.mark.filterwarnings("ignore:mixed precision is off on cpu:ampx.PrecisionWarning")
# Its second layer has no digits left in bfloat16; its third takes the logarithm of 0 in the third batch.
SCRIPT = """
    import mxnet as mx
    from mxnet import autograd, gluon
    from mxnet.gluon import nn


    class Wide(nn.Dense):
        def hybrid_forward(self, F, x, weight):
            shifted = super().hybrid_forward(F, x + 300.0, weight)
            return F.broadcast_sub(shifted, F.sum(weight, axis=1).reshape((1, -1)) * 300.0)


    class Entropy(nn.HybridBlock):
        def hybrid_forward(self, F, x):
            return F.log(F.relu(F.softmax(x) - 1e-5))


    net = nn.HybridSequential()
    net.add(nn.Dense(4, in_units=4), Wide(4, in_units=4, use_bias=False), Entropy(), nn.Dense(1, in_units=4))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    data = mx.nd.random.normal(shape=(8, 4))
    for factor in (1.0, 1.0, FACTOR, 1.0):
        with autograd.record():
            loss = (net(data * factor) ** 2).mean()
        loss.backward()
        trainer.step(1)
"""


@pytest.fixture
def asked(tmp_path):
    """Return a function that asks one of the commands about the script, in this process."""

    def ask(command, factor, *arguments, **options):
        (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT).replace("FACTOR", factor))
        program, run = Program(str(tmp_path / "train.py")), functools.partial(run_here, folder=tmp_path)
        return command(program, RunSettings(device="cpu"), *arguments, framework="mxnet", run=run, **options)

    return ask


def test_diagnose_names_the_block_of_a_hybridized_network_and_the_line(asked):
    diagnosis, report = asked(diagnose_script, "100.0")
    assert (report["step"], report["fault"], diagnosis.kind, diagnosis.float32_fails) == (3, "loss", "logarithm", True)
    place = diagnosis.first_nonfinite
    line = 1 + textwrap.dedent(SCRIPT).splitlines().index("        return F.log(F.relu(F.softmax(x) - 1e-5))")
    assert (place.module, place.operation, place.place.rpartition(":")[2]) == ("2", "log", str(line))


@pytest.mark.bfloat16
def test_compare_names_the_step_and_the_block_where_bfloat16_parts(asked):
    report = asked(compare_script, "1.0", ["bfloat16"], steps=2, repeats=1)
    low = report["dtypes"]["bfloat16"]
    assert (low["parts_at"], low["modules"]["first"]["module"], low["skipped"]) == (1, "1", [])


@pytest.mark.bfloat16
def test_tune_denies_the_block_that_bfloat16_has_no_digits_for_and_no_other(asked):
    policy, report = asked(tune_script, "1.0", steps=2, repeats=0)
    assert [choice.entry for choice in policy.deny] == ["module:1"]
    assert '"module:1", # tune: relative error' in report["file"]


def losses_by_hand(folder, lines):
    """Run the script, with ampx by hand and these lines, or as it is; return the losses of two steps."""
    text = textwrap.dedent(SCRIPT).replace("FACTOR", "1.0")
    if lines:
        wrapped = f"import ampx\n{lines}\ntrainer = ampx.wrap_optimizer(trainer)\ndata ="
        text = text.replace("data =", wrapped).replace("loss.backward()", SCALED)
    # Without these names of NumPy MXNet cannot be imported.
    text = f"import numpy as np\nnp.bool, np.int = bool, int\n{text}    print(loss.asscalar())\n"
    (folder / "by_hand.py").write_text(text)
    printed = run_python("by_hand.py", cwd=folder, check=True).stdout.splitlines()
    return [float(line) for line in printed[:2]]


SCALED = "with ampx.scale_loss(loss, trainer) as scaled: scaled.backward()"


@pytest.mark.bfloat16
def test_what_tune_says_is_pasted_and_cures(asked, tmp_path):
    policy, report = asked(tune_script, "1.0", steps=2, repeats=0, out="mine.toml")
    policy.write(tmp_path / "mine.toml")
    exact = losses_by_hand(tmp_path, "")
    cured, broken = (
        losses_by_hand(tmp_path, lines) for lines in ("\n".join(report["lines"]), "ampx.init(dtype='bfloat16')")
    )
    assert cured == pytest.approx(exact, rel=policy.tolerance)
    assert broken != pytest.approx(exact, rel=policy.tolerance)


PADDED = """
import mxnet as mx
from mxnet import autograd, gluon

net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense(WIDTH, in_units=16), gluon.nn.Dense(8, in_units=WIDTH))
net.initialize(mx.init.Xavier())
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
for _ in range(3):
    with autograd.record():
        loss = (net(mx.nd.random.normal(shape=(8, 16))) ** 2).mean()
    loss.backward()
    trainer.step(1)
"""


@pytest.mark.bfloat16
@pytest.mark.parametrize("width", [64, 1021])
def test_diagnose_names_nothing_and_compare_the_weights_that_matrix_units_pad(tmp_path, width):
    (tmp_path / "train.py").write_text(PADDED.replace("WIDTH", str(width)))
    program, run = Program(str(tmp_path / "train.py")), functools.partial(run_here, folder=tmp_path)
    settings = RunSettings("bfloat16", device="cpu")
    diagnosis, report = diagnose_script(program, settings, framework="mxnet", run=run)
    assert (diagnosis, report["looked_at"], report["risks"]) == (None, 3, [])
    report = compare_script(program, settings, ["bfloat16"], framework="mxnet", steps=3, repeats=1, run=run)
    notes = [note for note in report["notes"] if note.startswith("Dimensions of ")]
    assert len(notes) == (width == 1021)
    for note in notes:
        assert "_weight (1021x16)" in note
        assert "_weight (8x1021)" in note
        assert "_bias" not in note


@pytest.mark.bfloat16
def test_compare_of_the_project_s_program_finds_bfloat16_right_and_names_blocks_and_updates(tmp_path):
    program = Program(str(Path(__file__).parents[1] / "programs" / "plain" / "mxnet_plain.py"))
    settings, run = RunSettings(device="cpu"), functools.partial(run_here, folder=tmp_path)
    report = compare_script(program, settings, ["bfloat16"], framework="mxnet", steps=4, repeats=1, run=run)
    facts = report["dtypes"]["bfloat16"]
    assert facts["losses"] == pytest.approx(report["float32"]["losses"], rel=2.0**-5)  # eight roundings
    assert facts["losses"] != report["float32"]["losses"]
    assert (facts["skipped"], facts["ends_alike"], report["failed"]) == ([], True, {})
    assert {entry["module"] for entry in facts["modules"]["worst_outputs"]} >= {"8", ""}
    assert facts["meters"][0]["last"]["parameters"]
    assert report["verdict"].startswith("bfloat16: ")
