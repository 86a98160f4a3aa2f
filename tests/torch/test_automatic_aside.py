"""`ampx run` of scripts that start apex or ampx themselves: it stands aside, and tells what their sessions did."""

import json
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import ampx  # noqa: E402
from ampx.backend import offer  # noqa: E402
from ampx.plugins import default_registry  # noqa: E402
from ampx.run import Automation, Run, RunSettings  # noqa: E402
from processes import run_python  # noqa: E402

PROGRAM = Path(__file__).parents[1] / "programs" / "apex" / "fp16_optimizer.py"


@pytest.fixture(autouse=True)
def ended():
    yield
    ampx.shutdown()


@pytest.fixture
def automated():
    def automate(script):
        run = Run("torch", RunSettings(dtype="bfloat16", device="cpu"))
        with offer(default_registry().load("torch"), Automation).automate(run):
            script()
        return run

    return automate


def train(model, optimizer, scale_loss, factors):
    for factor in factors:
        optimizer.zero_grad()
        with scale_loss(model(torch.ones(2, 4)).float().mean() * factor, optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def test_the_steps_and_the_scale_of_apex_amp_are_told(automated):
    def script():
        from apex import amp

        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        train(model, optimizer, amp.scale_loss, [1.0, float("inf"), 1.0, float("inf")])

    run = automated(script)
    (optimizer,) = run.recorder.to_json()["optimizers"]
    assert (optimizer["kind"], optimizer["initial_scale"], optimizer["steps"], optimizer["skipped"]) == (
        "SGD",
        65536.0,
        4,
        [2, 4],
    )
    assert optimizer["scales"] == [(2, 32768.0), (4, 16384.0)]
    assert (run.amp.effective.dtype, run.amp.effective.level) == ("float16", "O1")
    assert "by itself, with apex.amp;" in run.recorder.notes[0]


def test_operations_and_time_of_apex_amp_are_told(automated):
    def script():
        from apex import amp

        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 4))  # before apex.amp decides: float32, and not counted
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        train(model, optimizer, amp.scale_loss, [1.0] * 5)

    run = automated(script)
    facts = run.recorder.to_json()
    assert facts["sampled_steps"] == 3
    assert {operation["dtype"] for operation in facts["ops"] if operation["op"] in ("addmm", "mm")} == {"float16"}
    assert run.recorder.ops["addmm", "float16"] == 3
    assert set(facts["seconds"]) == {"forward", "backward", "step"}


def test_operations_of_a_session_of_ampx_itself_are_told(automated):
    def script():
        model = torch.nn.Linear(4, 4)
        ampx.init("torch", dtype="float16", device="cpu")
        optimizer = ampx.wrap_optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
        train(model, optimizer, ampx.scale_loss, [float("inf"), 1.0, 1.0, 1.0])

    run = automated(script)
    assert run.recorder.ops["addmm", "float16"] == 3
    assert "by itself, with ampx;" in run.recorder.notes[0]


# Three forwards: after the optimizer is made, after apex.amp may have been switched on, after the first step.
WAITING = """\
import torch
{top}
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = [model(torch.ones(1, 4)).dtype]
{late}
{call}
seen.append(model(torch.ones(1, 4)).dtype)
if not {on}:
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    seen.append(model(torch.ones(1, 4)).dtype)
print(*(str(dtype).removeprefix("torch.") for dtype in seen))
"""
OFF = "model, optimizer = amp.initialize(model, optimizer, opt_level='O1', verbosity=0, enabled=False)"
ON = OFF.replace("False", "True")
EVER = "float32 float32 float32"


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ({"top": "from apex import amp", "call": OFF}, EVER),
        ({"top": "from apex import amp", "call": "handle = amp.init(enabled=False)"}, EVER),
        ({"top": "from apex import amp", "call": ON, "on": True}, "float32 float16"),
        ({"top": "import apex; amp = apex.amp", "call": OFF}, EVER),
        ({"top": "from ampx_torch.apex import amp", "call": OFF}, EVER),
        ({"late": "import apex.amp as amp", "call": OFF}, "bfloat16 float32 float32"),
        ({"top": "from apex.amp import initialize"}, "float32 float32 bfloat16"),
        ({"top": "from apex.optimizers import FusedAdam"}, "bfloat16 bfloat16 bfloat16"),
    ],
)
def test_nothing_is_cast_before_apex_amp_decides_in_a_script_that_imports_it(pieces, expected, tmp_path):
    """Genuine apex and PyTorch compute in float32 unless apex.amp is on; a script that never uses it is automated."""
    pytest.importorskip("typer", reason="needs typer, of the extra cli")
    script = tmp_path / "train.py"
    script.write_text(WAITING.format(**{"top": "", "late": "", "call": "", "on": False, **pieces}))
    done = run_python("-m", "ampx", "run", "--dtype", "bfloat16", script)
    assert done.stdout == f"{expected}\n", done.stderr
    assert ("switched nothing on: all the time it computed" in done.stderr) == (expected == EVER)
    assert ("switched nothing on: from then on it computed" in done.stderr) == ("late" in pieces)
    assert ("casting began there" in done.stderr) == (expected == "float32 float32 bfloat16")


