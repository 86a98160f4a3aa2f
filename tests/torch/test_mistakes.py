"""Mistakes with loss scales, which no step looks for: `diagnose` names them with their line, and training says nothing.

The numbers of the innocent are those of plain PyTorch without a loss scale.
"""

import copy

import pytest
import torch
from torch import nn

import ampx
from ampx.numerics.diagnose_script import diagnose_script
from ampx.run import RunSettings
from ampx.run.program import Program
from processes import run_here

SCRIPT = """
import ampx
import torch
from torch import nn
from torch.nn.utils import clip_grad_value_

torch.manual_seed(0)
amp = ampx.init("torch", dtype="float16", device="cpu")
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))
other = nn.Linear(32, 1)
raw = torch.optim.SGD(model.parameters(), lr=0.01)
opt = ampx.wrap_optimizer(raw, loss_scale=1024.0)


def clip():
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


for step in range(3):
    inputs = torch.randn(8, 32)
    with ampx.scale_loss(model(inputs).float().square().mean(), opt) as scaled:
        scaled.backward()
        INSIDE
    OUTSIDE
    opt.step()
    opt.zero_grad()
"""
MISTAKES = {
    "behind the block": ("pass", "nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "norm_(model"),
    "inside the block": ("clip_grad_value_(model.parameters(), 1.0)", "pass", "value_(model"),
    "in a function": ("pass", "clip()", "norm_(model"),
    "one tensor of several": ("pass", "nn.utils.clip_grad_norm_(model[0].weight, 1.0)", "norm_(model[0]"),
}
RIGHT = {
    "unscaled before": "ampx.unscale(opt); nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    "clipped by ampx": "ampx.clip_grad_norm(opt, 1.0)",
    "of another model": "nn.utils.clip_grad_norm_(other.parameters(), 1.0)",
    "written": "model[0].weight.grad *= 0.5",
}


@pytest.fixture
def looked_at(tmp_path):
    """Return a function that diagnoses a script, in this process, and returns the report and the script's lines."""

    def look(text):
        path = tmp_path / "train.py"
        path.write_text(text)
        settings = RunSettings("float16", device="cpu")
        program = Program(str(path))
        _, report = diagnose_script(program, settings, framework="torch", run=lambda t: run_here(t, tmp_path))
        return report, text.splitlines()

    return look


@pytest.mark.parametrize("case", MISTAKES)
def test_diagnose_names_the_line_that_clips_scaled_gradients_once(looked_at, case):
    inside, outside, called = MISTAKES[case]
    report, lines = looked_at(SCRIPT.replace("INSIDE", inside).replace("OUTSIDE", outside))
    (mistake,) = report["mistakes"]
    place = mistake.split(": ")[0]
    assert called in lines[int(place.rpartition(":")[2]) - 1]
    assert place.rpartition(":")[0].endswith("train.py")
    assert "ampx.unscale(opt)" in mistake


@pytest.mark.parametrize("case", RIGHT)
def test_diagnose_names_no_line_where_gradients_are_clipped_unscaled_or_written_to(looked_at, case):
    report, _ = looked_at(SCRIPT.replace("INSIDE", "pass").replace("OUTSIDE", RIGHT[case]))
    assert report["mistakes"] == []


@pytest.mark.parametrize("factor", ["1024.0", "1.0"])
def test_diagnose_names_a_clip_only_where_the_loss_scale_is_not_1(looked_at, factor):
    outside = "clip()"
    text = SCRIPT.replace("INSIDE", "pass").replace("OUTSIDE", outside).replace("1024.0", factor)
    assert len(looked_at(text)[0]["mistakes"]) == (factor != "1.0")


@pytest.mark.parametrize("region", ["amp.autocast()", "amp.autocast(enabled=False)"])
def test_diagnose_names_an_optimizer_that_steps_on_gradients_of_float16_without_a_loss_scale(looked_at, region):
    head, _, _ = SCRIPT.partition("for step")
    wrapped = (
        "    with ampx.scale_loss(other(inputs).float().square().mean(), opt) as scaled:\n        scaled.backward()\n"
    )
    loop = (
        "free = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "for step in range(3):\n"
        "    inputs = torch.randn(64, 32)\n"
        f"    with {region}:\n"
        "        loss = model(inputs).float().square().mean()\n"
        "        loss.backward()\n"
        "    free.step()\n"
        "    free.zero_grad()\n" + wrapped + "    opt.step()\n"
        "    opt.zero_grad()\n"
    )
    text = head.replace("SGD(model.parameters()", "SGD(other.parameters()") + loop
    report, lines = looked_at(text)
    assert len(report["mistakes"]) == ("enabled" not in region)
    for mistake in report["mistakes"]:
        assert "may have been" in mistake
        assert lines[int(mistake.split(": ")[0].rpartition(":")[2]) - 1] == "    free.step()"


# -- a step accuses nobody -------------------------------------------------------------------------


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def prune(parameters, step):
    """Keep a mask, whose norm is 0/0 in a step in which all is masked."""
    for parameter in parameters:
        parameter.grad *= float(step % 2)
        parameter.grad /= parameter.grad.norm().clamp(min=1e-30)


def average(parameters, step):
    """Average over 1 process, by hand."""
    for parameter in parameters:
        parameter.grad.div_(2).add_(parameter.grad.clone())


def overflow_once(parameters, step):
    if step == 2:
        parameters[0].grad[0, 0] = torch.nan


def write_nothing(parameters, step):
    pass


INNOCENT = {"masks": prune, "averages": average, "a NaN between finite steps": overflow_once, "rows": write_nothing}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("case", INNOCENT)
def test_scripts_that_write_to_scaled_gradients_get_no_warning(case, inside, recwarn):
    ampx.init("torch", dtype="float16", device="cpu")
    model = network()
    opt = ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3), loss_scale=2.0**12)
    recwarn.clear()
    parameters = list(model.parameters())
    for step in range(14):
        batch = nn.functional.normalize(torch.randn(1, 8)) if case == "rows" else torch.randn(4, 8)
        with ampx.scale_loss(model(batch).float().square().mean() * (1 + step), opt) as scaled:
            scaled.backward()
            if inside:
                INNOCENT[case](parameters, step)
        if not inside:
            INNOCENT[case](parameters, step)
        opt.step()
        opt.zero_grad()
    assert [str(warning.message) for warning in recwarn.list] == []


