"""Logs of PyTorch: no wait but for the steps that are written, losses and optimizers by name, and unedited scripts."""

import copy
import json
import math
import pickle
import sys

import pytest
import torch
from torch import nn

import ampx
from processes import run_python
from waits import CountsWaits

SCRIPT = """
import torch
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(1, 8):
    loss = weight.sum() * (float("inf") if step == 3 else 1.0)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
{end}
"""


def wrapped(**options):
    parameter = nn.Parameter(torch.ones(2))
    return parameter, ampx.wrap_optimizer(torch.optim.SGD([parameter], lr=0.1, fused=True), **options)


def train(parameter, opt, *slopes):
    for slope in slopes:
        with ampx.scale_loss((parameter * slope).sum(), opt) as scaled:
            scaled.backward()
        opt.step()
        opt.zero_grad()


def drawn_by(**options):
    rows = []
    return rows, ampx.log_to(lambda values, step: rows.append((step, values)), **options)


def test_with_the_scale_on_the_device_only_the_written_steps_wait(amp):
    parameter, opt = wrapped(device_scale=True, max_grad_norm=math.inf)
    slopes = [1.0] * 100
    slopes[49] = math.inf
    rows, log = drawn_by(every=25)
    train(parameter, opt, 1.0)
    with CountsWaits() as counted:
        train(parameter, opt, *slopes[1:])
        log.close()
    # The norms of steps 25, 75 and 100; step 50 was skipped and has none.
    assert counted.waits == 3
    progress = {step: values for step, values in rows if "ampx/skipped_steps" in values}
    assert [(step, values["ampx/skipped_steps"]) for step, values in progress.items()] == [
        (25, 0),
        (50, 1),
        (75, 1),
        (100, 1),
    ]
    assert [values.get("ampx/grad_norm") for values in progress.values()] == pytest.approx(
        [math.sqrt(2), None, math.sqrt(2), math.sqrt(2)]
    )
    assert [values["ampx/loss_scale"] for values in progress.values()] == [65536.0, 32768.0, 32768.0, 32768.0]


def test_a_second_optimizer_and_a_second_loss_have_names_of_their_own(amp):
    first, second = wrapped(), wrapped()
    rows, log = drawn_by(every=1)
    train(*first, 1.0)
    with ampx.scale_loss(second[0].sum(), second[1], loss_id=0) as scaled:
        scaled.backward()
    with ampx.scale_loss(second[0].sum(), second[1], loss_id=1) as scaled:
        scaled.backward()
    second[1].step()
    log.close()
    names = [sorted(name for name in values if name.endswith("loss_scale")) for _, values in rows]
    assert names == [["ampx/loss_scale"], ["ampx/group_1/loss_scale"], ["ampx/group_1/loss_1/loss_scale"]]


def test_optimizers_that_share_a_scale_have_one_row_with_the_norm_over_both(amp):
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    raws = [torch.optim.SGD([parameter], lr=0.1) for parameter in parameters]
    opts = ampx.wrap_optimizer(raws, max_grad_norm=math.inf)
    rows, _ = drawn_by(every=1)
    with ampx.scale_loss((3.0 * parameters[0] + 4.0 * parameters[1]).sum(), opts) as scaled:
        scaled.backward()
    for opt in opts:
        opt.step()
    assert [step for step, _ in rows] == [1]
    assert rows[0][1]["ampx/grad_norm"] == pytest.approx(math.sqrt(2 * 9 + 2 * 16))


def test_the_meter_is_drawn_when_it_has_looked(amp):
    weight = nn.Parameter(torch.full((8,), 1e4))  # float32 loses updates of 1e-6 there
    opt = ampx.wrap_optimizer(torch.optim.SGD([weight], lr=1e-6), loss_scale=1024.0)
    rows, _ = drawn_by(every=1000)
    train(weight, opt, *[0.5] * 100)
    ((step, values),) = rows
    headroom = math.log2(torch.finfo(torch.bfloat16).max) - math.log2(512.0)
    assert (step, values["ampx/meter/lost"], values["ampx/meter/flushed"]) == (100, 1.0, 0.0)
    assert values["ampx/meter/headroom"] == pytest.approx(headroom)
    assert opt.meter.headroom == pytest.approx(headroom)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))], ids=["copy", "pickle"])
def test_copies_of_an_optimizer_are_logged_like_the_first(amp, copied):
    opt = copied(wrapped()[1])
    rows, _ = drawn_by(every=1)
    train(opt.param_groups[0]["params"][0], opt, 1.0)
    assert len(rows) == 1


def run_script(folder, *options, end=""):
    (folder / "script.py").write_text(SCRIPT.format(end=end))
    command = ["-m", "ampx", "run", "--dtype", "float16", "--device", "cpu", *options, "script.py"]
    done = run_python(*command, cwd=folder)
    return done, folder / "run.jsonl"


LOG = ("--log", "run.jsonl", "--log-every", "2")


@pytest.mark.parametrize(
    ("end", "code"),
    [("", 0), ("raise SystemExit(4)", 4), ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15)],
    ids=["ends", "exits", "is terminated"],
)
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_an_unedited_script_is_logged_however_it_ends(tmp_path, end, code):
    done, path = run_script(tmp_path, *LOG, end=end)
    assert done.returncode == code, done.stderr
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["skipped_steps"]) for line in lines if line["event"] == "Progress"] == [
        (2, 0),
        (4, 1),
        (6, 1),
    ]
    assert [line["step"] for line in lines if line["event"] == "StepSkipped"] == [3]


def test_of_several_processes_the_first_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done, path = run_script(tmp_path, *LOG)
    assert done.returncode == 0, done.stderr
    assert not path.exists()


def test_a_log_without_a_row_is_told(tmp_path):
    (tmp_path / "idle.py").write_text("import torch")
    done = run_python("-m", "ampx", "run", "--log", "idle.jsonl", "idle.py", cwd=tmp_path)
    assert "idle.jsonl is empty: ampx saw 0 steps" in done.stderr


def test_a_target_that_nobody_understands_ends_the_command_before_the_script_runs(tmp_path):
    done, _ = run_script(tmp_path, "--log", "nowhere:else", end="print('ran')")
    assert done.returncode == 2
    assert "'nowhere:else'; accepted: a path that ends in .jsonl" in done.stderr
    assert "ran" not in done.stdout


def test_a_copy_of_the_process_writes_nothing(tmp_path):
    path = tmp_path / "run.jsonl"
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import os, torch, ampx
ampx.init("torch", dtype="float16", device="cpu", nan_loss="skip")
weight = torch.nn.Parameter(torch.ones(1))
opt = ampx.wrap_optimizer(torch.optim.SGD([weight], lr=0.1))
log = ampx.log_to({str(path)!r}, every=1)
def step():
    with ampx.scale_loss(weight.sum(), opt) as scaled:
        scaled.backward()
    opt.step()
child = os.fork()
step()
if child == 0:
    raise SystemExit
os.waitpid(child, 0)
"""
    )
    run_python(script, check=True)
    assert len(path.read_text().splitlines()) == 1