BY_HAND = """\
import torch
from apex.optimizers import FusedAdam
torch.manual_seed(0)
model = torch.nn.Linear(4, 1).half()
masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
optimizer = FusedAdam(masters, lr=0.1)
for step in range(3):
    loss = model(torch.ones(2, 4).half()).float().mean()
    loss.backward()
    for master, p in zip(masters, model.parameters()):
        master.grad, p.grad = p.grad.float(), None
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, model.parameters()):
            p.copy_(master)
print("trained", loss.item())
"""


def test_float16_by_hand_is_refused_and_runs_unchanged_with_the_apex_that_it_was_given(tmp_path):
    """Plain PyTorch, with the stand-in apex, is the oracle."""
    pytest.importorskip("typer", reason="needs typer, of the extra cli")
    script = tmp_path / "train.py"
    script.write_text(BY_HAND)
    install = f"import ampx_torch.apex, runpy; ampx_torch.apex.install(); runpy.run_path({str(script)!r})"
    plain = run_python("-c", install, check=True)
    done = run_python("-m", "ampx", "run", "--dtype", "bfloat16", "--unchanged-if-refused", script, nests=True)
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
    assert "train.py:9: backward reaches float16 parameters that no optimizer holds" in done.stderr
    assert "--unchanged-if-refused, with the apex that it finds here" in done.stderr
    assert "without ampx, but for apex" in done.stderr


def test_several_blocks_of_apex_amp_before_a_step_are_one_step(automated):
    def script():
        from apex import amp

        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", num_losses=2, verbosity=0)
        for factors in ((1.0, 1.0), (float("inf"), float("inf")), (1.0, 1.0)):
            for loss_id, factor in enumerate(factors):
                loss = model(torch.ones(2, 4)).float().mean() * factor
                with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
                    scaled.backward()
            optimizer.step()
            optimizer.zero_grad()

    (optimizer,) = automated(script).recorder.to_json()["optimizers"]
    assert (optimizer["steps"], optimizer["skipped"], optimizer["scales"]) == (3, [2], [(2, 32768.0)])


@pytest.mark.parametrize("first", ["session", "optimizer"])
def test_a_script_that_is_written_for_ampx_keeps_its_own_session(first, automated):
    def script():
        model = torch.nn.Linear(4, 4)
        if first == "session":
            ampx.init("torch", dtype="float16", device="cpu")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        if first == "optimizer":
            ampx.init("torch", dtype="float16", device="cpu")
        optimizer = ampx.wrap_optimizer(optimizer, loss_scale=1024.0)
        train(model, optimizer, ampx.scale_loss, [1.0, 1.0, float("inf")])
        assert ampx.current("torch").effective.dtype == "float16"

    run = automated(script)
    (optimizer,) = run.recorder.to_json()["optimizers"]
    assert (optimizer["kind"], optimizer["initial_scale"], optimizer["steps"], optimizer["skipped"]) == (
        "Adam",
        1024.0,
        3,
        [3],
    )
    assert ampx.current("torch").effective.dtype == "float16"  # as without ampx run, the script's session stays


def test_a_second_session_of_the_script_is_told_beside_the_first(automated):
    def script():
        for steps in (2, 3):
            ampx.init("torch", dtype="bfloat16", device="cpu")
            model = torch.nn.Linear(4, 4)
            optimizer = ampx.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            train(model, optimizer, ampx.scale_loss, [1.0] * steps)

    assert [optimizer.steps for optimizer in automated(script).recorder.optimizers.values()] == [2, 3]


def test_fp16_optimizer_trains_as_without_the_run(automated):
    weights = []

    def script():
        from ampx_torch.apex.fp16_utils import FP16_Optimizer, network_to_half

        torch.manual_seed(0)
        model = network_to_half(torch.nn.Linear(4, 4))
        optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True, verbose=False)
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.backward(model(torch.ones(2, 4)).float().sum())
            optimizer.step()
        weights.append(model[1].weight.detach().clone())

    script()

    def as_scripts_do():
        import apex.fp16_utils  # noqa: F401 -- the run provides it, and watches from then on

        script()

    run = automated(as_scripts_do)
    assert torch.equal(*weights)
    assert run.stood_down == "a loss scale of apex.fp16_utils"
    assert "by itself, with a loss scale of apex.fp16_utils;" in run.recorder.notes[0]
    assert run.amp is None
    assert not run.recorder.optimizers
    script()  # the watch has ended with the run


