"""Scripts for the trainers of other libraries, unedited, under `ampx run`.

The scripts for Accelerate, Lightning and Fabric train the same model on the same batches. The oracle is a plain loop
of PyTorch that does, in float32 or with `torch.autocast` and its GradScaler, to the bit: loss scales are powers of two.
"""

import importlib
import json
import os
import pathlib

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

import ampx
from ampx.backend import offer
from ampx.plugins import default_registry
from ampx.run import Automation, Run, RunSettings
from processes import run_python

SCRIPTS = pathlib.Path(__file__).parent / "scripts"
LOOPS = ("with_accelerate", "with_lightning", "with_fabric")
LOW = pytest.mark.parametrize("low", ["float16", "bfloat16"])
INF = float("inf")


def reference(precision, waits=False, rounds=False):
    """The loop of the scripts.

    With `waits` the scheduler waits for skipped steps, as Accelerate's does; with `rounds` inputs are bfloat16, as
    those of Fabric are where it computes in that.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "float16")
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    losses, norms, skipped, dtypes = [], [], [], set()
    for index, batch in enumerate(inputs.split(4)):
        with torch.autocast("cpu", getattr(torch, precision), enabled=precision != "float32"):
            output = model(batch.bfloat16() if rounds else batch)
        dtypes.add(str(output.dtype))
        loss = torch.nn.functional.mse_loss(output.float(), batch.sum(1, keepdim=True))
        scaler.scale(loss / 2).backward()
        losses.append(loss.item())
        if index % 2:
            scaler.unscale_(optimizer)
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() < before:
                skipped.append(index // 2 + 1)
            if not (waits and skipped[-1:] == [index // 2 + 1]):
                scheduler.step()
            optimizer.zero_grad()
    rate = scheduler.get_last_lr()[0]
    return {"losses": losses, "norms": norms, "dtypes": sorted(dtypes), "rate": rate}, skipped


def automated(script, precision, **settings):
    """Run a script here as `ampx run` does; give what it returned, and the run."""
    run = Run("torch", RunSettings(device="cpu", **{"dtype": "auto", **settings}))
    with offer(default_registry().load("torch"), Automation).automate(run):
        result = importlib.import_module(script).main(precision)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return result, run


def same(result, expected):
    assert json.dumps(result) == json.dumps(expected)  # a norm may be NaN


@LOW
@pytest.mark.parametrize("script", LOOPS)
def test_a_float32_script_trains_as_pytorchs_own_mixed_precision(script, low):
    result, run = automated(script, "float32", dtype=low)
    expected, skipped = reference(low)
    same(result, expected)
    (optimizer,) = run.recorder.optimizers.values()
    assert (optimizer.steps, optimizer.skipped) == (4, skipped)
    assert bool(skipped) == (low == "float16")  # the batches are such that float16 overflows


@pytest.mark.parametrize("script", LOOPS)
def test_a_bfloat16_script_trains_as_it_says(script):
    result, run = automated(script, "bfloat16", replace_native=True)
    same(result, reference("bfloat16", rounds=script == "with_fabric")[0])
    assert run.amp.effective.dtype == "bfloat16"


@pytest.mark.parametrize("script", LOOPS)
def test_a_float16_script_trains_in_float16_where_it_is_asked_for(script):
    """Lightning has replaced float16 by bfloat16 on a CPU, and Accelerate by float32, before ampx is asked.

    Fabric has rounded the inputs, too.
    """
    result, run = automated(script, "float16", dtype="float16", replace_native=True)
    expected, skipped = reference("float16", waits=script == "with_accelerate", rounds=script == "with_fabric")
    same(result, expected)
    assert run.amp.effective.dtype == "float16"
    (optimizer,) = run.recorder.optimizers.values()
    assert (optimizer.steps, optimizer.skipped) == (4, skipped)


def test_accelerates_fp16_on_a_cpu_is_carried_out_as_the_script_says():
    result, run = automated("with_accelerate", "float16", replace_native=True)
    same(result, reference("float16", waits=True)[0])
    assert "float16" in run.amp.effective.reason
    assert Accelerator(mixed_precision="fp16", cpu=True).scaler is None  # outside it is Accelerate's own again


def test_a_trainer_trains_in_the_dtype_it_is_asked_for():
    plain = importlib.import_module("with_trainer").main("float32")
    native = importlib.import_module("with_trainer").main("bfloat16")
    AcceleratorState._reset_state(True)
    assert plain["dtypes"] == ["torch.float32"]
    assert native["dtypes"] == ["torch.bfloat16"]
    same(automated("with_trainer", "bfloat16", replace_native=True)[0], native)
    for low, precision, replaces in (
        ("float16", "float32", False),
        ("bfloat16", "float32", False),
        ("float16", "float16", True),
    ):
        result, run = automated("with_trainer", precision, dtype=low, replace_native=replaces)
        assert result["dtypes"] == [f"torch.{low}"]
        # Each of the few products in a row rounds to one part in 2**8 in bfloat16, the coarser of the two.
        assert result["losses"] == pytest.approx(plain["losses"], rel=2**-6)
        assert result["norms"] == pytest.approx(plain["norms"], rel=2**-4)
        (optimizer,) = run.recorder.optimizers.values()
        assert (optimizer.steps, optimizer.skipped) == (4, [])


@pytest.mark.parametrize("automates", [False, True])
def test_the_second_optimizers_gradients_keep_the_scale_that_divides_them(automates):
    """One GradScaler, updated between two optimizers, as Accelerate does: PyTorch's own is wrong by a factor."""

    def loop():
        first, second = (torch.nn.Parameter(torch.zeros(())) for _ in range(2))
        accelerator = Accelerator(mixed_precision="fp16", cpu=True)
        if not automates:
            accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")
        optimizers = accelerator.prepare(*(torch.optim.SGD([p], lr=0.25) for p in (first, second)))
        weights = []
        for slope in (INF, 1.0):
            accelerator.backward(first * slope)
            accelerator.backward(second * 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            weights.append((first.item(), second.item()))
        return weights

    if not automates:
        assert loop() == [(0.0, -0.5), (-0.25, -0.75)]
        return
    run = Run("torch", RunSettings(device="cpu", replace_native=True))
    with offer(default_registry().load("torch"), Automation).automate(run):
        assert loop() == [(0.0, -0.25), (-0.25, -0.5)]
    assert [optimizer.skipped for optimizer in run.recorder.optimizers.values()] == [[1], []]


# Where the lines that a run prints go in each script, and what else they say.
BY_HAND = {
    "with_accelerate": ("    model = torch.nn.Sequential", ()),
    "with_lightning": ("    trainer = lightning.Trainer(", (("precision=NAMES[precision],", "plugins=precision,"),)),
    "with_fabric": ("    fabric = Fabric(", (("precision=NAMES[precision])", "plugins=precision)"),)),
    "with_trainer": ("        trainer.train()", ()),
}


@LOW
@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("script", BY_HAND)
def test_the_lines_by_hand_of_a_trainer_do_in_the_script_what_the_run_did(script, low, replaces):
    result, run = automated(script, low if replaces else "float32", dtype=low, replace_native=replaces)
    call, *lines = run.explain()
    assert call.startswith(f"amp = ampx.init('torch', dtype={low!r}")
    assert "process_wide=False" in call
    assert not any("wrap_optimizer" in line for line in lines)
    place, changes = BY_HAND[script]
    source = (SCRIPTS / f"{script}.py").read_text()
    late = [line for line in lines if ".manage(" in line]  # it says where
    early = ["import ampx", call.replace(")", ", device='cpu')"), *(line for line in lines if line not in late)]
    indent = place[: len(place) - len(place.lstrip())]
    source = source.replace(place, "".join(f"{indent}{line}\n" for line in early) + place, 1)
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    for line in late:
        setup = "    model, optimizer = fabric.setup(model, optimizer)\n"
        source = source.replace(setup, f"{setup}    {line}\n")
    names = {"__name__": "by_hand"}
    exec(compile(source, script, "exec"), names)
    try:
        by_hand = names["main"](low)
    finally:
        ampx.shutdown()
    assert by_hand["dtypes"] == result["dtypes"] == [f"torch.{low}"]
    if script != "with_fabric":  # Fabric rounds inputs of a script for bfloat16 itself, and ampx's plugin does not
        assert by_hand["losses"] == pytest.approx(result["losses"], rel=2**-4, nan_ok=True)


def test_fp16_that_accelerate_passes_over_is_mentioned():
    _, run = automated("with_accelerate", "float16", dtype="bfloat16")
    assert any("fp16, which computes in float32 on a CPU" in note for note in run.recorder.notes)
    _, run = automated("with_trainer", "float16", dtype="bfloat16")
    assert any("fp16, which computes in float32 on a CPU" in note for note in run.recorder.notes)


def test_a_dtype_that_is_replaced_is_mentioned():
    _, run = automated("with_trainer", "float16", dtype="bfloat16", replace_native=True)
    (note,) = [note for note in run.recorder.notes if "ask for float16" in note]
    assert "computed in bfloat16" in note
    _, run = automated("with_trainer", "bfloat16", dtype="bfloat16", replace_native=True)
    assert not [note for note in run.recorder.notes if "ask for" in note]


@pytest.mark.parametrize("script", [*LOOPS, "with_trainer"])
def test_the_command_runs_a_script_of_each_library(script, tmp_path):
    options = ("--dtype", "bfloat16", "--report", "out.json")
    done = run_python("-m", "ampx", "run", *options, SCRIPTS / f"{script}.py", cwd=tmp_path, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    if script != "with_trainer":
        same(result, reference("bfloat16")[0])
    assert result["dtypes"] == ["torch.bfloat16"]
    facts = json.loads((tmp_path / "out.json").read_text())
    assert (facts["framework"], facts["dtype"], facts["steps"]) == ("torch", "bfloat16", 4)


ON_CUDA = """
import json, pathlib, runpy, sys
import simulated_cuda
simulated_cuda.start(pathlib.Path(sys.argv[2]))
import ampx
from ampx.backend import offer
from ampx.plugins import default_registry
from ampx.run import Automation, Run, RunSettings
sys.path.insert(0, sys.argv[1])
run = Run("torch", RunSettings(replace_native=True))
with offer(default_registry().load("torch"), Automation).automate(run):
    result = __import__(sys.argv[3]).main("float16")
(optimizer,) = run.recorder.optimizers.values()
print(json.dumps([result, [optimizer.steps, optimizer.skipped], run.amp.effective.dtype, run.amp.effective.device]))
"""


@pytest.mark.parametrize("script", [*LOOPS, "with_trainer"])
def test_a_float16_script_trains_as_it_says_where_there_is_a_gpu(script, simulated_cuda_folder):
    """On a simulated CUDA device, where the libraries accept float16 and bring a GradScaler for CUDA."""
    kit = pathlib.Path(__file__).parent.parent / "kit"
    path = os.pathsep.join([str(kit), os.environ.get("PYTHONPATH", "")])
    done = run_python("-c", ON_CUDA, SCRIPTS, simulated_cuda_folder, script, fresh=True, check=True, PYTHONPATH=path)
    result, counts, dtype, device = json.loads(done.stdout.splitlines()[-1])
    assert (dtype, device.partition(":")[0]) == ("float16", "cuda")
    assert result["dtypes"] == ["torch.float16"]
    if script == "with_trainer":
        assert counts == [4, []]
        return
    expected, skipped = reference("float16", waits=script == "with_accelerate")
    assert counts == [4, skipped]
    assert result["rate"] == expected["rate"]
    # CUDA's lists cast other operations than the CPU's, so a few roundings of one part in 2**11 differ.
    finite = [index for index in range(8) if index // 2 + 1 not in skipped]
    for index in finite:
        assert result["losses"][index] == pytest.approx(expected["losses"][index], rel=2**-6)