def test_clipping_the_model_of_master_weights_after_unscale_is_said_to_do_nothing():
    """The optimizer's own parameters are the masters; theirs are the gradients to clip."""

    def moved(clipped):
        """Train six steps, clip these parameters' gradients, and return how far the masters moved."""
        ampx.init("torch", dtype="float16", level="O2", device="cpu")
        model = network()
        model, raw = ampx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        opt = ampx.wrap_optimizer(raw, loss_scale=2.0**12)
        masters = opt.param_groups[0]["params"]
        before = [master.detach().clone() for master in masters]
        for _ in range(6):
            with ampx.scale_loss(model(torch.ones(4, 8)).square().mean() * 10, opt) as scaled:
                scaled.backward()
            ampx.unscale(opt)
            nn.utils.clip_grad_norm_(model.parameters() if clipped == "model" else masters, 0.5)
            opt.step()
            opt.zero_grad()
        return sum((a - b).norm() ** 2 for a, b in zip(before, masters, strict=True)) ** 0.5

    with pytest.warns(ampx.PrecisionWarning, match=r"opt\.param_groups") as caught:
        freely = moved("model")
    assert len([w for w in caught if "param_groups" in str(w.message)]) == 1
    assert freely > moved("masters") > 0
    assert moved("masters") <= 6 * 0.5 * 1e-3 * 1.001  # six steps of the bound times the learning rate


# -- parameters of any dtype and size, and whole steps that are compiled by hand ---------------------


def parameters_of(kind):
    tensors = [torch.linspace(-1, 1, 6).reshape(2, 3)]
    if kind == "float64":
        tensors.append(torch.linspace(-1, 1, 4, dtype=torch.float64))
    elif kind == "complex":
        tensors.append(torch.complex(torch.linspace(-1, 1, 4), torch.ones(4)))
    elif kind == "zero elements":
        tensors += [torch.zeros(0), torch.zeros(3, 0)]
    elif kind == "only zero elements":
        tensors = [torch.zeros(0)]
    return [nn.Parameter(tensor) for tensor in tensors]


def loss_of(parameters, size):
    parts = [(own.abs().square() if own.is_complex() else own.square()).sum() for own in parameters]
    return sum(part.float() for part in parts) * size


