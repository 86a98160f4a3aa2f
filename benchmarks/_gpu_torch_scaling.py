"""The loss scale on the device: its trace, its skips, its recovery, its state."""

from __future__ import annotations

import copy
import json

import torch
from _gpu_checks import Figure, Setup, require
from _gpu_torch_steps import PATTERN, REFERENCE, backward, bits, by_hand, mlp, optimizers, same, through_ampx

import ampx


def scale_trace_is_the_reference(setup: Setup) -> Figure:
    """Every kind of optimizer, the scale on the host and on the device: always the specified trace."""
    tried = []
    config = ampx.LossScale(growth_interval=3)
    for name, (make, places) in optimizers(setup.device).items():
        for device_scale in places:
            with ampx.init("torch", device=setup.device, dtype="bfloat16", loss_scale=config) as amp:
                torch.manual_seed(0)
                model = mlp().to(setup.device)
                opt = amp.wrap_optimizer(make(model.parameters()), device_scale=device_scale)
                events: list[ampx.Event] = []
                amp.on_event(events.append)
                x, trace = torch.randn(8, 16, device=setup.device), []
                for overflow in PATTERN:
                    backward(model, opt, x, bool(overflow))
                    opt.step()
                    opt.zero_grad()
                    trace.append(opt.loss_scale)
                require(trace == REFERENCE, f"{name}, device_scale={device_scale}: {trace}, not {REFERENCE}")
                skipped = [event.step - 1 for event in events if isinstance(event, ampx.StepSkipped)]
                wanted = [step for step, overflow in enumerate(PATTERN) if overflow]
                require(skipped == wanted, f"{name}, device_scale={device_scale}: skipped {skipped}, not {wanted}")
            tried.append(f"{name} {device_scale}")
    return Figure(f"{len(tried)} optimizers and places of the scale", {"tried": tried})


def skipped_step_changes_nothing(setup: Setup) -> Figure:
    """Weights, moments and step counters keep their bits on overflow; the next finite step moves them."""
    tried = []
    for name, (make, places) in optimizers(setup.device).items():
        for device_scale in places:
            with ampx.init("torch", device=setup.device, dtype="bfloat16", loss_scale="dynamic") as amp:
                torch.manual_seed(0)
                model = mlp().to(setup.device)
                opt = amp.wrap_optimizer(make(model.parameters()), device_scale=device_scale, max_grad_norm=1.0)
                x = torch.randn(8, 16, device=setup.device)
                snapshots = []
                for overflow in (False, True, True, False):
                    backward(model, opt, x, overflow)
                    opt.step()
                    opt.zero_grad()
                    snapshots.append(bits(model, opt))
                first, second, third, fourth = snapshots
                label = f"{name}, device_scale={device_scale}"
                require(same(first, second) and same(first, third), f"{label}: a skipped step changed something")
                require(not same(third, fourth), f"{label}: the finite step after the skips changed nothing")
                require(
                    all(bool(torch.isfinite(tensor).all()) for tensor in fourth), f"{label}: something is not finite"
                )
            tried.append(label)
    return Figure(f"{len(tried)} optimizers and places of the scale, all bits kept", {"tried": tried})


def float16_overflow_recovers_as_grad_scaler_does(setup: Setup) -> Figure:
    """From a scale that is far too large: the same skips, scales and losses as torch's GradScaler."""
    init_scale, steps = 2.0**40, 24 if setup.quick else 60
    torch.manual_seed(0)
    model = mlp().to(setup.device)
    other = copy.deepcopy(model)
    x = torch.randn(32, 16, device=setup.device)
    y = x[:, :4].argmax(1)
    scaler = torch.amp.GradScaler(setup.device, init_scale=init_scale)
    raw, theirs = torch.optim.Adam(other.parameters(), lr=1e-2), []
    for _ in range(steps):
        loss = by_hand(other, raw, scaler, x, y, torch.float16)
        theirs.append((loss.item(), scaler.get_scale()))
    config = ampx.LossScale(init_scale=init_scale, max_scale=2.0**100)
    with ampx.init("torch", device=setup.device, dtype="float16", loss_scale=config) as amp:
        opt, ours = amp.wrap_optimizer(torch.optim.Adam(model.parameters(), lr=1e-2)), []
        for _ in range(steps):
            loss = through_ampx(model, opt, x, y)
            ours.append((loss.item(), opt.loss_scale))
    require(ours == theirs, f"the runs differ: {ours[:30]} against {theirs[:30]}")
    skipped = sum(loss == ours[0][0] for loss, _ in ours) - 1
    require(skipped > 0, "nothing overflowed, so nothing was shown")
    require(ours[-1][0] < ours[0][0], f"the loss did not go down: {ours[0][0]} → {ours[-1][0]}")
    return Figure(
        f"{skipped} skips, scale 2^40 → {ours[-1][1]:g}, loss {ours[0][0]:.3f} → {ours[-1][0]:.3f}, equal bit by bit",
        {"skipped": skipped, "final_scale": ours[-1][1], "losses": [ours[0][0], ours[-1][0]]},
    )


def resumed_run_is_bit_identical(setup: Setup) -> Figure:
    """Stop after seven of fourteen steps, resume from JSON and state dicts: weights, state and scale are the same."""
    places = [("Adam foreach", None), ("Adam fused", False), ("Adam fused", True)]
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(setup.device)

    def train(name: str, device_scale: bool | None, pause_at: int | None) -> tuple[list[torch.Tensor], object]:
        make, _ = optimizers(setup.device)[name]
        config = ampx.LossScale(growth_interval=3)
        with ampx.init("torch", device=setup.device, dtype="bfloat16", loss_scale=config) as amp:
            torch.manual_seed(0)
            model = mlp().to(setup.device)
            opt = amp.wrap_optimizer(make(model.parameters()), device_scale=device_scale)
            for step, overflow in enumerate(PATTERN):
                if step == pause_at:
                    saved = copy.deepcopy((model.state_dict(), opt.state_dict())), json.dumps(amp.state_dict())
                    del opt
                    model = mlp().to(setup.device)
                    opt = amp.wrap_optimizer(make(model.parameters()), device_scale=device_scale)
                    model.load_state_dict(saved[0][0])
                    opt.load_state_dict(saved[0][1])
                    amp.load_state_dict(json.loads(saved[1]))
                backward(model, opt, x, bool(overflow))
                opt.step()
                opt.zero_grad()
            return bits(model, opt), amp.state_dict()

    for name, device_scale in places:
        whole, resumed = train(name, device_scale, None), train(name, device_scale, 7)
        label = f"{name}, device_scale={device_scale}"
        require(same(whole[0], resumed[0]), f"{label}: weights or optimizer state differ after resuming")
        require(whole[1] == resumed[1], f"{label}: the loss scale differs after resuming: {resumed[1]}")
    return Figure(f"{len(places)} optimizers and places of the scale")
