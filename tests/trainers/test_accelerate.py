"""Accelerate, and Hugging Face Trainer, with ampx attached, and what they do wrong by themselves.

The oracle is arithmetic: a parameter's gradient is what the batch says, loss scales are powers of two. Accelerate
computes float16 on GPUs only; `native` gives it there what it has on one.
"""

import os
import pathlib

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import Trainer, TrainingArguments

import ampx
from ampx.errors import InvalidOptionError, ProtocolError, UnsupportedByBackendError
from ampx_torch.trainers.accelerate import attach
from processes import run_python

INF = float("inf")
RATE = 0.25
BOTH = pytest.mark.parametrize("way", ["native", "ampx"])


def native(accelerator):
    """Give an Accelerator on the CPU what it has on a GPU."""
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    return accelerator.scaler


def accelerator_of(way, amp, **options):
    accelerator = Accelerator(mixed_precision="fp16", cpu=True, **options)
    return accelerator, native(accelerator) if way == "native" else attach(accelerator, amp)


class Weights(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))
        self.dtype = None

    def forward(self, slope):
        self.dtype = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        return self.w * slope


def prepared(accelerator, make=torch.optim.SGD, **options):
    model = Weights()
    return accelerator.prepare(model, make(model.parameters(), lr=RATE, **options))


def test_on_a_cpu_accelerates_fp16_is_float32_and_ampx_makes_it_float16(amp):
    plain, _ = prepared(Accelerator(mixed_precision="fp16", cpu=True))
    plain(1.0)
    accelerator, _ = accelerator_of("ampx", amp)
    model, _ = prepared(accelerator)
    model(1.0)
    assert (plain.dtype, model.dtype) == (torch.float32, torch.float16)


@BOTH
def test_the_second_optimizer_is_not_divided_by_another_scale_when_the_first_overflows(way, amp):
    accelerator, _ = accelerator_of(way, amp)
    (first, first_optimizer), (second, second_optimizer) = prepared(accelerator), prepared(accelerator)
    accelerator.backward(first(INF))
    accelerator.backward(second(1.0))
    first_optimizer.step()
    second_optimizer.step()
    assert first.w.item() == 0.0
    assert second.w.item() == -RATE * (2.0 if way == "native" else 1.0)


@BOTH
def test_a_fused_optimizer_tells_that_it_skipped_and_its_scheduler_waits(way, amp):
    accelerator, _ = accelerator_of(way, amp)
    model, optimizer = prepared(accelerator, fused=True)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, 0.5))
    skipped, rates = [], []
    for slope in (1.0, INF, 1.0):
        accelerator.backward(model(slope))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
        rates.append(scheduler.get_last_lr()[0])
    assert model.w.item() == -(0.25 + rates[1])
    if way == "native":  # the kernel skips by itself, and Accelerate asks whether `step` was called
        assert (skipped, rates) == ([False, False, False], [0.125, 0.0625, 0.03125])
    else:
        assert (skipped, rates) == ([False, True, False], [0.125, 0.125, 0.0625])


@BOTH
def test_two_models_are_clipped_in_one_iteration(way, amp):
    accelerator, scaler = accelerator_of(way, amp)
    (first, first_optimizer), (second, second_optimizer) = prepared(accelerator), prepared(accelerator)
    accelerator.backward(first(2.0))
    assert accelerator.clip_grad_norm_(first.parameters(), 0.5).item() == 2.0
    first_optimizer.step()
    accelerator.backward(second(4.0))
    if way == "native":
        native_error = "unscale_.. has already been called|No inf checks"
        accelerator.backward(first(1.0))
        accelerator.clip_grad_norm_(first.parameters(), 0.5)
        with pytest.raises(RuntimeError, match=native_error):
            accelerator.clip_grad_norm_(second.parameters(), 0.5)
        return
    accelerator.clip_grad_norm_(first.parameters(), 0.5)
    assert accelerator.clip_grad_norm_(second.parameters(), 0.5).item() == 4.0
    second_optimizer.step()
    assert [model.w.item() for model in (first, second)] == pytest.approx([-RATE * 0.5, -RATE * 0.5], rel=1e-5)
    assert scaler.wrapped(second_optimizer).last_step.applied