@pytest.mark.parametrize("scale", [1024.0, "dynamic"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("accumulates", [1, 3])
@pytest.mark.parametrize("kind", ["float64", "complex", "zero elements", "only zero elements"])
def test_steps_of_unusual_parameters_are_those_of_plain_torch(kind, accumulates, set_to_none, scale):
    ampx.init("torch", dtype="float16", level="O0", device="cpu")
    parameters = parameters_of(kind)
    twins = copy.deepcopy(parameters)
    opt = ampx.wrap_optimizer(torch.optim.SGD(parameters, lr=0.125, momentum=0.5), loss_scale=scale)
    plain = torch.optim.SGD(twins, lr=0.125, momentum=0.5)
    for step in range(3):
        for part in range(accumulates):
            with ampx.scale_loss(loss_of(parameters, 0.25 * (1 + part)), opt) as scaled:
                scaled.backward()
            loss_of(twins, 0.25 * (1 + part)).backward()
        if step == 1:
            ampx.unscale(opt)
        opt.step()
        plain.step()
        assert opt.last_step.applied
        assert all(torch.equal(own, twin) for own, twin in zip(parameters, twins, strict=True))
        opt.zero_grad(set_to_none=set_to_none)
        plain.zero_grad(set_to_none=set_to_none)


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore")  # of the compiler's own: what it leaves to Python
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_whole_step_with_a_loss_scale_that_is_compiled_by_hand_equals_eager(backend, dtype):
    def train(compiles):
        torch._dynamo.reset()
        low = dtype == "float16"
        ampx.init("torch", dtype="float16", level="O1" if low else "O0", device="cpu")
        model = network()
        opt = ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), loss_scale=1024.0)

        def step(batch):
            loss = model(batch).float().square().mean()
            with ampx.scale_loss(loss, opt) as scaled:
                scaled.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()

        compiled = torch.compile(step, backend=backend) if compiles else step
        torch.manual_seed(1)
        losses = [compiled(torch.randn(4, 8)) for _ in range(4)]
        assert opt.last_step.applied
        return losses, [parameter.detach().clone() for parameter in model.parameters()]

    for eager, compiled in zip(train(False), train(True), strict=True):
        assert all(torch.equal(*pair) for pair in zip(eager, compiled, strict=True))


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_a_whole_step_of_complex_parameters_is_compiled_by_hand():
    torch._dynamo.reset()
    ampx.init("torch", dtype="float16", level="O0", device="cpu")
    parameters, twins = parameters_of("complex"), parameters_of("complex")
    opt = ampx.wrap_optimizer(torch.optim.SGD(parameters, lr=0.125), loss_scale=1024.0)
    plain = torch.optim.SGD(twins, lr=0.125)

    @torch.compile(backend="eager")
    def step():
        with ampx.scale_loss(loss_of(parameters, 1), opt) as scaled:
            scaled.backward()
        opt.step()
        opt.zero_grad()

    for _ in range(3):
        step()
        loss_of(twins, 1).backward()
        plain.step()
        plain.zero_grad()
        assert all(torch.equal(own, twin) for own, twin in zip(parameters, twins, strict=True))


EMA = """
import copy
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(32, 1)
average = copy.deepcopy(model).requires_grad_(False).to(DTYPE)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(4):
    activation = torch.ones(64, dtype=torch.bfloat16)
    activation += 1e-3  # of a step, which nothing is added to again
    (0.01 * model(torch.randn(8, 32)).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for slow, fast in zip(average.parameters(), model.parameters()):
            UPDATE
"""
AVERAGES = {
    "lerp": "slow.lerp_(fast.to(slow.dtype), 0.02)",
    "factors": "slow.mul_(0.999).add_(fast.to(slow.dtype), alpha=0.001)",
    "difference": "slow += 0.02 * (fast - slow)",
}


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float32"])
@pytest.mark.parametrize("average", AVERAGES)
def test_updates_of_an_average_in_low_precision_that_round_to_nothing_are_named(looked_at, average, dtype):
    report, lines = looked_at(EMA.replace("DTYPE", dtype).replace("UPDATE", AVERAGES[average]))
    named = {lines[int(mistake.split(": ")[0].rpartition(":")[2]) - 1].strip() for mistake in report["mistakes"]}
    assert named == ({AVERAGES[average]} if dtype == "torch.bfloat16" else set())