@pytest.mark.parametrize("level", ["O1", "O9"])
def test_a_script_whose_initialize_raises_gets_no_advice_on_what_it_never_did(level, tmp_path):
    pytest.importorskip("typer", reason="needs typer, of the extra cli")
    script, target = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(
        "import torch\n"
        "from apex import amp\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        f"amp.initialize(model, optimizer, opt_level={level!r}, verbosity=0)\n"
        "model(torch.ones(2, 4)).sum().backward()\n"
    )
    done = run_python("-m", "ampx", "run", "--report", target, script)
    failed = level == "O9"
    assert done.returncode == failed, done.stderr
    assert ("PropertyError" in done.stderr) == failed
    assert ("by hand" in done.stderr) != failed
    assert bool(json.loads(target.read_text())["lines"]) != failed


def test_the_summary_and_the_report_of_fp16_optimizer_tell_only_what_is_true(tmp_path):
    pytest.importorskip("sklearn", reason="needs scikit-learn, of the extra demo")
    pytest.importorskip("typer", reason="needs typer, of the extra cli")
    target = tmp_path / "out.json"
    done = run_python("-m", "ampx", "run", "--report", target, PROGRAM, "--epochs", "1")
    assert done.returncode == 0, done.stderr
    assert "ampx run: torch as the script has it, with a loss scale of apex.fp16_utils" in done.stderr
    assert "operations" not in done.stderr
    assert "loss scale 1" not in done.stderr
    report = json.loads(target.read_text())
    assert (report["framework"], report["dtype"], report["steps"], report["ops"]) == ("torch", None, 0, [])


# What transformers, timm and others do when they are imported.
PROBING = """\
import importlib.util
has = [importlib.util.find_spec("apex") is not None]
for name in ("apex", "apex.normalization", "amp_C"):
    try:
        __import__(name)
    except ImportError as error:
        has.append(str(error))
try:
    from apex import amp
except ImportError as error:
    has.append(type(error).__name__)
"""
PROBED = """\
import probing_library
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print(probing_library.has, model.weight.tolist())
"""


@pytest.fixture
def probing_library(tmp_path):
    """A folder of installed packages, with a library that looks whether apex is there."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "probing_library.py").write_text(PROBING)
    return folder


def test_a_library_that_looks_for_apex_sees_what_plain_python_shows_it(probing_library, tmp_path):
    pytest.importorskip("typer", reason="needs typer, of the extra cli")
    script = tmp_path / "train.py"
    script.write_text(PROBED)
    path = {"PYTHONPATH": f"{probing_library}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    plain = run_python(script, check=True, **path)
    assert "[False, \"No module named 'apex'\"" in plain.stdout
    done = run_python("-m", "ampx", "run", "--level", "O0", script, **path)
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr


def test_the_script_has_its_apex_after_a_library_looked_for_it(probing_library, tmp_path):
    pytest.importorskip("typer", reason="needs typer, of the extra cli")
    script = tmp_path / "train.py"
    script.write_text(
        "import probing_library, sys\n"
        "from importlib.util import find_spec\n"
        "assert find_spec('apex') and 'apex' not in sys.modules and 'torch' not in sys.modules\n"
        "import apex\n"
        "from importlib import reload\n"
        "assert reload(probing_library).has == [True]\n"  # it has what the script has; that says nothing of the script
        "assert find_spec('apex.amp') and 'apex.amp' not in sys.modules\n"
        "assert find_spec('apex.transformer') is None and find_spec('apex.contrib.sparsity') is None\n"
        "try:\n"
        "    import apex.transformer\n"
        "except ImportError as error:\n"
        "    assert 'megatron' in str(error)\n"
        "from apex import amp\n"
        "import apex.parallel\n"
        "print(amp.initialize.__module__)\n"
    )
    path = {"PYTHONPATH": f"{probing_library}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = run_python("-m", "ampx", "run", script, fresh=True, **path)
    assert (done.returncode, done.stdout) == (0, "ampx_apex.apex.amp.frontend\n"), done.stderr


def test_an_installed_apex_without_amp_that_a_library_has_imported_is_completed_for_the_script(tmp_path):
    pytest.importorskip("typer", reason="needs typer, of the extra cli")
    folder = tmp_path / "site-packages"
    (folder / "apex").mkdir(parents=True)
    (folder / "apex" / "__init__.py").write_text("own = True\n")
    (folder / "probing_library.py").write_text(PROBING)
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, probing_library\n"
        "print(probing_library.has)\n"
        "from apex import amp, own\n"
        "import apex.optimizers\n"
        "print(amp.__name__, own)\n"
    )
    path = {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = run_python("-m", "ampx", "run", script, fresh=True, **path)
    shown = "[True, \"No module named 'apex.normalization'\", \"No module named 'amp_C'\", 'ImportError']"
    assert (done.returncode, done.stdout) == (0, f"{shown}\nampx_apex.apex.amp True\n"), done.stderr