def test_a_loss_carries_the_scale_of_the_optimizer_that_it_reaches(amp):
    accelerator, scaler = accelerator_of("ampx", amp)
    (first, first_optimizer), (second, second_optimizer) = prepared(accelerator), prepared(accelerator)
    for model, optimizer, slope in ((first, first_optimizer, INF), (second, second_optimizer, 1.0)):
        accelerator.backward(model(slope))
        optimizer.step()
    assert [scaler.wrapped(opt).loss_scale for opt in (first_optimizer, second_optimizer)] == [512.0, 1024.0]
    assert scaler.wrapped(second_optimizer).last_step.scale == 1024.0  # not the smaller one of the other


def test_a_loss_that_comes_after_clipping_is_added_to_true_gradients(amp):
    accelerator, _ = accelerator_of("ampx", amp)
    (first, first_optimizer), (second, second_optimizer) = prepared(accelerator), prepared(accelerator)
    accelerator.backward(first(2.0) + second(1.0))
    accelerator.clip_grad_norm_(first.parameters(), 8.0)  # which unscales the second one's, too
    accelerator.backward(second(1.0))
    first_optimizer.step()
    second_optimizer.step()
    assert (first.w.item(), second.w.item()) == (-RATE * 2.0, -RATE * 2.0)


def test_a_window_that_overflows_is_dropped_as_a_whole(amp):
    accelerator, scaler = accelerator_of("ampx", amp, gradient_accumulation_steps=2)
    model, optimizer = prepared(accelerator)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, 0.5))
    norms, weights = [], []
    for slope in (1.0, 2.0, INF, 1.0, 0.25, 0.25):
        with accelerator.accumulate(model):
            accelerator.backward(model(slope))
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        weights.append(model.w.item())
    assert norms == [1.5, INF, 0.25]
    expected = [0.0, -0.125, -0.125, -0.125, -0.125, -0.125 - 0.125 * 0.25]
    assert weights == pytest.approx(expected, rel=1e-5)
    assert scheduler.get_last_lr() == [0.0625]
    assert scaler.get_scale() == 512.0


def test_states_are_saved_and_loaded(amp, tmp_path):
    def start():
        accelerator, scaler = accelerator_of("ampx", amp)
        return accelerator, scaler, *prepared(accelerator, momentum=0.5)

    def train(accelerator, model, optimizer, slopes):
        for slope in slopes:
            accelerator.backward(model(slope))
            optimizer.step()
            optimizer.zero_grad()

    whole = start()
    train(whole[0], *whole[2:], (1.0, INF, 1.0, 2.0, 1.0))
    first = start()
    train(first[0], *first[2:], (1.0, INF))
    first[0].save_state(tmp_path / "state")
    second = start()
    second[0].load_state(tmp_path / "state")
    train(second[0], *second[2:], (1.0, 2.0, 1.0))
    assert second[2].w.item() == whole[2].w.item()
    assert second[1].state_dict() == whole[1].state_dict()
    # By the specification: 1024, halved, doubled after two finite steps in a row.
    assert second[1].get_scale() == 1024.0


def test_the_scale_of_a_run_without_ampx_is_taken_over(amp, tmp_path):
    accelerator, _ = accelerator_of("native", amp)
    model, optimizer = prepared(accelerator)
    accelerator.backward(model(INF))
    optimizer.step()
    accelerator.save_state(tmp_path / "state")
    accelerator, scaler = accelerator_of("ampx", amp)
    prepared(accelerator)
    accelerator.load_state(tmp_path / "state")
    assert scaler.get_scale() == 512.0


def test_what_cannot_be_attached_is_refused(amp, monkeypatch):
    with pytest.raises(InvalidOptionError, match="Linear"):
        attach(torch.nn.Linear(1, 1), amp)
    for precision in ("no", "bf16"):
        with pytest.raises(InvalidOptionError, match=f"mixed_precision='{precision}'"):
            attach(Accelerator(mixed_precision=precision, cpu=True), amp)
        Accelerator().state._reset_state(True)
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "distributed_type", DistributedType.DEEPSPEED)
        with pytest.raises(UnsupportedByBackendError, match="DEEPSPEED"):
            attach(accelerator, amp)
    prepared(accelerator)
    with pytest.raises(ProtocolError, match="prepared"):
        attach(accelerator, amp)


ON_CUDA = """
import pathlib, sys
import simulated_cuda
simulated_cuda.start(pathlib.Path(sys.argv[1]))
import ampx, torch
from accelerate import Accelerator
from ampx_torch.trainers.accelerate import attach
amp = ampx.init("torch", dtype="float16", process_wide=False, nan_loss="skip")
accelerator = Accelerator(mixed_precision="fp16")
attach(accelerator, amp)
weight = torch.nn.Parameter(torch.zeros(2, device="cuda"))
optimizer = accelerator.prepare(torch.optim.AdamW([weight], fused=True))
for slope in (1.0, float("inf"), 1.0):
    accelerator.backward((weight * slope).sum())
    optimizer.step()
    optimizer.zero_grad()
    print(optimizer.step_was_skipped)
"""


