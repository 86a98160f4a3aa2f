"""What log_to wrote into TensorBoard, Weights & Biases and MLflow, read back from their files."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest
import tensorboardX
import torch
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter
from wandb.proto import wandb_internal_pb2

import ampx

# Of the libraries themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
STEPS = 12
OVERFLOWS = (5, 6)
# Step, loss scale and skipped steps: 2^16, halved twice.
ROWS = [(4, 65536.0, 0), (8, 16384.0, 2), (12, 16384.0, 2)]
SCRIPT = """
import torch
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(1, 13):
    (weight.sum() * (float("inf") if step in (5, 6) else 1.0)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(autouse=True)
def _offline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    yield
    ampx.shutdown()
    wandb.teardown()  # it remembers the folder of its first run


def train(target):
    """Log a training; the norm of its gradients is the square root of 2."""
    ampx.init("torch", dtype="bfloat16", device="cpu", loss_scale="dynamic", nan_loss="skip")
    weight = torch.nn.Parameter(torch.ones(2))
    opt = ampx.wrap_optimizer(torch.optim.SGD([weight], lr=0.1), max_grad_norm=math.inf)
    with ampx.log_to(target, every=4):
        for step in range(1, STEPS + 1):
            with ampx.scale_loss(weight.sum() * (math.inf if step in OVERFLOWS else 1.0), opt) as scaled:
                scaled.backward()
            opt.step()
            opt.zero_grad()


def check(points, norms=True):
    """Compare points, by name and step, with what was trained."""
    assert points["ampx/skipped_steps"] == {step: skipped for step, _, skipped in ROWS}
    assert points["ampx/skipped_share"] == {4: 0.0, 8: 0.5, 12: 0.0}
    assert points["ampx/loss_scale"] == {step: scale for step, scale, _ in ROWS} | {5: 32768.0, 6: 16384.0}
    assert points["ampx/consecutive_skips"] == {4: 0, 5: 1, 6: 2, 8: 0, 12: 0}
    if norms:
        assert points["ampx/grad_norm"] == pytest.approx(dict.fromkeys((4, 8, 12), math.sqrt(2)), rel=1e-6)


# -- readers -------------------------------------------------------------------------------------------


def in_tensorboard(folder):
    events = EventAccumulator(str(folder)).Reload()
    return {name: {point.step: point.value for point in events.Scalars(name)} for name in events.Tags()["scalars"]}


def wandb_records():
    """Read the only offline run: a header, then LevelDB's log format (checksum, length, kind; blocks of 32 KiB)."""
    wandb.teardown()  # another process of W&B writes the file
    (path,) = Path("wandb").glob("offline-run-*/*.wandb")
    data, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def rows_in_wandb():
    """Read the rows of the only offline run."""
    records = [record.history for record in wandb_records() if record.WhichOneof("record_type") == "history"]
    return [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in row.item} for row in records]


def in_wandb():
    points = {}
    for row in rows_in_wandb():
        for name, value in row.items():
            if name.startswith("ampx/"):
                points.setdefault(name, {})[row["ampx/step"]] = value
    return points


def in_mlflow(uri, run=None):
    client = mlflow.MlflowClient(tracking_uri=str(uri))
    if run is None:
        (run,) = client.search_runs([client.get_experiment_by_name("ampx").experiment_id])
        assert run.info.status == "FINISHED"
    names = client.get_run(run.info.run_id).data.metrics
    return {
        name: {point.step: point.value for point in client.get_metric_history(run.info.run_id, name)} for name in names
    }


# -- TensorBoard ---------------------------------------------------------------------------------------


def test_tensorboard_by_name():
    train("tensorboard:runs/1")
    check(in_tensorboard("runs/1"))


def test_tensorboard_by_name_where_only_tensorboardx_is_there(monkeypatch):
    import importlib.util

    true = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else true(name))
    train("tensorboard:runs/1")
    check(in_tensorboard("runs/1"))


@pytest.mark.parametrize("make", [SummaryWriter, tensorboardX.SummaryWriter], ids=["torch", "tensorboardX"])
def test_a_summary_writer_goes_on_after_the_log(make):
    writer = make("runs/1")
    writer.add_scalar("mine", 1.0, 1)
    train(writer)
    check(in_tensorboard("runs/1"))
    writer.add_scalar("mine", 2.0, 2)
    writer.close()
    assert in_tensorboard("runs/1")["mine"] == {1: 1.0, 2: 2.0}


# -- Weights & Biases ----------------------------------------------------------------------------------


