"""A training script that may be killed at any moment: it goes on from its last checkpoint.

Usage: resume_script.py FOLDER {host,device} — writes FOLDER/result.pt at the end and a line for every step.
"""

import json
import math
import pathlib
import sys
import warnings

import torch
from torch import nn

import ampx

STEPS = 48
CHECKPOINT_EVERY = 5
OVERFLOWS = {2, 9, 10, 23, 24, 37}


def save(path, content):
    """Write a file so that it is whole or absent, whenever the process dies."""
    unfinished = path.with_suffix(".tmp")
    torch.save(content, unfinished)
    unfinished.replace(path)


def main(folder, place):
    torch.set_num_threads(1)
    torch.manual_seed(1)
    hysteresis = 2 if place == "host" else 1
    amp = ampx.init("torch", dtype="float16", loss_scale=ampx.LossScale(growth_interval=4, hysteresis=hysteresis))
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.ReLU(), nn.Linear(6, 3))
    raw = torch.optim.Adam(model.parameters(), lr=0.02, fused=True)
    opt = ampx.wrap_optimizer(raw, device_scale=place == "device")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.99)
    events = []
    amp.on_event(lambda event: events.append([type(event).__name__, event.scale, event.next_scale]))
    first, trace = 0, []

    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        torch.set_rng_state(saved["rng"])
        amp.load_state_dict(json.loads(saved["amp"]))
        first, trace, events[:] = saved["step"], saved["trace"], saved["events"]

    def state(step):
        return {
            "step": step,
            "model": model.state_dict(),
            "optimizer": opt.state_dict(),
            "scheduler": scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "amp": json.dumps(amp.state_dict()),
            "trace": trace,
            "events": events,
        }

    for step in range(first, STEPS):
        x = torch.randn(8, 4)
        loss = nn.functional.cross_entropy(model(x).float(), (x.argmax(1) % 3))
        value = loss.item()
        with ampx.scale_loss(loss * math.inf if step in OVERFLOWS else loss, opt) as scaled:
            scaled.backward()
        opt.step()
        opt.zero_grad()
        scheduler.step()
        # On the device the scale is not looked at in every step: unread flags must survive a checkpoint too.
        trace.append([step, value, *((opt.last_step.applied, opt.loss_scale) if place == "host" else ())])
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()
        sys.stdin.readline()  # keeps pace with a test that is about to kill this process
        if (step + 1) % CHECKPOINT_EVERY == 0:
            save(checkpoint, state(step + 1))
    save(folder / "result.pt", state(STEPS))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
