"""The lines of code that commands and errors print are pasted into the script that they are about, and it runs."""

import math
import re

import pytest

from ampx.numerics.diagnose_script import diagnose_script
from ampx.run import RunSettings
from ampx.run.program import Program
from processes import run_here, run_python

BEGIN = """
import torch
from torch import nn

class Energy(nn.Module):
    def forward(self, x):
        return x.square().log().mean(-1, keepdim=True)  # squares are beyond float16

torch.manual_seed(0)
"""
TRAIN = """
for step in range(6):
    optimizer.zero_grad()
    loss = (FORWARD - 1).square().mean()
    loss.backward()
    optimizer.step()
print(loss.item())
"""
ONE = """
model = nn.Sequential(nn.Linear(8, 16), LAYER, nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
TWO_MODELS = """
stem = nn.Linear(8, 8)
model = nn.Sequential(nn.Linear(8, 16), LAYER, nn.Linear(1, 1))
optimizer = torch.optim.SGD([*stem.parameters(), *model.parameters()], lr=0.01)
"""
TWO_OPTIMIZERS = """
model = nn.Sequential(nn.Linear(8, 16), LAYER, nn.Linear(1, 1))
optimizer_1 = torch.optim.SGD(model[0].parameters(), lr=0.01)
optimizer_2 = torch.optim.SGD(model[2].parameters(), lr=0.01)
"""
WRAPPED = (
    "optimizer = ampx.wrap_optimizer(optimizer)",
    "with ampx.scale_loss(loss, optimizer) as scaled: scaled.backward()",
)
WELL = {"LAYER": "nn.Linear(16, 1)", "FORWARD": "model(torch.randn(4, 8))"}
FAILS = {"LAYER": "Energy()", "FORWARD": "model(torch.randn(4, 8) * 1e4)"}


def script(models, **words):
    text = BEGIN + models + TRAIN
    for word, code in {
        **words,
        **({"optimizer.": "for each in (optimizer_1, optimizer_2): each."} if "_1" in models else {}),
    }.items():
        text = (
            text.replace(word, code)
            if word != "optimizer."
            else re.sub(r"^    optimizer\.", f"    {code}", text, flags=re.M)
        )
    return text


def pasted(text, lines):
    """Return a script with lines of code behind the making of its optimizers; that which scales comes for backward."""
    scales = [line for line in lines if "scale_loss" in line]
    start = [line for line in lines if line not in scales]
    head, loop, body = text.partition("\nfor step")
    (scale,) = scales
    return "\n".join(["import ampx", head, *start]) + loop + body.replace("loss.backward()", scale)


def printed(folder, text):
    """Run a script by Python; return what it prints."""
    (folder / "pasted.py").write_text(text)
    return run_python("pasted.py", cwd=folder, check=True).stdout


def by_hand(stderr):
    """Return the lines that the summary of `ampx run` calls by hand, the last ones of it."""
    first, *rest = stderr.partition("  by hand     ")[2].splitlines()
    return [first, *(line[14:] for line in rest if line.startswith(" " * 14))]


@pytest.mark.each_value
@pytest.mark.parametrize("models", [ONE, TWO_MODELS, TWO_OPTIMIZERS], ids=["one", "two models", "two optimizers"])
@pytest.mark.parametrize("policy", [False, True], ids=["", "policy"])
def test_what_run_calls_the_same_by_hand_trains_the_same(tmp_path, models, policy):
    forward = {"FORWARD": "model(stem(torch.randn(4, 8)))"} if models is TWO_MODELS else {}
    text = script(models, **{**WELL, **forward})
    (tmp_path / "train.py").write_text(text)
    options = ["--dtype", "bfloat16"]
    if policy:
        (tmp_path / "ampx.toml").write_text('dtype = "bfloat16"\ndeny = ["module:2"]\n')
        options = ["--policy", "ampx.toml"]
    done = run_python(
        "-m", "ampx", "run", *options, "--device", "cpu", "train.py", cwd=tmp_path, check=True, nests=True
    )
    lines = by_hand(done.stderr)
    assert len(lines) >= 3 + policy
    # That the model is `model` and the optimizer `optimizer` is what these lines take for granted.
    assert printed(tmp_path, pasted(text, lines)) == done.stdout


@pytest.mark.parametrize(
    ("models", "forward"),
    [
        (ONE, FAILS["FORWARD"]),
        (ONE, "model[1](model[0](torch.randn(4, 8) * 1e4)).detach() - model(torch.randn(4, 8) * 1e4)"),
        (TWO_MODELS, "model(stem(torch.randn(4, 8)).float() * 1e4)"),
    ],
    ids=["one", "a part by itself", "two models"],
)
def test_what_diagnose_proposes_cures_the_script(tmp_path, models, forward):
    text = script(models, **{**FAILS, "FORWARD": forward})
    (tmp_path / "train.py").write_text(text)
    settings = RunSettings("float16", device="cpu")
    diagnosis, _ = diagnose_script(
        Program(str(tmp_path / "train.py")), settings, framework="torch", run=lambda trial: run_here(trial, tmp_path)
    )
    assert (diagnosis.kind, diagnosis.deny) == ("overflow", ("module:1",))
    first = diagnosis.advice.partition("\n# or")[0].splitlines()
    assert all(line in str(diagnosis) for line in first)
    without = pasted(text, ["ampx.init(dtype='float16', nan_loss='skip')", *WRAPPED])
    assert not math.isfinite(float(printed(tmp_path, without)))
    assert math.isfinite(float(printed(tmp_path, pasted(text, [*first, *WRAPPED]))))


def test_what_diagnose_proposes_for_a_policy_file_cures_the_script_run_by_it(tmp_path):
    """A model as a whole has no name by which `deny` in code could keep it in float32."""
    models = "\nstem, model = nn.Linear(8, 16), Energy()\noptimizer = torch.optim.SGD(stem.parameters(), lr=0.01)\n"
    (tmp_path / "train.py").write_text(script(models, FORWARD="model(stem(torch.randn(4, 8) * 1e3))"))
    program, settings = Program(str(tmp_path / "train.py")), RunSettings("float16", device="cpu")
    diagnosis, _ = diagnose_script(program, settings, framework="torch", run=lambda trial: run_here(trial, tmp_path))
    (line,) = diagnosis.advice.splitlines()
    assert "in a policy file" in line
    losses = []
    for entries in ("", line):
        (tmp_path / "ampx.toml").write_text(f'dtype = "float16"\n{entries}\n')
        command = ("run", "--policy", "ampx.toml", "--device", "cpu", "train.py")
        losses.append(float(run_python("-m", "ampx", *command, cwd=tmp_path, nests=True).stdout))
    assert [math.isfinite(loss) for loss in losses] == [False, True]


def test_what_tune_says_of_its_file_trains_as_float32_does(tmp_path):
    text = script(ONE, **FAILS)
    (tmp_path / "train.py").write_text(text)
    options = ["--dtype", "float16", "--device", "cpu", "--steps", "2", "--repeats", "0"]
    done = run_python("-m", "ampx", "tune", *options, "train.py", cwd=tmp_path, check=True, nests=True)
    (lines,) = re.findall(r"^Written: ampx\.toml; .* or by (.*) before wrap_optimizer\.$", done.stdout, flags=re.M)
    assert math.isfinite(float(printed(tmp_path, pasted(text, [*lines.split(" and "), *WRAPPED]))))


ERRORS = {
    "init before torch is imported": ("import ampx\nampx.init()\n", "ampx.init()"),
    "a model that was not searched": (
        "import ampx\nimport torch\nmodel = torch.nn.Sequential(torch.nn.Linear(2, 2))\n"
        "amp = ampx.init(dtype='bfloat16', deny=['module:0'])\n"
        "ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))\n",
        "ampx.wrap_optimizer",
    ),
}


@pytest.mark.parametrize(("text", "failing"), ERRORS.values(), ids=ERRORS)
def test_the_call_that_an_error_proposes_makes_the_script_run(tmp_path, text, failing):
    (tmp_path / "train.py").write_text(text)
    done = run_python("train.py", cwd=tmp_path)
    assert done.returncode == 1
    call = re.findall(r"ampx\.\w+\([^()]+\)", done.stderr.splitlines()[-1])[-1]
    line = call if failing == "ampx.init()" else f"{call}\n{failing}"
    printed(tmp_path, text.replace(failing, line))