def test_wandb_by_name_is_a_run_of_its_own():
    train("wandb:ampx-tests")
    assert wandb.run is None
    check(in_wandb())


def test_the_axis_in_wandb_is_the_step():
    train("wandb:ampx-tests")
    metrics = [record.metric for record in wandb_records() if record.WhichOneof("record_type") == "metric"]
    assert ("ampx/*", "ampx/step") in {(metric.glob_name, metric.step_metric) for metric in metrics}


@pytest.mark.parametrize("handed", ["run", "module"])
def test_rows_of_the_scripts_own_wandb_run_keep_their_steps(handed):
    """Points go into the row that the script ends; its own steps are as they were."""
    run = wandb.init(project="ampx-tests")
    ampx.init("torch", dtype="bfloat16", device="cpu", loss_scale="dynamic", nan_loss="skip")
    weight = torch.nn.Parameter(torch.ones(2))
    opt = ampx.wrap_optimizer(torch.optim.SGD([weight], lr=0.1))
    with ampx.log_to({"run": run, "module": wandb}[handed], every=1):
        for step in range(1, 7):
            with ampx.scale_loss(weight.sum(), opt) as scaled:
                scaled.backward()
            opt.step()
            opt.zero_grad()
            if step % 3 == 0:  # W&B drops what comes with a step that is over
                run.log({"mine": step}, step=step // 3)
    run.finish()
    rows = [(row["_step"], row.get("mine"), row.get("ampx/step")) for row in rows_in_wandb()]
    assert [(step, mine) for step, mine, _ in rows if mine is not None] == [(1, 3), (2, 6)]
    assert [step for _, _, step in rows if step is not None] == [3, 6]


def test_wandb_without_a_run_is_refused():
    ampx.init("torch", dtype="bfloat16", device="cpu")
    with pytest.raises(ampx.InvalidOptionError, match=r"has no run; .*wandb\.init"):
        ampx.log_to(wandb)


# -- MLflow --------------------------------------------------------------------------------------------


def test_mlflow_by_name_is_a_run_of_its_own(tmp_path):
    before = mlflow.get_tracking_uri()
    train(f"mlflow:{tmp_path / 'store'}")
    check(in_mlflow(tmp_path / "store"))
    assert mlflow.active_run() is None
    assert mlflow.get_tracking_uri() == before


@pytest.mark.parametrize("handed", ["run", "module"])
def test_the_scripts_own_mlflow_run_goes_on(tmp_path, handed):
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(str(tmp_path / "store"))
    try:
        with mlflow.start_run() as run:
            train({"run": run, "module": mlflow}[handed])
            mlflow.log_metric("mine", 1.0)
        points = in_mlflow(tmp_path / "store", run)
        check(points)
        assert points["mine"] == {0: 1.0}
    finally:
        mlflow.set_tracking_uri(before)


def test_a_store_that_mlflow_refuses_is_told(monkeypatch, tmp_path):
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    ampx.init("torch", dtype="bfloat16", device="cpu")
    with pytest.raises(ampx.InvalidOptionError, match=r"which MLflow refuses.*MLFLOW_ALLOW_FILE_STORE"):
        ampx.log_to(f"mlflow:{tmp_path / 'store'}")


# -- unedited scripts ----------------------------------------------------------------------------------


def test_an_unedited_script_is_logged_to_all_of_them_at_once(tmp_path):
    Path("script.py").write_text(SCRIPT)
    targets = ("tensorboard:runs/1", "wandb:ampx-tests", f"mlflow:{tmp_path / 'store'}", "run.jsonl")
    options = [word for target in targets for word in ("--log", target)]
    command = [
        sys.executable,
        "-m",
        "ampx",
        "run",
        "--dtype",
        "float16",
        "--device",
        "cpu",
        *options,
        "--log-every",
        "4",
        "script.py",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    for points in (in_tensorboard("runs/1"), in_wandb(), in_mlflow(tmp_path / "store")):
        check(points, norms=False)
    lines = [json.loads(line) for line in Path("run.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss_scale"]) for line in lines if line["event"] == "Progress"] == [
        row[:2] for row in ROWS
    ]


def test_tensorboard_by_name_imports_no_framework():
    """Where TensorFlow is installed, `ampx run` must not import it into a script of PyTorch."""
    (Path("tensorflow.py")).write_text("raise SystemExit('TensorFlow was imported')")
    look = (
        "import sys; from ampx.loggers.targets import find; find('tensorboard:runs').close(); "
        "assert not {'tensorflow', 'torch'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