def test_on_a_gpu_a_fused_optimizer_tells_that_it_skipped(simulated_cuda_folder):
    """Where ampx has the scale on the device by itself, and the kernel skips: here the host is asked."""
    kit = pathlib.Path(__file__).parent.parent / "kit"
    path = os.pathsep.join([str(kit), os.environ.get("PYTHONPATH", "")])
    done = run_python("-c", ON_CUDA, simulated_cuda_folder, fresh=True, check=True, PYTHONPATH=path)
    assert done.stdout.split() == ["False", "True", "False"]


# -- Trainer ---------------------------------------------------------------------------------------


class Losses(torch.nn.Module):
    """The gradient of its parameter is the mean of what the batch says."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))
        self.dtypes = set()

    def forward(self, slope):
        self.dtypes.add((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        return {"loss": (self.w * slope).mean()}


def trainer_of(amp, folder, slopes, **options):
    arguments = {"max_grad_norm": 0.0, "lr_scheduler_type": "constant", "save_strategy": "no", **options}
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=1,
        learning_rate=RATE,
        optim="sgd",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        fp16=True,
        train_sampling_strategy="sequential",
        logging_steps=1,
        **arguments,
    )
    trainer = Trainer(Losses(), arguments, train_dataset=[{"slope": torch.tensor(slope)} for slope in slopes])
    return trainer, None if amp is None else attach(trainer, amp)


def test_on_a_cpu_a_trainers_fp16_is_float32_and_ampx_makes_it_float16(amp, tmp_path):
    dtypes = []
    for session in (None, amp):
        trainer, _ = trainer_of(session, tmp_path, [1.0], max_steps=1)
        trainer.train()
        dtypes.append(trainer.model.dtypes)
    assert dtypes == [{torch.float32}, {torch.float16}]


def test_a_trainer_clips_true_gradients_and_drops_a_window_that_overflows(amp, tmp_path):
    slopes = [1.0, 2.0, INF, 1.0, 0.25, 0.25]
    trainer, scaler = trainer_of(
        amp,
        tmp_path,
        slopes,
        num_train_epochs=1,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        lr_scheduler_type="linear",
    )
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert [entry["grad_norm"] for entry in log] == [1.5, INF, 0.25]
    # The rate falls by a third after each applied step: the third one has that of the second.
    assert [entry["learning_rate"] for entry in log] == pytest.approx([RATE, RATE * 2 / 3, RATE * 2 / 3])
    assert trainer.model.w.item() == pytest.approx(-RATE * (0.5 + 2 / 3 * 0.25), rel=1e-5)
    assert scaler.get_scale() == 512.0


def test_a_trainer_that_is_resumed_ends_as_one_that_was_not_interrupted(amp, tmp_path):
    slopes = [1.0, INF, 1.0, 2.0, 1.0, INF]

    def train(folder, **options):
        trainer, scaler = trainer_of(amp, folder, slopes, num_train_epochs=1, save_strategy="steps", save_steps=3)
        trainer.train(**options)
        return trainer.model.w.item(), scaler.state_dict()

    whole = train(tmp_path / "whole")
    resumed = train(tmp_path / "resumed", resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert resumed == whole
    assert whole[0] == -RATE * (1.0 + 1.0 + 2.0 + 1.0)
    # By the specification: 1024, halved, doubled after two finite steps in a row, one more, halved.
    assert whole[1]["groups"][0]["losses"][0]["scale"] == 512.0


def test_a_trainer_may_train_twice(amp, tmp_path):
    trainer, scaler = trainer_of(amp, tmp_path, [1.0, INF], num_train_epochs=1)
    trainer.train()
    trainer.train()
    assert len(scaler.state_dict()["groups"]) == 1
    assert trainer.model.w.item() == -RATE * 2


def test_bfloat16_needs_no_scale(tmp_path):
    amp = ampx.init("torch", dtype="bfloat16", device="cpu", process_wide=False)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    scaler = attach(accelerator, amp)
    model, optimizer = prepared(accelerator)
    accelerator.backward(model(1.0))
    optimizer.step()
    assert (model.dtype, model.w.item(), scaler.get_scale()) == (torch.bfloat16, -RATE, 1.0)
