"""What the optimizer phase costs through ampx, against torch's GradScaler: from scaled gradients to new weights.

Native: `unscale_` and `clip_grad_norm_` (where the norm is bounded), `step`, `update`. ampx: `step`. Fused optimizers,
float32 weights, the same tensors on both sides; that both come to the same weights is checked first. Gradients are
filled anew before each timing, outside of it, as backward would.

Bytes: elements that a step must read or write, four bytes each, if no cache helps. They say what ratio is to be
expected where memory is the limit; the bandwidths of the machine, and those that both sides reach, come with them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _paired import Ratio, machine, paired
from torch import nn

import ampx

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, fused=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
}
# name: tensors, shape. The first two have targets of their own; the others show how cost grows.
TARGETED: dict[str, tuple[int, tuple[int, ...]]] = {
    "50 x 1000 x 1000": (50, (1000, 1000)),
    "300 x 64 x 64": (300, (64, 64)),
}
TARGETS = {  # ratio ampx / native without and with clipping
    "50 x 1000 x 1000": (0.60, 0.45),
    "300 x 64 x 64": (0.85, 0.60),
}
COUNTS = (10, 100, 1000, 10_000)
ELEMENTS = (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
SCALE = 2.0**16
MAX_NORM = 1.0

# Elements that the kernel itself reads and writes: weights and state twice, gradients once.
_KERNEL = {"SGD": 5, "AdamW": 7}


def bytes_moved(optimizer: str, clip: bool, elements: int) -> tuple[int, int]:
    """Give the bytes that one step must move, through ampx and natively."""
    kernel = _KERNEL[optimizer]
    # Natively the check rewrites the gradients. Where they are clipped, it unscales them; then they are read for the
    # norm and rewritten. Else the kernel unscales, which makes it write the gradients.
    native = 2 + 1 + 2 + kernel if clip else 2 + kernel + 1
    # Here they are read once, and the kernel writes them; or they are unscaled, and the kernel only reads them.
    return 4 * elements * (1 + kernel + 1), 4 * elements * native


class Phase:
    """One set of tensors, one fused optimizer, and both ways to step it."""

    def __init__(self, count: int, shape: tuple[int, ...], optimizer: str, clip: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.clip = clip
        self.parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(count)]
        self.scaled = [torch.randn(shape, generator=generator) * SCALE for _ in range(count)]
        for parameter in self.parameters:
            parameter.grad = torch.empty_like(parameter)
        self.raw = OPTIMIZERS[optimizer](self.parameters)
        # Without limit on growth, so that the scale stays as it is.
        scale = ampx.LossScale(init_scale=SCALE, growth_interval=10**9)
        self.opt = ampx.wrap_optimizer(self.raw, loss_scale=scale, max_grad_norm=MAX_NORM if clip else None)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=10**9)
        self.loss = torch.ones((), requires_grad=True)

    def fill(self) -> None:
        """Put scaled gradients where backward would."""
        torch._foreach_copy_([parameter.grad for parameter in self.parameters], self.scaled)

    def before_ampx(self) -> None:
        with ampx.scale_loss(self.loss, self.opt):
            pass
        self.fill()

    def before_native(self) -> None:
        self.scaler.scale(self.loss)
        self.fill()

    def through_ampx(self) -> None:
        self.opt.step()

    def natively(self) -> None:
        if self.clip:
            self.scaler.unscale_(self.raw)
            nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.scaler.step(self.raw)
        self.scaler.update()

    def check(self) -> None:
        """Raise unless both ways lead to the same weights.

        Without clipping they are the same bits. With it they may differ by what the sum of squares of a long
        gradient loses to rounding: at most the root of its length, in units of 2**-24, of each update.
        """
        start = [parameter.detach().clone() for parameter in self.parameters[:3]]
        found = []
        for before, step in ((self.before_ampx, self.through_ampx), (self.before_native, self.natively)):
            with torch.no_grad():
                torch._foreach_copy_(self.parameters[:3], start)
            self.raw.state.clear()
            for _ in range(3):
                before()
                step()
            found.append([parameter.detach().clone() for parameter in self.parameters[:3]])
        for begin, ours, theirs in zip(start, *found, strict=True):
            moved = (theirs - begin).abs().max().item()
            tolerance = 2.0**-24 * (len(begin.view(-1)) ** 0.5 * moved + 4 * begin.abs().max().item())
            limit = tolerance if self.clip else 0.0
            assert moved > 0
            assert (ours - theirs).abs().max().item() <= limit, (ours, theirs)


def measure(count: int, shape: tuple[int, ...], optimizer: str, clip: bool, pairs: int) -> Ratio:
    """Time one set of tensors.

    Raises:
        AssertionError: The two recipes do not come to the same weights, so that a ratio would mean nothing.
    """
    with ampx.init("torch", device="cpu", dtype="bfloat16", process_wide=False):
        phase = Phase(count, shape, optimizer, clip)
        phase.check()
        return paired(
            phase.through_ampx,
            phase.natively,
            pairs=pairs,
            warmup=2,
            before_a=phase.before_ampx,
            before_b=phase.before_native,
        )


def call_overhead(pairs: int) -> Ratio:
    """Time `scale_loss` and `step` on ten tensors of four elements, where nothing counts but Python."""
    with ampx.init("torch", device="cpu", dtype="bfloat16", process_wide=False, nan_loss="skip"):
        phase = Phase(10, (2, 2), "SGD", False)

        def ours() -> None:
            with ampx.scale_loss(phase.loss, phase.opt):
                pass
            phase.opt.step()

        def theirs() -> None:
            phase.scaler.scale(phase.loss)
            phase.natively()

        return paired(ours, theirs, pairs=pairs, repeat=5, before_a=phase.fill, before_b=phase.fill)


def bandwidth(elements: int = 50_000_000, runs: int = 7) -> dict[str, float]:
    """Give the bytes a second that a plain read, and a read with a write in place, reach."""
    tensor = torch.ones(elements)

    def best(function: Callable[[], object]) -> float:
        times = []
        for _ in range(runs):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    return {
        "read": 4 * elements / best(tensor.sum),
        "read and write": 8 * elements / best(lambda: tensor.mul_(1.0)),
    }


def sizes(quick: bool) -> dict[str, tuple[int, tuple[int, ...]]]:
    """List the sets of tensors by name."""
    if quick:
        return {**TARGETED, "10 of 1000": (10, (1000,)), "1000 of 100": (1000, (100,))}
    grown = {
        f"{count} of {elements // count}": (count, (elements // count,))
        for elements in ELEMENTS
        for count in COUNTS
        if elements >= 10 * count
    }
    return {**TARGETED, **grown}


def run(quick: bool) -> list[dict[str, object]]:
    """Measure every set of tensors with every optimizer, without and with clipping."""
    rows: list[dict[str, object]] = []
    for name, (count, shape) in sizes(quick).items():
        elements = count * torch.Size(shape).numel()
        # About as long for each: short steps are timed more often.
        pairs = max(9, min(200, 200_000_000 // (elements + 20_000 * count)) // (4 if quick else 1))
        for optimizer in OPTIMIZERS:
            for clip in (False, True):
                ratio = measure(count, shape, optimizer, clip, pairs)
                ours, native = bytes_moved(optimizer, clip, elements)
                row: dict[str, object] = {
                    "tensors": name,
                    "count": count,
                    "elements": elements,
                    "optimizer": optimizer,
                    "clip": clip,
                    **ratio.to_json(),
                    "bytes_a": ours,
                    "bytes_b": native,
                    "bytes_ratio": ours / native,
                    "bandwidth_a": ours / ratio.median_a,
                    "bandwidth_b": native / ratio.median_b,
                }
                if name in TARGETS:
                    row["target"] = TARGETS[name][clip]
                rows.append(row)
    return rows


def describe(row: dict[str, object]) -> str:
    """Give one row as a line."""
    number = {key: float(str(row.get(key, "nan"))) for key in row if key not in ("tensors", "optimizer", "clip")}
    line = (
        f"{row['tensors']:>20} {row['optimizer']:6}{'clip' if row['clip'] else '':5}"
        f"ampx {number['median_a'] * 1e3:9.3f} ms  native {number['median_b'] * 1e3:9.3f} ms  "
        f"ratio {number['ratio']:.3f} [{number['ratio_low']:.3f}, {number['ratio_high']:.3f}]  "
        f"bytes {number['bytes_ratio']:.3f}  "
        f"{number['bandwidth_a'] / 1e9:5.1f} and {number['bandwidth_b'] / 1e9:5.1f} GB/s"
    )
    return line + (f"  target {number['target']:.2f}" if "target" in row else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", default=bool(os.environ.get("QUICK")))
    parser.add_argument("--threads", type=int, default=1, help="of torch; one leaves the rest of the machine out of it")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    overhead = call_overhead(50 if arguments.quick else 200)
    results = {
        "machine": {**machine(), "torch": torch.__version__, "threads": torch.get_num_threads()},
        "quick": arguments.quick,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "bandwidth": bandwidth(),
        "call_overhead": overhead.to_json(),
        "optimizer_phase": run(arguments.quick),
    }
    for row in results["optimizer_phase"]:
        print(describe(row))
    print(
        f"scale_loss and step, 10 tensors of 4 elements: ampx {overhead.median_a * 1e6:.0f} us, native "
        f"{overhead.median_b * 1e6:.0f} us, ratio {overhead.ratio:.3f} "
        f"[{overhead.ratio_low:.3f}, {overhead.ratio_high:.3f}]"
    )
    print({name: f"{value / 1e9:.1f} GB/s" for name, value in results["bandwidth"].items()})
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
