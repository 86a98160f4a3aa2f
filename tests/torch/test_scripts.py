"""`ampx diagnose` on whole scripts that nothing is wrong with, and that nobody edits: the risks that it names."""

import pytest

from ampx.numerics.compare_script import compare_script
from ampx.numerics.diagnose_script import diagnose_script
from ampx.run import RunSettings
from ampx.run.program import Program
from processes import run_here

SCRIPT = """
import torch

model = torch.nn.Sequential(torch.nn.Linear(16, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    loss = model(torch.randn(8, 16)).float().square().mean() * FACTOR
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
SCALES = """
scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
for step in range(4):
    with torch.autocast("cpu", dtype=torch.float16):
        output = model(torch.randn(8, 16))
    loss = output.float().square().mean() * FACTOR
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
OWN = SCRIPT.partition("for step")[0] + SCALES
WEIGHTS = {"0.weight": "1021x16", "2.weight": "8x1021"}


@pytest.fixture
def looked_at(tmp_path):
    """Return a function that diagnoses the script, in this process."""

    def look(text=SCRIPT, width="64", factor="1.0", replace_native=False, **options):
        (tmp_path / "train.py").write_text(text.replace("WIDTH", width).replace("FACTOR", factor))
        settings = RunSettings("float16", device="cpu", loss_scale=None if replace_native else 1.0)
        settings = RunSettings(**{**vars(settings), "replace_native": replace_native})
        program = Program(str(tmp_path / "train.py"))
        return diagnose_script(program, settings, framework="torch", run=lambda t: run_here(t, tmp_path), **options)

    return look


def test_a_script_that_nothing_is_wrong_with_is_accused_of_nothing(looked_at):
    diagnosis, report = looked_at()
    assert (diagnosis, report["step"], report["fault"], report["risks"]) == (None, None, None, [])
    assert report["looked_at"] == 4
    assert "every module agrees, and the loss is " in report["verdict"]
    assert "from float32's, and there are no risks" in report["verdict"]


VALIDATES = """
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=1e-3, patience=0)
for step in range(5):
    loss = (model(torch.ones(8, 16)).float().mean() - 3.0).square()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        error = model(torch.ones(1, 16)).mean() * 0 + 1
        total = torch.full((), 2040.0, dtype=error.dtype)
        for _ in range(60 - 10 * step):
            total = total + error
    scheduler.step(total.item())
"""


def test_a_schedule_that_a_total_in_low_precision_decides_is_found_with_its_line(looked_at):
    """In float16 the total is 2048 in every step."""
    text = SCRIPT.partition("for step")[0].replace("0.01", "0.05") + VALIDATES
    diagnosis, report = looked_at(text)
    assert (report["step"], diagnosis.kind, diagnosis.first_nonfinite.operation) == (3, "digits", "add")
    assert "In step 3, the learning rate is 5e-05, and in float32 0.05: the script's schedule" in report["verdict"]
    assert "train.py:17) loses precision: 2048 and 1 more are 2048" in report["verdict"]


def test_a_finite_loss_that_is_wrong_is_found_though_nothing_fails(looked_at):
    small = "class Small(torch.nn.ReLU):\n    def forward(self, x):\n        return (x * 1e-9).relu()\n\n\n"
    text = SCRIPT.replace("model =", small + "model =").replace("torch.nn.ReLU(),", "Small(),")
    diagnosis, report = looked_at(text)
    assert (diagnosis.kind, report["step"], report["looked_at"], report["fault"]) == ("flush", 4, 4, "wrong")
    assert diagnosis.first_nonfinite.module == "1"
    assert report["verdict"].startswith("In step 4, the output of ")
    assert " underflows: " in report["verdict"]


@pytest.mark.parametrize("at", [None, 2])
def test_weights_whose_dimensions_matrix_units_pad_are_no_risk(looked_at, at):
    diagnosis, report = looked_at(width="1021", at=at)
    assert (diagnosis and diagnosis.kind, report["looked_at"]) == (("healthy", 2) if at else (None, 4))
    assert report["risks"] == []


@pytest.fixture
def padded(tmp_path):
    """Return a function that compares a script, in this process, and returns what is said of dimensions."""

    def look(text):
        (tmp_path / "train.py").write_text(text)
        program, settings = Program(str(tmp_path / "train.py")), RunSettings(device="cpu")
        options = {"framework": "torch", "steps": 4, "repeats": 1}
        report = compare_script(program, settings, ["float16"], run=lambda t: run_here(t, tmp_path), **options)
        (note,) = (note for note in report["notes"] if note.startswith("Dimensions of "))
        return note

    return look


def test_weights_whose_dimensions_matrix_units_pad_are_named_with_their_shapes_where_speed_is_asked_for(padded):
    note = padded(SCRIPT.replace("WIDTH", "1021").replace("FACTOR", "1.0"))
    for name, shape in WEIGHTS.items():
        assert f"{name} ({shape})" in note


def test_weights_of_optimizers_that_take_turns_are_all_named(padded):
    text = """
import torch

models = [torch.nn.Linear(16, 1021), torch.nn.Linear(16, 77)]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
for step in range(2):
    for model, optimizer in zip(models, optimizers):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).float().square().mean().backward()
        optimizer.step()
"""
    note = padded(text)
    assert all(shape in note for shape in ("1021x16", "77x16"))


@pytest.mark.parametrize("region", ["torch.autocast('cpu', dtype=torch.float16)", "region"], ids=["made", "kept"])
def test_float32_is_float32_in_the_regions_of_a_script_s_own_too(looked_at, region):
    """A value that only float16 cannot hold was said to fail in float32, too, where the script casts by itself."""
    scaler = "scaler = torch.amp.GradScaler('cpu', init_scale=1.0)"
    both = f"{scaler}\nregion = torch.autocast('cpu', dtype=torch.float16)"
    text = OWN.replace('scaler = torch.amp.GradScaler("cpu", init_scale=1.0)', both)
    text = text.replace('torch.autocast("cpu", dtype=torch.float16)', region)
    text = text.replace("torch.randn(8, 16)", "torch.randn(8, 16) * (3e5 if step == 2 else 1)")
    diagnosis, report = looked_at(text, replace_native=True)
    assert (report["step"], diagnosis.kind, diagnosis.float32_fails) == (3, "overflow", False)


@pytest.mark.parametrize(("text", "replace_native"), [(SCRIPT, False), (OWN, True)], ids=["plain", "scaler"])
def test_gradients_that_flush_at_the_loss_scale_are_named(looked_at, text, replace_native):
    _, report = looked_at(text, factor="1e-8", replace_native=replace_native)
    (risk,) = report["risks"]
    assert risk["kind"] == "gradient"
    assert {"0.weight", "2.weight"} <= set(risk["where"])
    assert "underflow to zero in float16 at a loss scale of 1" in risk["text"]
